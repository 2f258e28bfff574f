"""Requests whose engine core dies go on elsewhere, with the outputs of a run that nothing disturbed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import byte_tokenizer
from checkpoints import llama_config, save_random
from cores import start_core
from enginecore.config import make_config
from enginecore.core.engine_core import EngineCore
from enginecore.executor.step import StepInput
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.request_state import RequestState
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.messages import AddRequest, Outputs, RowSampling
from enginecore.model_files import locate
from enginecore.outputs import Logprob, RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams

MODEL_LEN = 96
BLOCK_GIB = 2 * 2 * 2 * 16 * 16 * 4 / 2**30
"""A block of the model: layers, keys and values, heads, tokens, channels, bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


@dataclass
class Answer:
    """What a request's caller has got so far, its outputs put together."""

    texts: dict[int, str] = field(default_factory=dict)
    """By sample, as all that follow."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)
    cumulative: dict[int, float | None] = field(default_factory=dict)
    ends: dict[int, tuple[str | None, int | str | None]] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    cached: int | None = None

    def take(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        for sample in output.outputs:
            index, delta = sample.index, kind is RequestOutputKind.DELTA
            self.texts[index] = (self.texts.get(index, "") if delta else "") + sample.text
            self.tokens[index] = (self.tokens.get(index, []) if delta else []) + sample.token_ids
            logprobs = self.logprobs.get(index, []) if delta else []
            self.logprobs[index] = logprobs + (sample.logprobs or [])
            self.cumulative[index] = sample.cumulative_logprob
            self.ends[index] = sample.finish_reason, sample.stop_reason
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached = output.num_cached_tokens

    def assert_same(self, other: "Answer") -> None:
        """All but the cached tokens, which depend on what else runs."""
        assert self.tokens == other.tokens
        assert self.texts == other.texts
        assert self.ends == other.ends
        for index, rows in self.logprobs.items():
            assert_same_rows(rows, other.logprobs[index])
            if other.cumulative[index] is None:
                assert self.cumulative[index] is None
            else:
                # As many errors of 1e-4 as there are tokens.
                tolerance = 1e-4 * max(len(rows), 1)
                assert self.cumulative[index] == pytest.approx(other.cumulative[index], abs=tolerance)
        assert_same_rows(self.prompt_logprobs, other.prompt_logprobs)


def assert_same_rows(rows: Sequence[dict[int, Logprob] | None], others: Sequence) -> None:
    for row, other in zip(rows, others, strict=True):
        assert (row is None) == (other is None)
        if row is not None:
            assert list(row) == list(other)
            assert [(e.rank, e.decoded_token) for e in row.values()] == [
                (e.rank, e.decoded_token) for e in other.values()
            ]
            np.testing.assert_allclose(
                [e.logprob for e in row.values()], [e.logprob for e in other.values()], atol=1e-4
            )


class Service:
    """One front-end before several cores, each of which may die between any two steps."""

    def __init__(self, model: Any, rng: random.Random, cores: int, dying: float) -> None:
        config = make_config({"model": str(model), "dtype": "float32", "device": "cpu"})
        files = locate(str(model))
        self._model, self._rng, self._dying = model, rng, dying
        self.frontend = Frontend(config, files, load_tokenizer(files))
        self.cores = [self._start() for _ in range(cores)]
        self.frontend.limits = self.cores[0].limits
        self.core_of: dict[int, EngineCore] = {}
        self.answers: dict[str, Answer] = {}
        self.first_cached: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        """Request ids by the number of their first sample."""
        self.deaths = self.resumed = self.resumed_with_tokens = 0

    def _start(self) -> EngineCore:
        options: dict[str, Any] = {"max_model_len": MODEL_LEN}
        if self._dying:
            rng = self._rng
            options |= {
                "num_blocks_override": rng.choice([6, 8, 12, 64]),
                "max_num_batched_tokens": rng.choice([7, 16, 40, 2048]),
                "enable_prefix_caching": rng.random() < 0.6,
                "max_num_seqs": rng.choice([2, 5, 64]),
                "depth": rng.choice([1, 1, 2, 3]),
            }
            options |= rng.choice([{}, {"preemption_mode": "swap", "swap_space": 8 * BLOCK_GIB}])
            policies = [{}, {"scheduling_policy": "time_slice", "time_slice_tokens": 4}]
            options |= rng.choice([*policies, {"scheduling_policy": "priority"}])
        return start_core(self._model, **options)

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        states: dict[str, RequestState] = {}
        waiting = list(requests)
        while waiting or self.frontend.unfinished:
            while waiting and (not states or self._rng.random() < 0.3):
                request = waiting.pop(0)
                added = self.frontend.add(request)
                states[request.request_id] = added.state
                self.answers[request.request_id] = Answer()
                self._name_of[added.messages[0].number] = request.request_id
                for message in added.messages:
                    self._send(message)
            self._step(self._rng.choice(self.cores))
        assert len(self.core_of) == 0
        return [self.answers[request.request_id] for request in requests]

    def _send(self, message: AddRequest) -> None:
        core = self._rng.choice(self.cores)
        core.add(0, message)
        self.core_of[message.number] = core

    def _step(self, core: EngineCore) -> None:
        if not core.has_work:
            return
        outputs = core.step().get(0)
        if self._rng.random() < self._dying:
            # What it said last was lost, or comes late.
            self._die(core)
            if self._rng.random() < 0.5 and outputs is not None:
                assert self.frontend.process(outputs).changed == []
        elif outputs is not None:
            self._deliver(core, outputs)

    def _die(self, core: EngineCore) -> None:
        core.shutdown()
        self.cores[self.cores.index(core)] = self._start()
        numbers = [number for number, its_core in self.core_of.items() if its_core is core]
        alone = [number for number in numbers if self._rng.random() < 0.15]
        messages = self.frontend.resume(numbers, alone=alone)
        assert sorted(messages) == sorted(numbers)
        self.deaths += 1
        for number, message in messages.items():
            del self.core_of[number]
            if number in self._name_of:
                self._name_of[message.number] = self._name_of[number]
            self.resumed += 1
            self.resumed_with_tokens += message.generated.size > 0
            self._send(message)

    def _deliver(self, core: EngineCore, outputs: Outputs) -> None:
        assert not outputs.errors
        for number, (cached, _) in outputs.scheduled.items():
            if number in self._name_of:
                self.first_cached.setdefault(self._name_of[number], cached)
        processed = self.frontend.process(outputs)
        core.abort(0, processed.stopped)
        ended = [*processed.stopped, *outputs.numbers[outputs.finished > 0].tolist()]
        for number in set(ended):
            self.core_of.pop(number, None)
        for state in processed.changed:
            if state.has_output and (state.finished or self._rng.random() < 0.6):
                kind = state.request.params.output_kind
                self.answers[state.request.request_id].take(state.output(), kind)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.8, "seed": 11, "n": 2},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "seed": -5},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "presence_penalty": 0.7, "frequency_penalty": 0.4, "n": 2},
    {"temperature": 0, "logit_bias": {65: 3.0, 66: -100.0}},
    {"temperature": 0, "ignore_eos": True, "bad_words": ["a", "bc"]},
    {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1, "n": 2},
    {"temperature": 0, "prompt_logprobs": 0},
    {"temperature": 0.9, "logprobs": 0, "skip_special_tokens": False},
]


def random_requests(rng: random.Random, count: int) -> list[Request]:
    prefix = [rng.randrange(256) for _ in range(34)]
    requests = []
    for number in range(count):
        prompt = prefix[: rng.choice([0, 17, 34])] + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        max_tokens = rng.choice([1, 2, 8, 20, None])
        fields = {
            "max_tokens": max_tokens,
            "min_tokens": rng.choice([0, 0, min(6, max_tokens or 6)]),
            "output_kind": rng.choice(list(RequestOutputKind)),
            "include_stop_str_in_output": rng.random() < 0.5,
        }
        params = SamplingParams(**fields, **SETTINGS[number % len(SETTINGS)])
        requests.append(Request(str(number), Prompt(None, prompt), params))
    return requests


def with_ends(rng: random.Random, requests: Sequence[Request], answers: Sequence[Answer]) -> list[Request]:
    """Give some requests a stop string of several tokens, or a stop id, from their answer without it."""
    ending = []
    for request, answer in zip(requests, answers, strict=True):
        params, index = request.params.clone(), rng.randrange(request.params.n)
        text, tokens = answer.texts[index], answer.tokens[index]
        place = rng.randrange(max(len(text) - 3, 1))
        way = rng.choice(["string", "string", "id", "none"])
        if way == "string" and text:
            params.stop = [text[place : place + rng.randint(1, 4)], "never"]
        elif way == "id":
            params.stop_token_ids = [tokens[rng.randrange(len(tokens))]]
        ending.append(Request(request.request_id, request.prompt, params))
    return ending


@pytest.fixture(scope="module")
def undisturbed(model):
    """Requests of every kind and their answers on one core that never dies."""

    def make(seed: int, count: int) -> tuple[list[Request], list[Answer]]:
        rng = random.Random(seed)
        requests = random_requests(rng, count)
        answers = Service(model, rng, cores=1, dying=0.0).run(requests)
        requests = with_ends(rng, requests, answers)
        return requests, Service(model, rng, cores=1, dying=0.0).run(requests)

    return make


def check(model: Any, undisturbed: Any, seed: int, count: int) -> Service:
    requests, expected = undisturbed(seed, count)
    service = Service(model, random.Random(seed + 1000), cores=3, dying=0.1)
    for answer, other in zip(service.run(requests), expected, strict=True):
        answer.assert_same(other)
    assert {name: answer.cached for name, answer in service.answers.items()} == service.first_cached
    for core in service.cores:
        while core.has_work:  # what stop strings ended here
            core.step()
        core.check()
        assert core.stats().kv_cache_usage == 0
    return service


@pytest.mark.parametrize("seed", range(2))
def test_outputs_are_those_of_an_undisturbed_run(model, undisturbed, seed):
    service = check(model, undisturbed, seed, count=22)
    assert service.deaths > 3
    assert service.resumed_with_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_many_more(model, undisturbed, seed):
    check(model, undisturbed, seed, count=44)


PROMPTS = [[(7 * i + number) % 251 for i in range(20)] for number in range(6)]


def message(number: int, generated: Sequence[int] = (), *, alone: bool = False) -> AddRequest:
    return AddRequest(
        number=number,
        prompt=np.array(PROMPTS[number], np.int32),
        max_tokens=6,
        sampling=RowSampling(SamplingParams(temperature=0), [], [], seed=0),
        generated=np.array(generated, np.int32),
        alone=alone,
    )


def watch(core: EngineCore) -> list[tuple[set[int], int]]:
    """Return a list that grows by each step submitted: its requests, and how many others are under way."""
    steps: list[tuple[set[int], int]] = []
    submit = core._executor.submit
    handles: dict[int, int] = {}

    def submit_and_note(step: StepInput) -> None:
        handles.update({admitted.row: admitted.handle for admitted in step.plan.admitted})
        steps.append(({handles[row] for row in step.plan.rows.tolist()}, len(core._in_flight) - 1))
        submit(step)

    core._executor.submit = submit_and_note
    return steps


def new_tokens(core: EngineCore) -> list[tuple[int, int]]:
    """Run one step; return (number, token) of what was sampled."""
    outputs = core.step().get(0, Outputs.empty())
    assert not outputs.errors
    return list(zip(outputs.numbers.tolist(), outputs.tokens.tolist(), strict=True))


def tokens_of(core: EngineCore) -> dict[int, list[int]]:
    """Step until there is no work; return each request's tokens."""
    found: dict[int, list[int]] = {}
    while core.has_work:
        for number, token in new_tokens(core):
            found.setdefault(number, []).append(token)
    return found


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("memory", [{}, {"num_blocks_override": 6}], ids=str)
def test_what_is_to_run_alone_does_until_it_has_a_token(model, depth, memory):
    plain = start_core(model, max_model_len=MODEL_LEN)
    for number in range(6):
        plain.add(0, message(number))
    expected = tokens_of(plain)

    core = start_core(model, depth=depth, max_num_batched_tokens=8, max_model_len=MODEL_LEN, **memory)
    steps = watch(core)
    for number in range(6):
        generated = expected[number][:2] if number == 3 else []
        core.add(0, message(number, generated, alone=number in (2, 3, 4)))
    core.step()
    core.abort(0, [4])
    found: dict[int, list[int]] = {}
    proven: dict[int, int] = {}
    """Steps that had been submitted when a suspect got its first token."""
    while core.has_work:
        for number, token in new_tokens(core):
            found.setdefault(number, []).append(token)
            proven.setdefault(number, len(steps))
    assert found == {number: expected[number][2 * (number == 3) :] for number in (0, 1, 2, 3, 5)}

    assert proven[2] < proven[3]
    turns = []
    for who, under_way in steps[: proven[3]]:
        on_trial = {2, 3} if len(turns) < proven[2] else {3}
        turns.append("alone" if who & on_trial else "rest")
        assert turns[-1] == "rest" or who == {min(on_trial)}
        assert under_way == 0
    if not memory:
        # Prompts of 20 tokens take three steps of at most 8.
        assert turns == (["alone", "rest"] * 6)[:-1]
    assert turns.count("rest") >= turns.count("alone") - 1
    if depth > 1:
        assert max(under_way for _, under_way in steps) > 0


def test_a_request_is_ordered_and_measured_by_its_first_arrival_and_counted_once(model):
    core = start_core(model, max_num_seqs=1)
    messages = [message(number) for number in range(3)]
    messages[1].age, messages[1].counted = 100.0, True
    messages[2].age = 50.0
    for each in messages:
        core.add(0, each)
    order, waited = [], {}
    while core.has_work:
        outputs = core.step()[0]
        order += outputs.numbers[outputs.finished > 0].tolist()
        waited |= {number: seconds for number, (_, seconds) in outputs.scheduled.items()}
    assert order == [1, 2, 0]
    assert waited.keys() == {0, 2}
    assert waited[2] > 50.0 > waited[0]
    assert core.stats().prompt_tokens == 40


def test_the_message_of_a_front_end_in_the_same_process_is_left_as_it_is(model):
    core = start_core(model, max_num_batched_tokens=8)
    added = message(0)
    added.sampling.params.prompt_logprobs = 0
    before = added.sampling
    core.add(0, added)
    tokens_of(core)
    assert added.sampling is before
    assert before.prompt_logprobs_done == 0
