"""Embeddings in a front-end: what models and requests ask for, sums of chunks, encodings, resuming."""

import base64
import json
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginecore import PoolingParams, Request
from enginecore.config import make_config
from enginecore.errors import ConfigError, ModelError, RequestError
from enginecore.frontend.openai import embedding_entry
from enginecore.frontend.pooling import PooledVector, Pooler, PoolingPlan, cosine
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.prompts import truncated
from enginecore.messages import EngineLimits, PooledRows
from enginecore.model_files import ModelFiles
from enginecore.sampling_params import SamplingParams
from front_ends import front, step

LIMITS = EngineLimits(64, 320, 8, 16, hidden_size=4)
MEAN = PoolingPlan("mean", False, None, SamplingParams())
LENGTH = 2
"""The finish code of a token that is the last there may be."""


def write(folder: Path, pooling: dict | None, *kinds: str) -> ModelFiles:
    """Write the files that sentence-transformers has beside a model."""
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"path": f"1_{kind}", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return ModelFiles("m", folder, {})


def modes(**true: bool) -> dict:
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    return {"word_embedding_dimension": 4} | {f"pooling_mode_{n}": true.get(n, False) for n in names}


def test_a_model_without_files_of_its_own_takes_the_last_state_with_length_1():
    plan = Pooler.of(ModelFiles("m", Path("m"), {}), None).plan(PoolingParams(), LIMITS)
    assert plan[:3] == ("last", True, None)


@pytest.mark.parametrize(
    ("pooling", "kinds", "right"),
    [
        (modes(mean_tokens=True), ("Pooling",), ("mean", False)),
        (modes(mean_tokens=True), ("Pooling", "Normalize"), ("mean", True)),
        (modes(lasttoken=True) | {"include_prompt": True}, ("Pooling", "Normalize"), ("last", True)),
        ({"pooling_mode": "lasttoken"}, ("Pooling",), ("last", False)),
        ({"pooling_mode": "mean"}, ("Pooling",), ("mean", False)),
        (None, ("Normalize",), ("last", True)),
    ],
)
def test_sentence_transformers_files_say_how(tmp_path, pooling, kinds, right):
    plan = Pooler.of(write(tmp_path, pooling, *kinds), None).plan(PoolingParams(), LIMITS)
    assert plan[:2] == right


@pytest.mark.parametrize(
    ("pooling", "kinds", "said"),
    [
        (modes(cls_token=True), ("Pooling",), "cls_token"),
        (modes(mean_tokens=True, lasttoken=True), ("Pooling",), "mean_tokens and lasttoken"),
        (modes(), ("Pooling",), "nothing"),
        (modes(mean_tokens=True), ("Pooling", "Dense"), "Dense"),
    ],
)
def test_what_cannot_be_followed_is_said_when_an_embedding_is_wanted(tmp_path, pooling, kinds, said):
    files = write(tmp_path, pooling, *kinds)
    with pytest.raises(RequestError, match=said):
        Pooler.of(files, None).plan(PoolingParams(), LIMITS)
    assert Pooler.of(files, None).plan(PoolingParams(pooling_type="mean"), LIMITS).kind == "mean"
    assert Pooler.of(files, {"pooling_type": "LAST"}).plan(PoolingParams(), LIMITS).kind == "last"


