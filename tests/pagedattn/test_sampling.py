"""Sampling against its definition in numpy, and against exact probabilities."""

from itertools import product

import numpy as np
import pytest
import torch
from sampling_reference import draw, philox, weights

from pagedattn import NOT_FINITE, top_k_top_p_sample
from pagedattn.torch_backend import philox as torch_philox

BACKENDS = ["torch", None]
VECTORS = [
    # Counter, key, result: the known answers of the generator's authors (Random123, kat_vectors).
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def sample(logits, settings, seeds=None, positions=None, backend="torch"):
    """`settings` is a dict for all rows, or a list of one a row."""
    logits = torch.as_tensor(logits)
    n = len(logits)
    rows = settings if isinstance(settings, list) else [settings] * n

    def column(name, default, dtype):
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    return top_k_top_p_sample(
        logits,
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=torch.arange(n) if seeds is None else torch.as_tensor(seeds),
        positions=torch.zeros(n, dtype=torch.int64) if positions is None else torch.as_tensor(positions),
        backend=backend,
    )


def normal(*shape, scale=2.5, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_gives_its_known_answers(counter, key, words):
    assert philox(counter, key) == words
    given = [tuple(torch.tensor(word) for word in part) for part in (counter, key)]
    assert [int(word) for word in torch_philox.philox(*given)] == words


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 5.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 400, "top_p": 0.97},
]


# On one back end only: the others draw the same tokens, which other tests show.
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_distribution(settings):
    draws = 4000
    logits = normal(600)
    mass = weights(logits, **settings)
    expected = mass / mass.sum() * draws
    counts = np.bincount(sample(np.tile(logits, (draws, 1)), settings), minlength=600)
    assert counts[expected == 0].sum() == 0
    # Rare tokens are pooled; Pearson's statistic has mean df and standard deviation sqrt(2 df).
    common = expected >= 5
    pooled = np.append(expected[common], expected[~common].sum())
    seen = np.append(counts[common], counts[~common].sum())
    used = pooled > 0
    statistic = ((seen[used] - pooled[used]) ** 2 / pooled[used]).sum()
    freedom = used.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_are_those_of_the_definition(backend):
    logits = normal(len(SETTINGS) * 8, 333)
    settings = SETTINGS * 8
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63, len(logits))
    positions = np.random.default_rng(2).integers(0, 2**40, len(logits))
    expected = [
        draw(*row, **kept, seed=seed, position=position)
        for *row, kept, seed, position in zip(logits, settings, seeds, positions)
    ]
    assert sample(logits, settings, seeds, positions, backend).tolist() == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 40},
        {"top_p": 0.6},
        {"min_p": 0.05},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.001, "temperature": 3.0},
    ],
    ids=str,
)
def test_a_large_vocabulary_keeps_what_it_should(settings):
    logits = normal(50_257, scale=1.5)
    mass = weights(logits, **({"temperature": 1.0} | settings))
    tokens = sample(np.tile(logits, (200, 1)), settings, backend=None).numpy()
    assert (mass[tokens] > 0).all()
    assert len(set(tokens.tolist())) > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_and_order_change_nothing(backend):
    logits = normal(40, 2000)
    settings = [SETTINGS[i % len(SETTINGS)] if i % 5 else {"temperature": 0.0} for i in range(40)]
    seeds, positions = torch.arange(40) * 7, torch.arange(40) + 3
    together = sample(logits, settings, seeds, positions, backend).tolist()
    alone = [
        int(sample(logits[i : i + 1], [settings[i]], seeds[i : i + 1], positions[i : i + 1], backend))
        for i in range(40)
    ]
    back = list(range(39, -1, -1))
    reversed_ = sample(logits[back], [settings[i] for i in back], seeds[back], positions[back], backend)
    assert together == alone == reversed_.tolist()[::-1]
    assert len({int(sample(logits[:1], {}, [seed], [0], backend)) for seed in range(20)}) > 5
    assert len({int(sample(logits[:1], {}, [0], [position], backend)) for position in range(20)}) > 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_takes_the_lowest_of_the_best(backend):
    logits = normal(3, 1000)
    logits[0, [700, 200, 999]] = 50
    logits[1] = -np.inf
    logits[2] = 4.0
    assert sample(logits, {"temperature": 0.0, "top_k": 3}, backend=backend).tolist() == [200, NOT_FINITE, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_ties_with_the_last_kept_is_kept(backend):
    logits = np.full((600, 400), -20, np.float32)
    logits[:, [3, 150, 151, 390]] = 5
    for settings in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}):
        assert set(sample(logits, settings, backend=backend).tolist()) == {3, 150, 151, 390}


