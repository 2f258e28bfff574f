"""The sampler against the plain definition of each setting, computed with numpy in float64."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from enginecore.messages import RowSampling
from enginecore.sampling_params import SamplingParams
from enginecore.worker.sampling.logprobs import merged
from enginecore.worker.sampling.sampler import SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState

VOCAB = 600


class Start(NamedTuple):
    tokens: list[int]
    num_prompt: int
    sampling: RowSampling


def start(params, *, tokens=(1, 2, 3), num_prompt=3, seed=0, stop_ids=(), bad_words=()):
    sampling = RowSampling(params, list(stop_ids), [list(word) for word in bad_words], seed)
    return Start(list(tokens), num_prompt, sampling)


def state_of(starts):
    """The settings and the tokens int32 [n, 64] of rows 0 to n - 1."""
    state = SamplingState(len(starts))
    tokens = torch.zeros(len(starts), 64, dtype=torch.int32)
    for row, entry in enumerate(starts):
        state.set(row, entry.num_prompt, entry.sampling)
        tokens[row, : len(entry.tokens)] = torch.tensor(entry.tokens)
    return state, tokens


class Drawn(NamedTuple):
    tokens: torch.Tensor
    logprobs: dict


def draw(logits, starts):
    """Sample each row of logits [n, vocab] by its start."""
    state, tokens = state_of(starts)
    lengths = [len(entry.tokens) for entry in starts]
    return draw_rows(torch.tensor(logits, dtype=torch.float32), range(len(starts)), lengths, tokens, state)


def draw_rows(logits, rows, lengths, tokens, state):
    """Sample `rows`, which hold `lengths` of `tokens`."""
    batch = SamplingRows.upload(np.array(rows, np.int32), np.array(lengths), tokens.device)
    sampled = sample(logits, batch, tokens, state)
    return Drawn(sampled.tokens, merged(sampled.logprobs))


def allowed(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities that remain, by the definition, in float64 [vocab]."""
    scaled = np.asarray(logits, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < min_p] = 0
    if top_k:
        probs[probs < np.sort(probs)[-top_k]] = 0
    probs /= probs.sum()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    return probs / probs.sum()


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 3.0, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 5.0, "top_p": 0.999},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_distribution(settings):
    draws = 3000
    logits = np.random.default_rng(1).normal(size=VOCAB) * 2.5
    expected = allowed(logits, **settings)
    params = SamplingParams(**settings)
    tokens = draw(np.tile(logits, (draws, 1)), [start(params, seed=i) for i in range(draws)]).tokens
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Pool the rare tokens, then Pearson's statistic: mean df, standard deviation sqrt(2 df).
    common = expected * draws >= 5
    pooled = np.append(expected[common], expected[~common].sum()) * draws
    seen = np.append(counts[common], counts[~common].sum())
    used = pooled > 0
    statistic = ((seen[used] - pooled[used]) ** 2 / pooled[used]).sum()
    freedom = used.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom + 1)


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.random.default_rng(2).normal(size=(1, VOCAB)) * 2
    plain = SamplingParams(temperature=1.0)
    neighbours = [SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=0), plain]

    def first_of(others, **same):
        starts = [start(plain, **same), *(start(p, seed=99) for i, p in enumerate(others))]
        return int(draw(np.repeat(logits, len(starts), 0), starts).tokens[0])

    alone = first_of([], seed=7)
    assert all(first_of(neighbours[:n], seed=7) == alone for n in range(1, 4))
    by_seed = {first_of([], seed=seed) for seed in range(20)}
    by_position = {first_of([], seed=7, tokens=range(n), num_prompt=n) for n in range(1, 20)}
    assert len(by_seed) > 5
    assert len(by_position) > 5


@pytest.mark.parametrize("temperature", [0, 1e-3, 1e-5, 1e-8, 1e-38, 1e-45])
def test_temperatures_near_zero_take_the_best_token(temperature):
    logits = np.zeros((2, VOCAB))
    logits[0, 17] = 11
    params = SamplingParams(temperature=temperature, logprobs=1)
    other = SamplingParams(temperature=1.0)
    sampled = draw(logits, [start(params), start(other, seed=3)])
    assert int(sampled.tokens[0]) == 17
    assert np.isfinite(sampled.logprobs[0].values).all()
    assert int(sampled.tokens[1]) == int(draw(logits[1:], [start(other, seed=3)]).tokens[0])


