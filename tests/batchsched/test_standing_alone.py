"""The package needs numpy and nothing else, and a step of decodes costs no Python a row."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from batchsched import StepResult

README = Path(__file__).parents[2] / "packages/batchsched/README.md"


def test_it_imports_neither_torch_nor_its_siblings():
    code = (
        "import sys, batchsched; "
        "names = {'torch', 'triton', 'transformers', 'kvblocks', 'pagedattn', 'collectives', 'enginecore'}; "
        "print(sorted(names & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_first_example_of_the_readme_runs_as_written():
    text = README.read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # The first prompt has 9 tokens, 8 fit the budget; the second has 1.
    lines = [line.strip() for line in ran.stdout.splitlines()]
    assert lines[:4] == [
        "1 (0, 0, 8, False)",
        "",
        "2 (0, 8, 1, True) (1, 0, 1, True)",
        "(0, 'j', 0) (1, 'b', 0)",
    ]


class NoMemory:
    """Runs no Python a row."""

    block_size, num_blocks, num_free = 16, 10**6, 10**6

    def zero(self, *arguments, **options):
        return 0

    prefix = blocks_for = allocate = needed = grow = commit = free = zero

    def fits(self, prefix, length, reserve):
        return True


def lines_of_decode_steps(engine_on, rows):
    e = engine_on(NoMemory(), max_num_seqs=rows, max_num_batched_tokens=2 * rows)
    for handle in range(rows):
        e.add(handle, prompt=2, max_tokens=50, stop_ids=(1000,))
    tokens = np.zeros(rows, np.int32)
    plan = e.scheduler.plan()
    e.scheduler.commit(StepResult(plan.step, tokens))
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        for _ in range(3):
            plan = e.scheduler.plan()
            e.scheduler.commit(StepResult(plan.step, tokens))
    finally:
        sys.settrace(None)
    assert plan.rows.size == rows
    return lines


def test_a_step_of_decodes_runs_as_much_python_for_many_rows_as_for_few(engine_on):
    assert lines_of_decode_steps(engine_on, 500) == lines_of_decode_steps(engine_on, 5)
