"""Steps and results on their way between processes."""

import statistics
import time

import msgspec
import numpy as np
import pytest

from enginecore.executor.messages import (
    Failure,
    Loaded,
    Progress,
    StepDone,
    decode_message,
    decode_step,
    encode_message,
    encode_step,
)
from enginecore.executor.step import BlockCopies, PositionLogprobs, RowStart, SampledTokens, StepOutput
from enginecore.sampling_params import SamplingParams
from steps import decode_only, ids


def assert_equal(mine, theirs):
    """Field by field, arrays with shape and type."""
    assert type(mine) is type(theirs)
    if isinstance(mine, np.ndarray):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(mine, theirs)
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs)
        for key in mine:
            assert_equal(mine[key], theirs[key])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert mine == theirs


def test_a_step_with_everything():
    params = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop=["x"], logprobs=2, seed=-1)
    start = RowStart(3, ids(1, 2, 3), 3, params, (5, 6), ((1, 2), (3,)), -(2**63), 0)
    copies = BlockCopies(*(ids(i, i + 1) for i in range(6)))
    sampled = SampledTokens(ids(0, 2), ids(7, 8), ids(100, 101))
    started = [start, start._replace(seed=2**63 - 1)]
    step = decode_only(3)._replace(started=started, copies=copies, sampled=sampled)
    assert_equal(decode_step(encode_step(step)), step)


def test_results_with_everything():
    values = np.array([[0.5, -np.inf], [np.nan, -0.0]], np.float32)
    entry = PositionLogprobs(2, ids(1, 2, 3, 4).reshape(2, 2), values, ids(1, 9))
    output = StepOutput(3, ids(5, 6), {0: entry, 7: entry}, [entry])
    assert_equal(decode_message(encode_message(StepDone(output))).output, output)


@pytest.mark.parametrize(
    "message",
    [
        Progress("weights loaded"),
        Loaded(10, 0, None, 100, 320, True),
        Failure("ValueError", "no", "Traceback\n…", 2**60),
    ],
)
def test_other_messages(message):
    assert decode_message(encode_message(message)) == message


def test_what_does_not_cross():
    step = decode_only(2)
    with pytest.raises(TypeError, match=r"int32, float32 and bool .* not int64"):
        encode_step(step._replace(rows=np.arange(2)))
    with pytest.raises(NotImplementedError, match="object does not cross"):
        encode_step(step._replace(closed=object()))
    with pytest.raises(msgspec.ValidationError):
        decode_step(msgspec.msgpack.encode(["no step"]))


def test_a_step_of_64_decodes_is_quick():
    step = decode_only(64)
    taken = []
    for _ in range(200):
        begin = time.perf_counter()
        decode_step(encode_step(step))
        taken.append(time.perf_counter() - begin)
    assert statistics.median(taken) < 50e-6
