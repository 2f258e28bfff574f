"""Logits processors: callables of requests, and registered classes."""

import asyncio
import re
import textwrap

import numpy as np
import pytest
import torch

import byte_tokenizer
from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, AsyncEngine, LogitsProcessor, SamplingParams
from enginecore.config import make_config
from enginecore.errors import ConfigError, RequestError
from enginecore.messages import RowSampling
from enginecore.worker.sampling.processors import Registered
from enginecore.worker.sampling.sampler import SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "num_blocks_override": 32}
MODULE = """
    import torch
    from enginecore import LogitsProcessor


    class Steer(LogitsProcessor):
        '''Adds `steer_by` to the logit of token `steer_to`, times the tokens before it.'''

        made = []

        @classmethod
        def validate_params(cls, params):
            by = (params.extra_args or {}).get("steer_by", 0)
            if not isinstance(by, int | float):
                raise ValueError(f"steer_by must be a number, got {by!r}")

        def __init__(self, max_rows, vocab_size, device):
            self.by = torch.zeros(max_rows, device=device)
            self.to = torch.zeros(max_rows, dtype=torch.int64, device=device)
            self.rows, self.calls, self.vocab_size = set(), [], vocab_size
            Steer.made.append(self)

        def add(self, row, params):
            args = params.extra_args or {}
            if "steer_to" not in args:
                return False
            assert row not in self.rows
            if args["steer_to"] == 99:
                raise RuntimeError("no 99")
            self.rows.add(row)
            self.to[row], self.by[row] = args["steer_to"], args.get("steer_by", 0)
            return True

        def remove(self, row):
            self.rows.remove(row)

        def apply(self, logits, positions):
            self.calls.append(len(positions.rows))
            assert logits.dtype == torch.float32 and logits.shape == (len(positions.rows), self.vocab_size)
            assert set(positions.rows.tolist()) <= self.rows
            rows = torch.from_numpy(positions.rows.astype("int64"))
            for k in range(len(rows)):
                ids = positions.prompt_ids(k) + positions.generated_ids(k)
                assert len(ids) == positions.lengths[k]
            if (self.to[rows] == 98).any():
                logits.fill_(7)
                raise KeyError("98")
            logits[torch.arange(len(rows)), self.to[rows]] += self.by[rows]
            return logits


    class Breaks(LogitsProcessor):
        def __init__(self, max_rows, vocab_size, device):
            raise OSError("no file")


    class Wrong(LogitsProcessor):
        def add(self, row, params):
            return "wrong" in (params.extra_args or {})

        def apply(self, logits, positions):
            made = {"none": None, "shape": logits[:, 1:], "empty": logits - torch.inf, "half": logits.half()}
            return made[MODE]


    MODE = "none"
    NUMBER = 5
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-processors"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "steering.py").write_text(textwrap.dedent(MODULE))
    return folder


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), **OPTIONS)


@pytest.fixture(scope="module")
def steered(model, folder):
    names = ["steering:Steer", "steering:Wrong"]
    return LLM(str(model), **OPTIONS, logits_processors=names, plugin_path=str(folder))


@pytest.fixture
def steer(steered):
    """The module, and the processor of the worker."""
    import steering

    steering.Steer.made[-1].calls.clear()
    return steering


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def params(**fields):
    return SamplingParams(**GREEDY | fields)


def only(token):
    def apply(generated, logits):
        kept = logits[token].clone()
        logits.fill_(-torch.inf)
        logits[token] = kept
        return logits

    return apply


def slow(oracle, prompt, processor, count):
    """The greedy answer with a processor (prompt, generated, logits), a model call a token."""
    generated = []
    for _ in range(count):
        logits = oracle.logits([*prompt, *generated])[-1]
        generated.append(int(processor(prompt, generated, logits).argmax()))
    return generated


def test_both_signatures_see_the_tokens_before_and_change_the_logits(model, llm):
    oracle = Oracle(model)
    seen = []

    def repeat(generated, logits):
        """Once a token has come, all but it and its successor are out."""
        seen.append(list(generated))
        if not generated:
            return logits
        kept = torch.full_like(logits, -torch.inf)
        kept[[generated[-1], (generated[-1] + 1) % 320]] = logits[[generated[-1], (generated[-1] + 1) % 320]]
        return kept

    def push_prompt(prompt, generated, logits):
        logits[prompt[len(generated) % len(prompt)]] += 100
        return logits

    prompt = list(b"abc")
    outputs = llm.generate(
        [prompt] * 3,
        [
            params(logits_processors=[repeat]),
            params(logits_processors=[push_prompt]),
            params(),
        ],
    )
    expected = slow(oracle, prompt, lambda _, generated, logits: repeat(generated, logits), 6)
    assert tokens_of(outputs) == [expected, [97, 98, 99, 97, 98, 99], oracle.greedy(prompt, 6)[0]]
    assert [len(entry) for entry in seen[:6]] == [0, 1, 2, 3, 4, 5]


def test_several_callables_run_in_order_and_before_penalties(llm):
    def set_two(generated, logits):
        return torch.full_like(logits, -5).index_fill(0, torch.tensor([3, 4]), 10.0)

    def lower_three(generated, logits):
        logits[3] -= 1
        return logits

    processors = [set_two, lower_three]
    (plain,) = llm.generate("a", params(logits_processors=processors))
    assert plain.outputs[0].token_ids == [4] * 6
    (penalised,) = llm.generate("a", params(logits_processors=processors, presence_penalty=2))
    assert penalised.outputs[0].token_ids[:3] == [4, 3, 4]
    # The log probabilities are those of the model.
    (scored,) = llm.generate("a", params(logits_processors=processors, logprobs=0))
    assert scored.outputs[0].logprobs[0][4].logprob < -0.5
    (other,) = llm.generate("a", params(allowed_token_ids=[4], logprobs=0))
    assert scored.outputs[0].logprobs[0][4].logprob == pytest.approx(other.outputs[0].logprobs[0][4].logprob)


def test_a_class_with_call_and_a_clone_share_the_object(llm):
    class Counts:
        def __init__(self):
            self.calls = 0

        def __call__(self, generated, logits):
            self.calls += 1
            return logits

    counts = Counts()
    given = params(logits_processors=[counts], n=2, temperature=1.0)
    assert given.clone().logits_processors == [counts]
    llm.generate("a", given.clone())
    assert counts.calls == 12


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logits: 1 / 0, "logits processor breaks raised ZeroDivisionError: division by zero"),
        (lambda logits: None, r"breaks raised TypeError: it must return the logits, .* returned NoneType"),
        (lambda logits: logits[1:], r"breaks raised TypeError: .* tensor \[320\], and returned \[319\]"),
        (lambda logits: logits - torch.inf, "after logits processor breaks no logit is finite"),
    ],
)
def test_a_callable_that_fails_ends_its_own_request_only(llm, answer, message):
    def breaks(generated, logits):
        return answer(logits) if len(generated) == 2 else logits

    expected = tokens_of(llm.generate(["abc", "xyz"], params()))
    wanted = [params(), params(logits_processors=[breaks]), params(logits_processors=[only(7)])]
    first, broken, third = llm.generate(["abc", "abc", "xyz"], wanted)
    assert tokens_of([first]) == expected[:1]
    assert tokens_of([third]) == [[7] * 6]
    sample = broken.outputs[0]
    assert (sample.finish_reason, len(sample.token_ids)) == ("error", 2)
    assert re.search(message, sample.stop_reason)
    assert tokens_of(llm.generate(["abc", "xyz"], params())) == expected
    stats = llm.llm_engine.stats()
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0)


@pytest.mark.parametrize("given", [[5], "ab", [lambda: 0], [lambda a, b, c, d: 0]])
def test_callables_that_are_none(given):
    with pytest.raises(ValueError, match="logits_processors"):
        SamplingParams(logits_processors=given)


def test_preempted_rows_keep_their_processors(model):
    few = LLM(str(model), **OPTIONS | {"num_blocks_override": 7, "block_size": 4, "max_model_len": 24})
    prompts = [list(b"abcdef"), list(b"uvwxyz"), list(b"mnopqr")]
    seen = [[], [], []]

    def watch(index):
        def apply(prompt, generated, logits):
            seen[index].append((list(prompt), list(generated)))
            logits[prompt[len(generated) % len(prompt)]] += 100
            return logits

        return apply

    wanted = [params(max_tokens=9, logits_processors=[watch(index)]) for index in range(3)]
    outputs = few.generate(prompts, wanted)
    assert few.llm_engine.stats().preemptions > 0
    for prompt, output, calls in zip(prompts, outputs, seen, strict=True):
        assert output.outputs[0].token_ids == [*prompt, *prompt[:3]]
        assert all(
            given == prompt and generated == [*prompt, *prompt][: len(generated)]
            for given, generated in calls
        )
    few.shutdown()


def test_a_row_with_several_positions_in_a_step_is_called_for_each():
    """As where drafts are verified: rows stand several times, with growing lengths."""
    seen = {}

    class Watch(LogitsProcessor):
        def add(self, row, params):
            return row != 1

        def apply(self, logits, positions):
            for k in range(len(positions.rows)):
                key = "class", int(positions.rows[k]), int(positions.lengths[k])
                seen[key] = positions.prompt_ids(k), positions.generated_ids(k), logits[k].tolist()
            return logits

    def watch(prompt, generated, logits):
        seen["call", 2, len(prompt) + len(generated)] = prompt, generated, logits.tolist()
        logits[0] = 50
        return logits

    tokens = torch.arange(30, dtype=torch.int32).view(3, 10)
    state = SamplingState(3, [Registered("Watch", Watch(3, 5, torch.device("cpu")))])
    for row in range(3):
        calls = [watch] if row == 2 else None
        state.set(row, 2, RowSampling(SamplingParams(temperature=0, logits_processors=calls), [], [], 0))
    rows, lengths = np.array([1, 0, 0, 2, 2, 2], np.int32), np.array([4, 3, 4, 2, 3, 4])
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    batch = SamplingRows.upload(rows, lengths, logits.device)
    sampled = sample(logits.clone(), batch, tokens, state)
    assert sampled.tokens.tolist() == [*logits[:3].argmax(-1).tolist(), 0, 0, 0]
    held = zip(rows.tolist(), lengths.tolist(), logits.tolist(), strict=True)
    expected = {}
    for row, length, own in held:
        ids = tokens[row].tolist()
        if row != 1:
            expected["class", row, length] = ids[:2], ids[2:length], own
        if row == 2:
            expected["call", row, length] = ids[:2], ids[2:length], own
    assert seen == expected


def test_a_registered_class_is_called_once_a_step_for_the_rows_it_took(model, steered, steer):
    processor = steer.Steer.made[-1]
    expected = tokens_of(steered.generate(["abc"], params()))
    assert processor.calls == []
    steering = [params(extra_args={"steer_to": to, "steer_by": 100}) for to in (3, 4)]
    outputs = steered.generate(["abc"] * 3, [steering[0], params(), steering[1]])
    assert tokens_of(outputs) == [[3] * 6, *expected, [4] * 6]
    assert processor.calls == [2] * 6
    # Workers hear of ended requests with the next step.
    steered.generate("a", params(max_tokens=1))
    assert processor.rows == set()
    # Logits are changed as the oracle's are: by an amount that decides between two tokens.
    logits = Oracle(model).logits(list(b"abc"))[-1]
    gap = float(logits.max() - logits[5])
    for by, right in ((gap - 0.01, int(logits.argmax())), (gap + 0.01, 5)):
        (output,) = steered.generate("abc", params(max_tokens=1, extra_args={"steer_to": 5, "steer_by": by}))
        assert output.outputs[0].token_ids == [right]


def test_a_registered_class_that_raises_ends_the_requests_at_fault(steered, steer):
    good = params(extra_args={"steer_to": 3, "steer_by": 100})
    bad = params(extra_args={"steer_to": 98})
    untaken = params(extra_args={"steer_to": 99})
    expected = tokens_of(steered.generate(["xyz"], params()))
    outputs = steered.generate(["abc", "abc", "abc", "xyz"], [good, bad, untaken, params()])
    assert tokens_of([outputs[0], outputs[3]]) == [[3] * 6, *expected]
    for output, error in ((outputs[1], "KeyError: '98'"), (outputs[2], "RuntimeError: no 99")):
        sample = output.outputs[0]
        assert (sample.finish_reason, sample.token_ids) == ("error", [])
        assert sample.stop_reason == f"logits processor steering:Steer raised {error}"
    steered.generate("a", params(max_tokens=1))
    assert steer.Steer.made[-1].rows == set()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("none", "it must return the logits, a tensor [1, 320], and returned NoneType"),
        ("shape", "it must return the logits, a tensor [1, 320], and returned [1, 319]"),
        ("empty", "after logits processor steering:Wrong no logit is finite"),
    ],
)
def test_what_a_registered_class_returns_is_checked(steered, steer, monkeypatch, mode, message):
    monkeypatch.setattr(steer, "MODE", mode)
    (output, good) = steered.generate(["abc", "abc"], [params(extra_args={"wrong": 1}), params()])
    assert output.outputs[0].finish_reason == "error"
    assert message in output.outputs[0].stop_reason
    assert good.outputs[0].finish_reason == "length"
    monkeypatch.setattr(steer, "MODE", "half")
    (output,) = steered.generate("abc", params(extra_args={"wrong": 1}))
    assert len(output.outputs[0].token_ids) == 6


def test_a_bad_argument_is_refused_before_it_runs(steered):
    with pytest.raises(RequestError, match="extra_args: steering:Steer: steer_by must be a number") as caught:
        steered.generate("a", params(extra_args={"steer_to": 1, "steer_by": "much"}))
    assert caught.value.param == "extra_args"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("steering:Breaks", "steering:Breaks: making the logits processor failed: OSError: no file"),
        (
            "steering:NUMBER",
            "steering:NUMBER is no logits processor: inherit from enginecore.LogitsProcessor",
        ),
        ("steering:Nobody", "has no Nobody"),
        ("nowhere:X", "there is no module nowhere"),
        ("steering", "write it as module:Name"),
    ],
)
def test_classes_that_cannot_be_had(model, folder, reference, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(model), **OPTIONS, logits_processors=[reference], plugin_path=str(folder))


def test_the_base_class_says_what_is_missing():
    processor = LogitsProcessor(4, 320, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="LogitsProcessor has no add"):
        processor.add(0, SamplingParams())


@pytest.mark.slow
def test_registered_classes_in_processes_and_callables_refused_there(model, folder):
    options = {**OPTIONS, "logits_processors": ["steering:Steer"], "plugin_path": str(folder)}

    async def run():
        engine = AsyncEngine(make_config({"model": str(model), **options}))
        try:
            wanted = params(extra_args={"steer_to": 3, "steer_by": 100})
            outputs = [output async for output in engine.generate("abc", wanted, "1")]
            with pytest.raises(RequestError, match=r"only in the caller's own process.*register a class"):
                async for _ in engine.generate("abc", params(logits_processors=[only(1)]), "2"):
                    pass
            failed = [
                output async for output in engine.generate("abc", params(extra_args={"steer_to": 98}), "3")
            ]
            return outputs[-1].outputs[0].token_ids, failed[-1].outputs[0].stop_reason
        finally:
            await engine.shutdown()

    tokens, reason = asyncio.run(run())
    assert tokens == [3] * 6
    assert reason == "logits processor steering:Steer raised KeyError: '98'"


@pytest.mark.slow
def test_tensor_parallel_ranks_agree_on_what_a_processor_chose(model, folder):
    options = {**OPTIONS, "logits_processors": ["steering:Steer"], "plugin_path": str(folder)}
    two = LLM(str(model), **options, tensor_parallel_size=2)
    try:
        with pytest.raises(RequestError, match="only in the caller's own process"):
            two.generate("abc", params(logits_processors=[only(1)]))
        wanted = [params(extra_args={"steer_to": 3, "steer_by": 100}), params(extra_args={"steer_to": 98})]
        outputs = two.generate(["abc", "abc"], wanted)
        assert tokens_of(outputs) == [[3] * 6, []]
        assert "KeyError" in outputs[1].outputs[0].stop_reason
    finally:
        two.shutdown()
