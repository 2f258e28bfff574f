"""Steps and results on their way between processes."""

import msgspec
import numpy as np
import pytest

from batchsched import AdmittedRow
from enginecore.executor.messages import (
    Failure,
    Progress,
    StepDone,
    decode_message,
    decode_step,
    encode_message,
    encode_step,
)
from enginecore.executor.step import SampledTokens, StepOutput
from enginecore.messages import EngineLimits, PositionLogprobs, RowSampling
from enginecore.sampling_params import SamplingParams
from kvblocks import BlockCopies, CopyList
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
    sampling = [RowSampling(params, [5, 6], [[1, 2], [3]], seed, 7) for seed in (-(2**63), 2**63 - 1)]
    admitted = [AdmittedRow(3, 2**60, ids(1, 2, 3), 2, 0, True, 0.5)] * 2
    copies = BlockCopies(CopyList(ids(0, 1), ids(2, 3)), CopyList(ids(4), ids(5)))
    sampled = SampledTokens(ids(0, 2), ids(7, 8), ids(100, 101))
    step = decode_only(3)
    step = step._replace(plan=step.plan._replace(admitted=admitted, freed=ids(2)))
    step = step._replace(sampling=sampling, copies=copies, sampled=sampled)
    assert_equal(decode_step(encode_step(step)), step)


def test_results_with_everything():
    values = np.array([[0.5, -np.inf], [np.nan, -0.0]], np.float32)
    entry = PositionLogprobs(ids(1, 2, 3, 4).reshape(2, 2), values, ids(1, 9))
    output = StepOutput(3, ids(5, 6), {0: entry, 7: entry}, {2: entry})
    assert_equal(decode_message(encode_message(StepDone(output))).output, output)


@pytest.mark.parametrize(
    "message",
    [
        Progress("weights loaded"),
        EngineLimits(100, 320, 10, 16, 0, None, "cpu"),
        Failure("ValueError", "no", "Traceback\n…", 2**60),
    ],
)
def test_other_messages(message):
    assert decode_message(encode_message(message)) == message


def test_what_is_no_step():
    step = decode_only(2)
    with pytest.raises(msgspec.ValidationError, match="an array of int32 is expected"):
        decode_step(encode_step(step._replace(plan=step.plan._replace(rows=np.arange(2)))))
    with pytest.raises(msgspec.ValidationError):
        decode_step(msgspec.msgpack.encode(["no step"]))
