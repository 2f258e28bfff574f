"""The programs in the READMEs and in docs/ pass mypy and ty, strictly, as a user's project sees them."""

import dataclasses
import re
import subprocess
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

import pytest

from enginecore.config import EngineConfig, EngineOptions

ROOT = Path(__file__).parents[2]
WRITTEN = [ROOT / "README.md", *sorted(ROOT.glob("*/*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
MYPY = [sys.executable, "-m", "mypy", "--strict", "--untyped-calls-exclude=torch"]
# `override` needs Python 3.12; parts of torch.distributed are there only where it was built with them.
_PASSED_OVER = ["--ignore", "missing-override-decorator", "--ignore", "possibly-missing-attribute"]
_STRICT = ["--error", "all", *_PASSED_OVER, "--output-format", "concise", "--python", sys.prefix]
TY = [str(Path(sys.executable).with_name("ty")), "check", *_STRICT]

WRONG = """
from batchsched import Limits, Request, Scheduler
from enginecore import LLM

LLM("demo", max_num_sqs=3)
LLM("demo", max_num_seqs="3")
Request(0, "text", 3)
Scheduler(Limits(1, 1, 2), object())
"""
"""Lines 5 to 8 are wrong. Of an unknown keyword, line 5, ty knows nothing yet."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with every program: each Python block that begins with an import."""
    folder = tmp_path_factory.mktemp("project")
    for path in WRITTEN:
        for index, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)):
            if re.match(r"(import|from)\b", block):
                stem = "_".join(path.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
                (folder / f"{stem}_{index}.py").write_text(block)
    assert len(list(folder.iterdir())) > 10
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where mypy keeps what it knows of torch and transformers."""
    return str(tmp_path_factory.mktemp("cache"))


def check(command, cache, *files):
    if command is MYPY:
        command = [*MYPY, "--cache-dir", cache]
    return subprocess.run(
        [*command, *map(str, files)], cwd=files[0].parent, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", [MYPY, TY], ids=["mypy", "ty"])
def test_programs_pass(command, project, cache):
    done = check(command, cache, *sorted(project.glob("*.py")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("command", "wrong"), [(MYPY, {5, 6, 7, 8}), (TY, {6, 7, 8})], ids=["mypy", "ty"])
def test_mistakes_are_found(command, wrong, cache, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    done = check(command, cache, file)
    lines = {int(line) for line in re.findall(r"wrong\.py:(\d+):", done.stdout)}
    assert lines == wrong, done.stdout + done.stderr


def test_keywords_of_llm_are_the_options():
    options = typing.get_type_hints(EngineOptions)
    fields = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    kinds = {name: kind for name, kind in typing.get_type_hints(EngineConfig).items() if name in fields}
    lists = {name: Sequence[str] for name, kind in kinds.items() if kind == tuple[str, ...]}
    assert options == kinds | lists