def test_repetition_penalty_is_the_one_of_transformers():
    logits = torch.tensor(np.random.default_rng(3).normal(size=(1, VOCAB)) * 3, dtype=torch.float32)
    tokens = [40, 41, 40, 41, 7, 7]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits.clone())
    assert not torch.equal(expected, logits)
    state, held = state_of([start(SamplingParams(repetition_penalty=1.3), tokens=tokens, num_prompt=4)])
    draw_rows(logits, [0], [len(tokens)], held, state)
    torch.testing.assert_close(logits, expected)


def test_presence_and_frequency_count_the_output_only():
    def best(other, lead, *, num_prompt, **penalty):
        logits = np.full((1, VOCAB), -50.0)
        logits[0, 5], logits[0, other] = 0.0, lead
        params = SamplingParams(temperature=0, **penalty)
        return int(draw(logits, [start(params, tokens=[9, 9, 8, 8, 8], num_prompt=num_prompt)]).tokens[0])

    assert best(9, 0.1, num_prompt=5, presence_penalty=2, frequency_penalty=2) == 9
    assert best(8, 0.69, num_prompt=2, presence_penalty=0.7) == 5
    assert best(8, 0.71, num_prompt=2, presence_penalty=0.7) == 8
    assert best(8, 2.09, num_prompt=2, frequency_penalty=0.7) == 5
    assert best(8, 2.11, num_prompt=2, frequency_penalty=0.7) == 8
    assert best(9, 0.1, num_prompt=2, frequency_penalty=0.7) == 9


def test_bans_and_bias():
    logits = np.zeros((1, VOCAB))
    logits[0, :4] = [9, 8, 7, 6]

    def best(params=None, **same):
        return int(draw(logits, [start(params or SamplingParams(temperature=0), **same)]).tokens[0])

    assert best() == 0
    assert best(SamplingParams(temperature=0, allowed_token_ids=[2, 3, 599])) == 2
    assert best(SamplingParams(temperature=0, logit_bias={0: -100, 1: -100.0})) == 2
    assert best(SamplingParams(temperature=0, logit_bias={599: 100})) == 599
    assert best(SamplingParams(temperature=0, min_tokens=2, max_tokens=4), stop_ids=(0, 1)) == 2
    # Words end where their last token would come: one token, or two when the first has just been generated.
    assert best(bad_words=((0,),)) == 1
    assert best(bad_words=((4, 0),), tokens=[1, 4], num_prompt=1) == 1
    assert best(bad_words=((4, 0),), tokens=[4, 1], num_prompt=1) == 0
    assert best(bad_words=((4, 0),), tokens=[1, 4], num_prompt=2) == 0


def test_logprobs_are_the_models_own():
    logits = np.random.default_rng(4).normal(size=(1, VOCAB)) * 2
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    order = np.argsort(-expected)
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={int(order[9]): 100})
    found = draw(logits, [start(params)]).logprobs[0]
    assert found.ids[0].tolist() == [order[9], *order[:3]]
    np.testing.assert_allclose(found.values[0], expected[[order[9], *order[:3]]], atol=1e-5)
    assert found.ranks.tolist() == [10]
    whole = draw(logits, [start(SamplingParams(temperature=0, logprobs=-1))]).logprobs[0]
    assert whole.ids.shape == (1, VOCAB + 1)


def test_a_row_keeps_nothing_of_its_last_request():
    state, tokens = state_of(
        [start(SamplingParams(temperature=0, logit_bias={5: 100}, presence_penalty=1, logprobs=2))]
    )
    state.free([0])
    state.set(0, 3, start(SamplingParams(temperature=0)).sampling)
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1
    sampled = draw_rows(logits, [0], [3], tokens, state)
    assert (int(sampled.tokens[0]), sampled.logprobs) == (9, {})
