import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages/kvblocks/README.md"


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_torch_is_not_imported():
    loaded = run("import sys, kvblocks; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert "numpy" in loaded
    assert not {"torch", "triton", "transformers"} & set(loaded)


def test_the_readme_program_does_what_it_says():
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    lines = run(program[1]).splitlines()
    assert lines[0].startswith("row 0: compute tokens 0 to 8,")
    assert lines[1].startswith("row 1: compute tokens 8 to 9,")
    assert lines[2:5] == [
        "[[ 0  1  2 -1]",
        " [ 0  1  3 -1]] 2 CacheStats(queries=19, hits=8, restored=0)",
        "5 blocks were requested and 2 are free",
    ]
    assert lines[5].startswith("6 BlockStored(block=0, key=")


def test_the_readme_program_with_two_tiers_does_what_it_says():
    program = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert run(program).splitlines() == [
        "True 4",
        "6 CopyList(sources=array([1], dtype=int32), destinations=array([1], dtype=int32))",
    ]
