"""What a decode step costs besides the model: operations and calls are counted, not timed.

Numbers are of a steady decode step of `Runner.run` on a CPU, in which no row begins or ends. They may fall;
if one rises, a step does something that it did not do before.
"""

import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchsched import AdmittedRow, StepPlan
from collectives import LocalCommunicator
from enginecore.executor.step import StepInput
from enginecore.grammars import Grammars
from enginecore.logits_processors import LogitsProcessor
from enginecore.messages import Guide, RowSampling
from enginecore.sampling_params import SamplingParams
from enginecore.worker.runner.runner import Runner
from enginecore.worker.sampling import logprobs
from enginecore.worker.sampling.guides import Guides
from enginecore.worker.sampling.processors import Registered
from enginecore.worker.sampling.sampler import SamplingRows, sample, sample_with_everything
from enginecore.worker.sampling.state import SamplingState
from kvblocks import TableChanges
from pagedattn import KVLayout, allocate
from steps import NO_COPIES, ids

MOST_ROWS = 64
VOCAB = 500
BLOCK = 4
PROMPT = 3

GREEDY = {"temperature": 0.0}
PLAIN = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
CHANGED = {
    "temperature": 0.8,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "logit_bias": {7: 1.0, 9: -2.0},
    "min_tokens": 50,
    "max_tokens": 60,
}
RESTRICTED = {"temperature": 0.8, "allowed_token_ids": [1, 2, 3, 4, 5]}
LOGPROBS = {"temperature": 0.0, "logprobs": 3}


class Counted(NamedTuple):
    operations: int
    calls: int


class Logits:
    """A model whose hidden states are its logits, the same at every position of a number of tokens."""

    first = last = True

    def __init__(self, dtype):
        self.spec = SimpleNamespace(dynamic_length=None, vocab_size=VOCAB)
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(MOST_ROWS * PROMPT, VOCAB, generator=generator).to(dtype)

    def layer_inputs(self, inputs, *others):
        return (inputs,)

    def run_layers(self, inputs, *others):
        return (self._logits[: len(inputs[0])],)

    def hidden(self, outputs):
        return outputs[0]

    def logits(self, hidden):
        return hidden


class Operations(TorchDispatchMode):
    """Counts the operations that Python has torch do."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Results(TorchDispatchMode):
    """Keeps the size in bytes of each tensor that an operation makes: those of no input's storage."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for tensor in made if isinstance(made, tuple) else [made]:
            if tensor.untyped_storage().data_ptr() not in known:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return made


def make_runner(rows, dtype, processors=(), guides=None):
    comm = LocalCommunicator()
    cache = allocate(KVLayout(1, 1, 8, BLOCK, torch.float32), 4, "cpu")
    return Runner(
        Logits(dtype),
        cache,
        None,
        comm,
        comm,
        comm,
        dtype=dtype,
        max_rows=rows,
        max_len=PROMPT + 10,
        processors=processors,
        guides=guides,
    )


def admitting(rows, settings, bad_words, guided=0):
    """The step in which all rows run their prompts."""
    every = np.arange(rows, dtype=np.int32)
    zeros, counts = np.zeros(rows, np.int32), np.full(rows, PROMPT, np.int32)
    admitted = [AdmittedRow(row, row, ids(1, 2, 3), PROMPT, 0, False, 0.0) for row in range(rows)]
    plan = StepPlan(1, every, zeros, counts, zeros == 0, admitted, ids(), ids(), ids())
    guides = [Guide("start: /[a-z]+/", True) if row < guided else None for row in range(rows)]
    params = SamplingParams(**settings)
    sampling = [
        RowSampling(params, [0], bad_words, row, guide=guide) for row, guide in zip(range(rows), guides)
    ]
    where = (every.repeat(4), np.tile(ids(0, 1, 2, 3), rows), np.arange(4 * rows, dtype=np.int32))
    return StepInput(plan, sampling, TableChanges(*where), NO_COPIES)