@pytest.mark.parametrize("text", ["{", "{}", '["a"]', "[{}]"])
def test_modules_that_are_none(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        Pooler.of(ModelFiles("m", tmp_path, {}), None)


def test_the_option_changes_the_model_s_way_and_a_request_changes_both(tmp_path):
    files = write(tmp_path, modes(mean_tokens=True), "Pooling")
    given = make_config({"pooler_config": '{"seq_pooling_type": "LAST", "normalize": true}'}).pooler_config
    pooler = Pooler.of(files, given)
    assert pooler.plan(PoolingParams(), LIMITS)[:2] == ("last", True)
    asked = PoolingParams(pooling_type="Mean", use_activation=False)
    assert pooler.plan(asked, LIMITS)[:2] == ("mean", False)


def test_a_request_may_name_the_size_that_every_vector_has(tmp_path):
    pooler = Pooler.of(write(tmp_path, modes(lasttoken=True), "Pooling"), None)
    assert pooler.plan(PoolingParams(dimensions=LIMITS.hidden_size), LIMITS).dimensions is None
    with pytest.raises(RequestError, match="matryoshka"):
        pooler.plan(PoolingParams(dimensions=LIMITS.hidden_size - 1), LIMITS)


@pytest.mark.parametrize(
    "given",
    [
        {"pooling_type": "CLS"},
        {"pooling_type": 3},
        {"pooling": "last"},
        {"use_activation": "yes"},
        {"dimensions": 0},
        {"pooling_type": "last", "seq_pooling_type": "mean"},
    ],
    ids=str,
)
def test_a_pooler_config_that_is_wrong_is_refused_at_start(given):
    with pytest.raises(ConfigError, match="pooler_config"):
        front(None, pooler_config=given)


@pytest.mark.parametrize(
    "fields",
    [
        {"dimensions": 0},
        {"dimensions": True},
        {"dimensions": "8"},
        {"use_activation": 1},
        {"pooling_type": "max"},
        {"skip_reading_prefix_cache": "no"},
    ],
    ids=str,
)
def test_parameters_that_are_wrong(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        PoolingParams(**fields)


@given(
    states=st.lists(st.tuples(*[st.floats(-1e3, 1e3, width=32)] * 3), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 39), max_size=6),
    restart=st.integers(0, 6),
)
def test_a_mean_does_not_depend_on_how_a_prompt_is_cut_or_begun_anew(states, cuts, restart):
    hidden = np.array(states, np.float32)
    bounds = sorted({0, len(hidden), *(cut for cut in cuts if cut < len(hidden))})
    chunks = list(pairwise(bounds))
    vector = PooledVector(MEAN, len(hidden))
    for start, end in [*chunks[:restart], *chunks]:  # some chunks have run before the prompt began anew
        vector.add(start, end - start, hidden[start:end].astype(np.float64).sum(0).astype(np.float32))
    right = hidden.astype(np.float64).mean(0)
    np.testing.assert_allclose(vector.result(), right, rtol=1e-5, atol=1e-3)


def test_positions_that_are_missing_make_no_vector():
    part = np.ones(3, np.float32)
    vector = PooledVector(MEAN, 10)
    vector.add(0, 4, part)
    with pytest.raises(ValueError, match="4 of 10"):
        vector.result()
    with pytest.raises(ValueError, match="from 5 on"):
        vector.add(5, 5, part)


def test_a_vector_is_cut_before_it_gets_length_1():
    vector = PooledVector(PoolingPlan("last", True, 2, SamplingParams()), 1)
    vector.add(0, 1, np.array([3, 4, 100], np.float32))
    assert vector.result().tolist() == pytest.approx([0.6, 0.8])


def test_zero_vectors_have_no_direction():
    vector = PooledVector(PoolingPlan("last", True, None, SamplingParams()), 1)
    vector.add(0, 1, np.zeros(3, np.float32))
    assert vector.result().tolist() == [0, 0, 0]
    assert cosine(np.zeros(3), np.ones(3)) == 0


def test_base64_is_little_endian_float32():
    vector = np.array([1.5, -2.25, 0.1], np.float32)
    packed = embedding_entry(4, vector, "base64")
    assert (packed["index"], packed["object"]) == (4, "embedding")
    assert struct.unpack("<3f", base64.b64decode(packed["embedding"])) == tuple(vector.tolist())
    assert embedding_entry(4, vector, None)["embedding"] == vector.tolist()


@pytest.mark.parametrize(
    ("most", "side", "right"),
    [
        (9, "right", [1, 10, 11, 12, 2]),
        (4, "right", [1, 10, 11, 2]),
        (4, "left", [1, 11, 12, 2]),
        (2, "right", [1, 2]),
        (1, "right", [1]),
        (1, "left", [2]),
    ],
)
def test_truncation_keeps_what_is_put_around_a_text(most, side, right):
    prompt = Prompt("abc", [1, 10, 11, 12, 2])
    assert truncated(prompt, [10, 11, 12], most, side) == right
    # Where the text's own tokens differ from those within the whole, there is nothing to tell apart.
    assert truncated(prompt, [10, 13, 12], 2, side) == ([1, 10] if side == "right" else [12, 2])
    bare = replace(prompt, text=None, token_ids=[10, 11, 12])
    assert truncated(bare, None, 2, side) == ([10, 11] if side == "right" else [11, 12])


def test_a_request_whose_rank_ended_is_pooled_anew_elsewhere():
    frontend = front(None)
    plan = frontend.pooling_plan(PoolingParams(pooling_type="mean", use_activation=False))
    (first,) = frontend.add(Request.to_pool("a", Prompt(None, [5, 6, 7]), plan)).messages
    assert (first.max_tokens, first.sampling.pooling) == (1, "mean")
    assert first.sampling.params.skip_reading_prefix_cache

    def part(number: int, start: int, count: int, value: float) -> PooledRows:
        columns = np.array([number]), np.array([start], np.int32), np.array([count], np.int32)
        return PooledRows(*columns, np.full((1, 2), value, np.float32))

    assert frontend.process(step(pooled=part(first.number, 0, 2, 100.0))).changed == []
    again = frontend.resume([first.number])[first.number]
    assert again.generated.tolist() == []
    # What still comes from the rank that ended is passed over.
    frontend.process(step((first.number, 0, LENGTH), pooled=part(first.number, 2, 1, 50.0)))
    frontend.process(step(pooled=part(again.number, 0, 1, 1.0)))
    processed = frontend.process(step((again.number, 0, LENGTH), pooled=part(again.number, 1, 2, 5.0)))
    (state,) = processed.changed
    assert (processed.generated_tokens, state.finished) == (0, True)
    assert state.output().embedding.tolist() == [2.0, 2.0]
    assert frontend.unfinished == 0
