"""Masks of guided rows at the worker: positions, drafts, resumed rows, and how a grammar ends."""

import numpy as np
import pytest
import torch

from byte_tokenizer import EOS, EOT
from enginecore import SamplingParams, StructuredOutputsParams
from enginecore.frontend.guides import GuideReader
from enginecore.grammars import Grammars
from enginecore.messages import Guide, RowSampling
from enginecore.worker.sampling.guides import Guides, TokenMasks
from enginecore.worker.sampling.sampler import SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState

VOCAB = 320
ROWS = 6
DIGITS = list(b"0123456789")


@pytest.fixture
def guides(byte_tokenizer):
    return Guides(ROWS, lambda: Grammars(byte_tokenizer, VOCAB, [EOS, EOT]), threads=2)


def sampling(grammar, *, stop_ids=(EOS, EOT), may_end=True, **params):
    guide = None if grammar is None else Guide(grammar, may_end)
    return RowSampling(SamplingParams(**params), list(stop_ids), [], 0, guide=guide)


def regex(pattern):
    return f"start: /{pattern}/"


def allowed(masks: TokenMasks) -> list[list[int]]:
    bits = np.unpackbits(masks.bits.numpy().view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row[:VOCAB]).tolist() for row in bits]


def masks_of(guides, tokens, *positions):
    """What may come after the first `length` tokens of `row`, for each (row, length)."""
    rows, lengths = np.array(positions, np.int64).T
    pending = guides.start(rows, lengths, tokens)
    masks = pending.result()
    found: list[list[int] | None] = [None] * len(positions)
    for place, ids in zip(masks.places.tolist(), allowed(masks), strict=True):
        found[place] = ids
    return found