def decoding(rows, number):
    every = np.arange(rows, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    plan = StepPlan(number, every, every * 0 + PROMPT + number - 2, ones, ones > 0, [], ids(), ids(), ids())
    return StepInput(plan, [], TableChanges(ids(), ids(), ids()), NO_COPIES)


def drafting(rows, number):
    """As `decoding`, with two drafts in each row."""
    step = decoding(rows, number)
    every = step.plan.rows
    drafts = {"num_drafts": every * 0 + 2, "drafts": np.repeat(every, 2), "counts": every * 0 + 3}
    return step._replace(plan=step.plan._replace(**drafts))


def count_step(rows, settings, bad_words=(), dtype=torch.bfloat16, decoding=decoding, processors=()):
    runner = make_runner(rows, dtype, processors)
    runner.run(admitting(rows, settings, [list(word) for word in bad_words]))
    # The first decode step makes the settings' columns.
    runner.run(decoding(rows, 2)).result()
    with Operations() as operations:
        runner.run(decoding(rows, 3))
    calls = 0

    def on_event(_, event, __):
        nonlocal calls
        calls += event in ("call", "c_call")

    step = decoding(rows, 4)
    sys.setprofile(on_event)
    try:
        runner.run(step).result()
    finally:
        sys.setprofile(None)
    return Counted(operations.count, calls)


# Most operations, and most calls of functions of Python and C, of a step.
CASES = {
    "greedy": (GREEDY, (), 15, 202),
    "plain sampling": (PLAIN, (), 15, 202),
    "penalties, bias and minimum length": (CHANGED, (), 67, 241),
    "bad words and allowed ids": (RESTRICTED, ((3,), (2, 4)), 41, 220),
}


@pytest.mark.parametrize(("settings", "bad_words", "operations", "calls"), CASES.values(), ids=CASES)
def test_a_step_costs_as_many_operations_whatever_the_rows(settings, bad_words, operations, calls):
    one, two, many = (count_step(rows, settings, bad_words) for rows in (1, 2, MOST_ROWS))
    # One row is no batch whose rows could share a prefix.
    assert one.operations <= operations
    assert one.calls <= calls
    assert many == two
    assert many.operations <= operations
    assert many.calls <= calls


def count_guided(rows, guided, settings, byte_tokenizer):
    """Operations of a decode step of which the first `guided` rows follow a grammar, started and drawn."""
    guides = Guides(rows, lambda: Grammars(byte_tokenizer, VOCAB, [257]), threads=1)
    runner = make_runner(rows, torch.bfloat16, guides=guides)
    runner.run(admitting(rows, settings, [], guided))
    runner.run(decoding(rows, 2)).result()
    with Operations() as operations:
        runner.run(decoding(rows, 3))
    return operations.count


@pytest.mark.parametrize("settings", [GREEDY, PLAIN], ids=["greedy", "plain"])
def test_grammars_cost_a_step_as_many_operations_whatever_the_rows(settings, byte_tokenizer):
    """Where no row has one they cost none, and else the mask, its way to the device, and its rows."""
    none = count_guided(2, 0, settings, byte_tokenizer)
    assert none == count_guided(MOST_ROWS, 0, settings, byte_tokenizer)
    assert none == count_step(2, settings).operations
    some = count_guided(2, 1, settings, byte_tokenizer)
    assert some == count_guided(MOST_ROWS, 40, settings, byte_tokenizer) <= none + 7
    assert count_guided(MOST_ROWS, MOST_ROWS, settings, byte_tokenizer) <= some


def test_log_probabilities_cost_as_many_operations_whatever_the_rows():
    two, many = (count_step(rows, LOGPROBS) for rows in (2, MOST_ROWS))
    assert two.operations == many.operations <= 39


class Doubles(LogitsProcessor):
    def add(self, row, params):
        return params.extra_args is not None

    def apply(self, logits, positions):
        return logits * 2


def test_a_registered_processor_costs_as_many_operations_whatever_the_rows_and_others_nothing():
    made = [Registered("Doubles", Doubles(MOST_ROWS, VOCAB, torch.device("cpu")))]
    assert count_step(MOST_ROWS, GREEDY, processors=made) == count_step(MOST_ROWS, GREEDY)
    doubled = {**GREEDY, "extra_args": {}}
    two, many = (count_step(rows, doubled, processors=made) for rows in (2, MOST_ROWS))
    assert two == many
    assert many.operations <= 35


@pytest.mark.parametrize("settings", [GREEDY, PLAIN, CHANGED], ids=["greedy", "sampled", "changed"])
def test_drafts_cost_a_few_operations_whatever_the_rows(settings):
    plain = count_step(2, settings)
    two, many = (count_step(rows, settings, decoding=drafting) for rows in (2, MOST_ROWS))
    assert many == two
    assert many.operations <= plain.operations + 7
    assert many.calls <= plain.calls + 110


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_log_probabilities_copy_the_logits_of_a_piece_once_in_float32(dtype, copies, monkeypatch):
    monkeypatch.setattr(logprobs, "PIECE", 4 * VOCAB)
    logits = torch.zeros(9, VOCAB, dtype=dtype)
    counts = np.array([9])
    columns = logprobs.LogprobColumns(counts, counts, 3, VOCAB, logits.device)
    with Results() as results:
        columns.write(0, logits, torch.arange(9))
    widest = [size for size in results.sizes if size >= VOCAB]
    # Half precision is widened first, which a device does on the way.
    assert sorted(widest) == [1 * VOCAB * 4] * copies + [4 * VOCAB * 4] * 2 * copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_logprobs", [0, 20, -1])
def test_what_is_measured_at_start_runs(dtype, max_logprobs):
    sample_with_everything(torch.zeros(5, VOCAB, dtype=dtype), max_logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_is_read_back_from_the_device(dtype):
    device = torch.device("meta")  # which raises an error if one is
    state = SamplingState(MOST_ROWS)
    every = np.arange(MOST_ROWS, dtype=np.int32)
    for row, settings in zip(every.tolist(), [CHANGED, RESTRICTED, GREEDY] * MOST_ROWS):
        params = SamplingParams(**settings | GREEDY)
        state.set(row, 2, RowSampling(params, [1], [[2], [3, 4]], row))
    tokens = torch.zeros(MOST_ROWS, 10, dtype=torch.int32, device=device)
    logits = torch.zeros(MOST_ROWS, VOCAB, dtype=dtype, device=device)
    sampled = sample(logits, SamplingRows.upload(every, every % 5 + 3, device), tokens, state)
    assert sampled.tokens.shape == (MOST_ROWS,)