@pytest.mark.parametrize("backend", BACKENDS)
def test_settings_that_leave_only_the_best(backend):
    logits = normal(50, 700)
    best = [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-30}, {"temperature": 1e-45}]
    assert sample(logits, best * 10, backend=backend).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_huge_temperature_makes_all_alike_but_cuts_the_same(backend):
    logits = normal(3000, 200)
    everything = np.bincount(sample(logits, {"temperature": 1e30}, backend=backend), minlength=200)
    assert ((everything - 15) ** 2 / 15).sum() < 200 + 4 * np.sqrt(400)
    three = sample(logits, {"temperature": 1e30, "top_k": 3}, backend=backend).numpy()
    ranks = (logits > np.take_along_axis(logits, three[:, None], 1)).sum(1)
    assert np.bincount(ranks).tolist() == pytest.approx([1000] * 3, abs=120)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_are_no_numbers(backend):
    rows = {
        "all -inf": ([-np.inf] * 300, {NOT_FINITE}),
        "one that is not": ([-np.inf] * 299 + [-5.0], {299}),
        "all NaN": ([np.nan] * 300, {NOT_FINITE}),
        "NaN counts as -inf": ([np.nan] * 299 + [-5.0], {299}),
        "+inf wins": ([3.0] * 150 + [np.inf] + [3.0] * 149, {NOT_FINITE}),
        "two of +inf": ([np.nan] * 200 + [np.inf] * 2 + [3.0] * 98, {NOT_FINITE}),
    }
    logits = np.array([row for row, _ in rows.values()], np.float32)
    for settings, seed in product([*SETTINGS, {"temperature": 0.0}], range(5)):
        tokens = sample(logits, settings, [seed] * len(logits), backend=backend).tolist()
        for token, (name, (_, possible)) in zip(tokens, rows.items()):
            assert token in possible, (name, settings)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_taken_of_nothing_but_minus_infinity(backend):
    for vocab in (1, 100, 257, 1000):
        logits = np.full((len(SETTINGS), vocab), -np.inf, np.float32)
        assert sample(logits, SETTINGS, backend=backend).tolist() == [NOT_FINITE] * len(SETTINGS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vocabulary_of_one(backend):
    logits = np.zeros((len(SETTINGS), 1), np.float32)
    assert sample(logits, SETTINGS, backend=backend).tolist() == [0] * len(SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_logits_are_widened_and_left_alone(dtype):
    logits = torch.from_numpy(normal(16, 500)).to(dtype)
    before = logits.clone()
    for settings in SETTINGS:
        assert torch.equal(sample(logits, settings), sample(logits.float(), settings))
    assert torch.equal(logits, before)


def test_no_rows():
    assert sample(np.zeros((0, 10), np.float32), []).shape == (0,)


def test_columns_that_do_not_fit_are_refused():
    columns = dict.fromkeys(("temperature", "top_p", "min_p"), torch.ones(2))
    columns |= dict.fromkeys(("seeds", "positions"), torch.zeros(2, dtype=torch.int64))
    columns["top_k"] = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"top_k must be torch.int32 \[2\] on cpu, not torch.int64 \[2\]"):
        top_k_top_p_sample(torch.zeros(2, 5), **columns | {"top_k": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"temperature must be torch.float32 \[3\] on cpu, .* \[2\]"):
        top_k_top_p_sample(torch.zeros(3, 5), **columns)
    with pytest.raises(ValueError, match=r"vocab of 1 or more, not torch.float32 \[2, 0\]"):
        top_k_top_p_sample(torch.zeros(2, 0), **columns)