def buffer(*texts):
    """Token buffers [ROWS, 32] with a text in each row."""
    tokens = torch.zeros(ROWS, 32, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(list(text.encode()), dtype=torch.int32)
    return tokens


def test_only_guided_rows_have_a_mask(guides):
    tokens = buffer("p:", "p:1", "p:")
    guides.set(1, 2, sampling(regex("[0-9]+")))
    assert guides.start(np.array([0, 2]), np.array([2, 2]), tokens) is None
    assert masks_of(guides, tokens, (0, 2), (1, 3), (2, 2)) == [None, [*DIGITS, EOS, EOT], None]
    guides.free([0, 1])
    assert guides.start(np.array([1]), np.array([3]), tokens) is None


def test_a_row_is_followed_token_by_token(guides):
    tokens = buffer("p:4096")
    guides.set(0, 2, sampling(regex("[0-9]{1,4}")))
    assert masks_of(guides, tokens, (0, 2)) == [DIGITS]
    for length in (3, 4, 5):
        assert masks_of(guides, tokens, (0, length)) == [[*DIGITS, EOS, EOT]]
    assert masks_of(guides, tokens, (0, 6)) == [[EOS, EOT]]


def test_a_resumed_row_begins_with_what_it_had(guides):
    """As after a preemption, or on a core that takes over: all generated tokens come at once."""
    tokens = buffer("p:4096")
    guides.set(3, 2, sampling(regex("[0-9]{1,4}")))
    tokens[3] = tokens[0]
    assert masks_of(guides, tokens, (3, 5)) == [[*DIGITS, EOS, EOT]]
    guides.free([3])
    guides.set(4, 2, sampling(regex("[0-9]{1,4}")))
    tokens[4] = tokens[0]
    assert masks_of(guides, tokens, (4, 6)) == [[EOS, EOT]]


def test_positions_of_drafts_are_masked_by_the_tokens_before_them(guides):
    tokens = buffer("p:40x6", "q:7")
    guides.set(0, 2, sampling(regex("[0-9]{2}x[0-9]")))
    guides.set(1, 2, sampling(regex("[0-9]")))
    found = masks_of(guides, tokens, (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (1, 3))
    assert found == [DIGITS, DIGITS, [ord("x")], DIGITS, [EOS, EOT], [EOS, EOT]]


def test_positions_need_not_come_in_order(guides):
    tokens = buffer("p:40x6", "q:7")
    guides.set(0, 2, sampling(regex("[0-9]{2}x[0-9]")))
    guides.set(1, 2, sampling(regex("[0-9]")))
    assert masks_of(guides, tokens, (0, 4), (1, 2), (0, 2), (0, 3)) == [[ord("x")], DIGITS, DIGITS, DIGITS]


def test_drafts_that_were_not_taken_leave_no_trace(guides):
    tokens = buffer("p:40x6")
    guides.set(0, 2, sampling(regex("[0-9]{2}(x|y)[0-9]")))
    masks_of(guides, tokens, (0, 2), (0, 3), (0, 4), (0, 5))
    tokens[0, 3:5] = torch.tensor(list(b"1y"), dtype=torch.int32)
    assert masks_of(guides, tokens, (0, 3)) == [DIGITS]
    assert masks_of(guides, tokens, (0, 4), (0, 5)) == [list(b"xy"), DIGITS]


def test_a_draft_that_the_grammar_refuses_harms_nothing(guides):
    tokens = buffer("p:4zz", "q:7")
    guides.set(0, 2, sampling(regex("[0-9]{2}")))
    guides.set(1, 2, sampling(regex("[0-9]")))
    found = masks_of(guides, tokens, (0, 3), (0, 4), (0, 5), (1, 3))
    assert (found[0], found[3]) == (DIGITS, [EOS, EOT])
    tokens[0, 3] = ord("5")
    assert masks_of(guides, tokens, (0, 4)) == [[EOS, EOT]]


def test_a_row_goes_back(guides):
    tokens = buffer("p:4096")
    guides.set(0, 2, sampling(regex("[0-9]{1,4}")))
    assert masks_of(guides, tokens, (0, 6)) == [[EOS, EOT]]
    assert masks_of(guides, tokens, (0, 2)) == [DIGITS]
    assert masks_of(guides, tokens, (0, 5)) == [[*DIGITS, EOS, EOT]]


def test_tokens_after_the_end_are_nobodys_matter(guides):
    """Steps that were planned before the end was known still run the row."""
    tokens = buffer("p:40")
    tokens[0, 4], tokens[0, 5] = EOS, ord("x")
    guides.set(0, 2, sampling(regex("[0-9]{2}")))
    assert masks_of(guides, tokens, (0, 4)) == [[EOS, EOT]]
    for length in (5, 6):
        assert EOS in masks_of(guides, tokens, (0, length))[0]


def test_stop_ids_may_come_where_the_grammar_may_end(guides):
    tokens = buffer("p:1", "p:1", "p:1")
    guides.set(0, 2, sampling(regex("[0-9]+"), stop_ids=[EOS, EOT, ord("x")]))
    guides.set(1, 2, sampling(regex("[0-9]+"), may_end=False))
    guides.set(2, 2, sampling(regex("[0-9]+"), stop_ids=[ord("x")]))
    found = masks_of(guides, tokens, (0, 3), (1, 3), (2, 3))
    assert found == [[*DIGITS, ord("x"), EOS, EOT], DIGITS, [*DIGITS, ord("x")]]


def test_ids_that_end_come_where_nothing_else_may(guides):
    tokens = buffer("p:1", "p:1", "p:1")
    guides.set(0, 2, sampling(regex("[0-9]"), min_tokens=9))
    guides.set(1, 2, sampling(regex("[0-9]"), may_end=False))
    guides.set(2, 2, sampling(regex("[0-9]"), stop_ids=[ord("x")], min_tokens=3))
    assert masks_of(guides, tokens, (0, 3), (1, 3), (2, 3)) == [[EOS, EOT], [EOS, EOT], [ord("x")]]


def test_a_minimum_length_keeps_ends_away_as_long_as_the_grammar_goes_on(guides):
    tokens = buffer("p:1234", "p:1234", "p:2222")
    guides.set(0, 2, sampling(regex("[0-9]+"), min_tokens=3))
    guides.set(1, 2, sampling(regex("[0-9]+"), stop_ids=[ord("5")], min_tokens=3))
    guides.set(2, 2, sampling(regex("2+"), stop_ids=[ord("2")], min_tokens=15))
    without_five = [digit for digit in DIGITS if digit != ord("5")]
    assert masks_of(guides, tokens, (0, 4), (1, 4), (2, 4)) == [DIGITS, without_five, [ord("2")]]
    assert masks_of(guides, tokens, (0, 5), (1, 5)) == [[*DIGITS, EOS, EOT], DIGITS]


def test_a_grammar_that_cannot_be_followed_allows_nothing_and_harms_no_neighbour(guides, caplog):
    """A row alone ends with an error: the sampler finds no token for it."""
    tokens = buffer("p:1", "p:1")
    guides.set(0, 2, sampling("start: <nowhere>"))
    guides.set(1, 2, sampling(regex("[0-9]")))
    assert masks_of(guides, tokens, (0, 3), (1, 3)) == [[], [EOS, EOT]]
    assert "unknown special token" in caplog.text


def test_an_error_of_the_compiler_itself_is_not_hidden(byte_tokenizer):
    def broken():
        raise OSError("no such file")

    guides = Guides(ROWS, broken, threads=1)
    guides.set(0, 1, sampling(regex("a")))
    with pytest.raises(OSError, match="no such file"):
        masks_of(guides, buffer("p"), (0, 1))


def test_more_rows_than_threads(guides, byte_tokenizer):
    many = Guides(384, lambda: Grammars(byte_tokenizer, VOCAB, [EOS]), threads=2)
    tokens = torch.full((384, 8), ord("1"), dtype=torch.int32)
    for row in range(384):
        many.set(row, 2, sampling(regex(f"[0-9]{{{row % 5 + 1}}}"), stop_ids=[EOS]))
    found = masks_of(many, tokens, *((row, 3) for row in range(384)))
    assert found == [[EOS] if row % 5 == 0 else DIGITS for row in range(384)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize("neighbour", [{}, {"logit_bias": {5: 3.0}}, {"repetition_penalty": 1.3}])
def test_logits_of_guided_rows_alone_are_masked(guides, dtype, logprobs, neighbour):
    """A guided row draws by its mask; the rest, and all log probabilities, are as without guides."""
    rng = np.random.default_rng(7)
    tokens = buffer("p:1", "p:1", "p:1", "p:1")
    rows = np.arange(4)
    settings = [
        sampling(regex("[0-9]+"), temperature=0, logprobs=logprobs),
        sampling(None, temperature=0, **neighbour),
        sampling(regex("[a-z]"), temperature=0, logit_bias={97: 2.0}),
        sampling(None, temperature=0, logprobs=logprobs),
    ]
    states = [SamplingState(ROWS), SamplingState(ROWS)]
    for row, setting in enumerate(settings):
        guides.set(row, 2, setting)
        states[0].set(row, 2, setting)
        states[1].set(row, 2, setting)
    lengths = np.array([3, 3, 2, 3])
    logits = torch.from_numpy(rng.normal(size=(4, VOCAB)).astype(np.float32)).to(dtype)
    batch = SamplingRows.upload(rows, lengths, torch.device("cpu"))
    masks = guides.start(rows, lengths, tokens).result()
    plain = sample(logits.clone(), batch, tokens, states[0])
    guided = sample(logits.clone(), batch, tokens, states[1], masks)
    ids = [*DIGITS, EOS, EOT]
    letters = list(range(97, 123))
    biased = logits[2].float()
    biased[97] += 2.0
    assert guided.tokens.tolist() == [
        ids[logits[0, ids].float().argmax()],
        plain.tokens[1],
        letters[biased[letters].argmax()],
        plain.tokens[3],
    ]
    for ours, other in zip(guided.logprobs, plain.logprobs, strict=True):
        assert torch.equal(ours.values[:, 1:], other.values[:, 1:])
        assert torch.equal(ours.ids[:, 1:], other.ids[:, 1:])


def test_a_mask_and_other_rules_that_leave_nothing_are_no_token(guides):
    tokens = buffer("p:1", "p:1")
    state = SamplingState(ROWS)
    for row, bias in enumerate(([[ord("a")]], [])):
        setting = RowSampling(SamplingParams(temperature=0), [EOS], bias, 0, guide=Guide(regex("a"), True))
        guides.set(row, 2, setting)
        state.set(row, 2, setting)
    rows, lengths = np.arange(2), np.array([2, 2])
    masks = guides.start(rows, lengths, tokens).result()
    batch = SamplingRows.upload(rows, lengths, torch.device("cpu"))
    assert sample(torch.zeros(2, VOCAB), batch, tokens, state, masks).tokens.tolist() == [-1, ord("a")]


WISHES = {ord('"'): 4.0, ord("}"): 4.0, ord("]"): 4.0, ord(","): 3.0, ord("0"): 2.0, ord("a"): 1.0, EOS: 5.0}
"""What the scripted model wants next to its script, above all to end."""


def follow(guides, setting, script):
    """The text of a greedy model that wants `script` letter by letter, then EOS, under a grammar."""
    guides.set(0, 1, setting)
    tokens = torch.zeros(ROWS, 64, dtype=torch.int32)
    wanted = [*script.encode(), EOS]
    ids: list[int] = []
    while len(ids) < 60:
        logits = torch.zeros(1, VOCAB)
        for token, wish in WISHES.items():
            logits[0, token] = wish
        logits[0, wanted[len(ids)] if len(ids) < len(wanted) else EOS] += 10.0
        length = 1 + len(ids)
        guides.start(np.array([0]), np.array([length]), tokens).result().apply(logits)
        token = int(logits.argmax())
        if token in (EOS, EOT):
            return bytes(ids).decode()
        tokens[0, length] = token
        ids.append(token)
    return None


CHOICES = ["ab", "abc", "abcd"]
STRANGE = 'a+b(c)|"é🌶"\n[x]'


@pytest.mark.parametrize(
    ("fields", "script", "said"),
    [
        ({"choice": CHOICES}, "abcd", "abcd"),
        ({"choice": CHOICES[::-1]}, "abcd", "abcd"),
        ({"choice": CHOICES + CHOICES}, "ab", "ab"),
        ({"choice": CHOICES}, "abcx", "abc"),
        ({"choice": [STRANGE, "a+"]}, STRANGE, STRANGE),
        ({"regex": "[0-9]+"}, "12", "12"),
        ({"regex": "[0-9]{1,4}"}, "12", "12"),
        ({"regex": "^(yes|no)$"}, "yes$", "yes"),
        ({"regex": r"yes\$"}, "yes$", "yes$"),
        ({"grammar": 'root ::= "a" | "ab"'}, "ab", "ab"),
        ({"grammar": 'root ::= "a" | "ab"'}, "a", "a"),
        ({"json": {"type": "string", "maxLength": 9}}, r'"\"\\\n\u0007é"', r'"\"\\\n\u0007é"'),
        ({"json": {"type": "array", "items": {"type": "number"}}}, "[-0.5e+10,1E5,0]", "[-0.5e+10,1E5,0]"),
        ({"json": {"type": "integer", "maximum": 99}}, "4096", "40"),
        ({"json_object": True}, '{"a":[]} and more', '{"a":[]}'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_where_a_grammar_may_end_the_model_decides(guides, byte_tokenizer, fields, script, said):
    """It says what it wants where that is allowed, is bent where not, and ends when it wants to."""
    reader = GuideReader(byte_tokenizer, lambda: Grammars(byte_tokenizer, VOCAB, [EOS]))
    grammar = reader.read(StructuredOutputsParams(**fields))
    assert follow(guides, sampling(grammar), script) == said
