"""Sampling a batch as columns, against each row by itself: bit for bit the same answers."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginecore.executor.step import NOT_FINITE
from enginecore.messages import PositionLogprobs, RowSampling
from enginecore.sampling_params import SamplingParams
from enginecore.worker.sampling import logprobs, penalties
from enginecore.worker.sampling.sampler import SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState
from pagedattn import top_k_top_p_sample

MAX_ROWS = 8
STOPS = [5, 6, 5]


class Request(NamedTuple):
    tokens: list[int]
    num_prompt: int
    sampling: RowSampling


class Row(NamedTuple):
    token: int
    logprobs: PositionLogprobs | None


def ban(logits, sampling, tokens, generated):
    params = sampling.params
    if params.allowed_token_ids is not None:
        kept = logits[params.allowed_token_ids]
        logits.fill_(-torch.inf)
        logits[params.allowed_token_ids] = kept
    for word in sampling.bad_words:
        before = len(word) - 1
        if before <= generated and tokens[len(tokens) - before :] == word[:-1]:
            logits[word[-1]] = -torch.inf
    if generated < params.min_tokens:
        logits[sampling.stop_ids] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias


def penalise(logits, params, tokens, num_prompt):
    output = torch.bincount(torch.tensor(tokens[num_prompt:], dtype=torch.int64), minlength=len(logits))
    seen = torch.bincount(torch.tensor(tokens), minlength=len(logits))
    repetition = np.float32(params.repetition_penalty).item()
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen > 0, scaled, logits))
    logits -= np.float32(params.frequency_penalty).item() * output
    logits -= np.float32(params.presence_penalty).item() * (output > 0)


def row_logprobs(raw, token, asked):
    raw = raw.log_softmax(-1)
    best = raw.topk(len(raw) if asked == -1 else min(asked, len(raw)))
    return PositionLogprobs(
        np.array([[token, *best.indices.tolist()]], np.int32),
        torch.cat([raw[token][None], best.values]).numpy()[None],
        np.array([int((raw > raw[token]).sum()) + 1], np.int32),
    )


def sample_row(logits, request):
    """Sample one row of logits [vocab], in the slowest and plainest way."""
    params = request.sampling.params
    raw = logits.float()
    changed = raw.clone()
    ban(changed, request.sampling, request.tokens, len(request.tokens) - request.num_prompt)
    penalise(changed, params, request.tokens, request.num_prompt)
    seed = np.array([request.sampling.seed % 2**64], np.uint64).view(np.int64)
    token = top_k_top_p_sample(
        changed[None],
        temperature=torch.tensor([params.temperature]),
        top_k=torch.tensor([params.top_k], dtype=torch.int32),
        top_p=torch.tensor([params.top_p]),
        min_p=torch.tensor([params.min_p]),
        seeds=torch.from_numpy(seed),
        positions=torch.tensor([len(request.tokens)]),
    )
    chosen = int(token.clamp(min=0))
    finite = bool(changed[~changed.isnan()].amax().isfinite()) if not changed.isnan().all() else False
    found = None if params.logprobs is None else row_logprobs(raw, chosen, params.logprobs)
    return Row(chosen if finite else NOT_FINITE, found)


def ids(vocab):
    """Few of them, so that they come again."""
    return st.integers(0, min(vocab, 12) - 1)


@st.composite
def requests(draw, vocab):
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -1.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.6])),
        logprobs=draw(st.sampled_from([None, None, None, 0, 3, -1])),
        logit_bias=draw(st.none() | st.dictionaries(ids(vocab), st.floats(-5, 5), max_size=4)),
        allowed_token_ids=draw(st.none() | st.none() | st.lists(ids(vocab), min_size=1, max_size=20)),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3])),
    )
    words = draw(st.just([]) | st.lists(st.lists(ids(vocab), min_size=1, max_size=3), max_size=4))
    tokens = draw(st.lists(ids(vocab), min_size=1, max_size=8))
    stops = draw(st.sampled_from([[], STOPS]))
    sampling = RowSampling(params, stops, words, draw(st.integers(0, 2**64 - 1)))
    return Request(tokens, draw(st.integers(1, len(tokens))), sampling)


PLAIN = Request([1, 2, 3], 2, RowSampling(SamplingParams(temperature=0.0), [], [], 7))


@st.composite
def batches(draw):
    vocab = draw(st.sampled_from([12, 129, 300]))
    many = draw(st.lists(requests(vocab) | st.just(PLAIN), min_size=1, max_size=MAX_ROWS))
    rows = draw(st.permutations(range(MAX_ROWS)))[: len(many)]
    return vocab, many, rows


def random_logits(generator, count, vocab, dtype):
    logits = torch.randn(count, vocab, generator=generator) * 3
    if torch.rand((), generator=generator) < 0.2:
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf])
        where = torch.rand(count, vocab, generator=generator) < 0.05
        logits[where] = odd[torch.randint(3, (int(where.sum()),), generator=generator)]
    return logits.to(dtype)


def assert_same(found, expected):
    assert (found is None) == (expected is None)
    if expected is not None:
        for column, wanted in zip(found, expected):
            assert column.dtype == wanted.dtype
            np.testing.assert_array_equal(column, wanted)


@settings(deadline=None, max_examples=300)
@given(batches(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 1000))
def test_a_batch_is_its_rows(batch, dtype, seed):
    vocab, many, rows = batch
    generator = torch.Generator().manual_seed(seed)
    state = SamplingState(MAX_ROWS)
    tokens = torch.zeros(MAX_ROWS, 16, dtype=torch.int32)
    held = dict(zip(rows, many, strict=True))
    for row, request in held.items():
        state.set(row, request.num_prompt, request.sampling)
        tokens[row, : len(request.tokens)] = torch.tensor(request.tokens)
    # Twice all rows, as in most steps; then some of them.
    for running in (rows, rows, rows[::2]):
        logits = random_logits(generator, len(running), vocab, dtype)
        expected = [sample_row(each, held[row]) for each, row in zip(logits, running)]
        lengths = np.array([len(held[row].tokens) for row in running])
        numbers = SamplingRows.upload(np.array(running, np.int32), lengths, tokens.device)
        sampled = sample(logits, numbers, tokens, state)
        found = logprobs.merged(sampled.logprobs)
        assert sampled.tokens.tolist() == [row.token for row in expected]
        for index, row in enumerate(expected):
            assert_same(found.get(index), row.logprobs)
        for row, token in zip(running, sampled.tokens.clamp(min=0).tolist()):
            tokens[row, len(held[row].tokens)] = token
            held[row] = held[row]._replace(tokens=[*held[row].tokens, token])


def test_pieces_change_nothing(monkeypatch):
    params = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.4, logprobs=4)
    generator = torch.Generator().manual_seed(3)
    many = [
        Request(
            torch.randint(40, (size,), generator=generator).tolist(), 1, RowSampling(params, [], [], size)
        )
        for size in (1, 30, 2, 17, 40, 5)
    ]
    tokens = torch.zeros(len(many), 64, dtype=torch.int32)
    for row, request in enumerate(many):
        tokens[row, : len(request.tokens)] = torch.tensor(request.tokens)
    logits = random_logits(generator, len(many), 50, torch.float32)
    expected = [sample_row(each, request) for each, request in zip(logits, many)]
    lengths = np.array([len(request.tokens) for request in many])
    for counters, held, piece in ((1 << 22, 1 << 20, 1 << 22), (100, 1 << 20, 100), (1 << 22, 45, 1)):
        monkeypatch.setattr(penalties, "_CPU_COUNTERS", counters)
        monkeypatch.setattr(penalties, "HELD", held)
        monkeypatch.setattr(logprobs, "PIECE", piece)
        state = SamplingState(len(many))
        for row, request in enumerate(many):
            state.set(row, request.num_prompt, request.sampling)
        rows = SamplingRows.upload(np.arange(len(many), dtype=np.int32), lengths, tokens.device)
        sampled = sample(logits.clone(), rows, tokens, state)
        assert sampled.tokens.tolist() == [row.token for row in expected]
        found = logprobs.merged(sampled.logprobs)
        for index, row in enumerate(expected):
            assert_same(found[index], row.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_model_are_kept_for_log_probabilities(dtype):
    params = SamplingParams(temperature=0, allowed_token_ids=[3], repetition_penalty=2.0, logprobs=2)
    state = SamplingState(1)
    state.set(0, 1, RowSampling(params, [], [], 0))
    tokens = torch.full((1, 4), 9, dtype=torch.int32)
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9]], dtype=dtype)
    rows = SamplingRows.upload(np.array([0], np.int32), np.array([2]), tokens.device)
    sampled = sample(logits, rows, tokens, state)
    assert sampled.tokens.tolist() == [3]
    assert logits.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert logprobs.merged(sampled.logprobs)[0].ids.tolist() == [[3, 9, 8]]
