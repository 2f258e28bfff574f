"""`logprob_token_ids`: the log probabilities of tokens that the caller names."""

import numpy as np
import pytest
import torch

import byte_tokenizer
from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, SamplingParams
from enginecore.errors import RequestError
from enginecore.messages import RowSampling
from enginecore.worker.sampling import logprobs
from enginecore.worker.sampling.sampler import SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState

IDS = [5, 319, 0, 97]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-ids"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), dtype="float32", device="cpu", max_model_len=64)


@pytest.mark.parametrize("count", [None, len(IDS)])
def test_every_position_has_the_ids_and_the_chosen_token(model, llm, count):
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprob_token_ids=IDS, logprobs=count, prompt_logprobs=1
    )
    (output,) = llm.generate([list(b"abcd")], params)
    sample = output.outputs[0]
    tokens = [*b"abcd", *sample.token_ids]
    expected = Oracle(model).logits(tokens).double().log_softmax(-1)[3:-1]
    assert len(sample.logprobs) == 6
    for row, token, wanted in zip(sample.logprobs, sample.token_ids, expected, strict=True):
        assert list(row) == list(dict.fromkeys([token, *IDS]))
        assert row[token].rank == 1
        for other, entry in row.items():
            assert entry.logprob == pytest.approx(wanted[other].item(), abs=1e-3)
            assert other == token or entry.rank is None
    assert sample.cumulative_logprob == pytest.approx(
        sum(row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True))
    )
    assert all(2 <= len(row) + (token in row) <= 3 for row, token in zip(output.prompt_logprobs[1:], b"bcd"))


def test_ids_of_rows_in_one_batch(monkeypatch):
    """Rows with ids of their own, as many or not, with counts, and with nothing; and in pieces."""
    wanted = [
        {"logprob_token_ids": [1, 2, 3]},
        {"logprobs": 3},
        {"logprob_token_ids": [9, 8, 9, 7]},
        {},
        {"logprob_token_ids": [0]},
        {"logprobs": 0},
    ]
    logits = torch.randn(len(wanted), 20, generator=torch.Generator().manual_seed(2))
    expected = logits.double().log_softmax(-1)
    for piece in (1 << 22, 20):
        monkeypatch.setattr(logprobs, "PIECE", piece)
        state = SamplingState(len(wanted))
        for row, fields in enumerate(wanted):
            state.set(row, 1, RowSampling(SamplingParams(temperature=0, **fields), [], [], 0))
        rows = np.arange(len(wanted), dtype=np.int32)
        tokens = torch.ones(len(wanted), 4, dtype=torch.int32)
        sampled = sample(logits.clone(), SamplingRows.upload(rows, rows + 1, logits.device), tokens, state)
        found = logprobs.merged(sampled.logprobs)
        assert sampled.tokens.tolist() == expected.argmax(-1).tolist()
        best = [entry.topk(3).indices.tolist() for entry in expected]
        others = [[1, 2, 3], best[1], [9, 8, 7], None, [0], []]
        assert sorted(found) == [0, 1, 2, 4, 5]
        for row, entry in found.items():
            ids = [best[row][0], *others[row]]
            assert entry.ids.tolist() == [ids]
            np.testing.assert_allclose(entry.values[0], expected[row][ids], atol=1e-5)
            assert entry.ranks.tolist() == [1]


def test_a_row_keeps_no_ids_of_its_last_request():
    state = SamplingState(1)
    state.set(0, 1, RowSampling(SamplingParams(temperature=0, logprob_token_ids=[1]), [], [], 0))
    state.free([0])
    state.set(0, 1, RowSampling(SamplingParams(temperature=0), [], [], 0))
    rows = SamplingRows.upload(np.array([0], np.int32), np.array([1]), torch.device("cpu"))
    assert not sample(torch.zeros(1, 5), rows, torch.zeros(1, 4, dtype=torch.int32), state).logprobs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs must be left out .* or be their number, 2"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids may hold at most 128 token ids, got 129"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids must be at least 0"),
        ({"logprob_token_ids": ["a"]}, "logprob_token_ids must be an integer"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_ids_outside_the_vocabulary(llm):
    with pytest.raises(
        RequestError, match="logprob_token_ids holds token id 320, but the vocabulary ends at 319"
    ):
        llm.generate("a", SamplingParams(logprob_token_ids=[320]))
    assert SamplingParams(logprob_token_ids=[]).logprob_token_ids is None


@pytest.mark.parametrize("limit", [5, -1])
def test_the_whole_vocabulary_where_max_logprobs_has_room_for_it(model, llm, limit):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    limited = LLM(str(model), dtype="float32", device="cpu", max_model_len=64, max_logprobs=limit)
    if limit == -1:
        (output,) = limited.generate("ab", params)
        assert [len(output.outputs[0].logprobs[0]), len(output.prompt_logprobs[1])] == [320, 320]
        assert sum(np.exp(entry.logprob) for entry in output.prompt_logprobs[1].values()) == pytest.approx(1)
    else:
        with pytest.raises(RequestError, match="logprobs must be at most max_logprobs=5, got -1"):
            limited.generate("ab", params)
    limited.shutdown()


def test_prompt_embeds_are_refused_by_name(llm):
    with pytest.raises(RequestError, match="prompt_embeds is not supported: give text") as caught:
        llm.generate({"prompt_embeds": torch.zeros(3, 4)})
    assert caught.value.param == "prompt_embeds"


def test_equal_samples_at_temperature_0(llm):
    params = SamplingParams(n=3, temperature=0, equal_samples=True, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate("abc", params)
    greedy = llm.generate("abc", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert [entry.token_ids for entry in output.outputs] == [greedy[0].outputs[0].token_ids] * 3
