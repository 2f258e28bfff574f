"""The package needs numpy and nothing else, and a step of decodes costs no Python a row."""

import subprocess
import sys

import numpy as np

from batchsched import StepResult


def test_it_imports_neither_torch_nor_its_siblings():
    code = (
        "import sys, batchsched; "
        "names = {'torch', 'triton', 'transformers', 'kvblocks', 'pagedattn', 'collectives', 'enginecore'}; "
        "print(sorted(names & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


class NoMemory:
    """Takes no time and runs no Python a row."""

    block_size, num_blocks, num_free = 16, 10**6, 10**6

    def nothing(self, *arguments, **options):
        return 0

    prefix = open = needed = grow = computed = close = nothing

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
