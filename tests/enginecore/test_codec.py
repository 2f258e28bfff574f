"""Messages as bytes: what goes in comes out, and nothing that was not declared does."""

from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from enginecore.codec import Decoder, Encoder


class Inner(NamedTuple):
    ids: NDArray[np.int32]
    flags: NDArray[np.bool_] | None = None


class Message(msgspec.Struct, tag="message", array_like=True):
    inner: Inner
    by_number: dict[int, Inner]
    values: NDArray[np.float32]


def cross(message):
    return Decoder(Message).decode(Encoder().encode(message))


def test_arrays_keep_shape_type_and_values():
    inner = Inner(np.array([[1, -2], [2**31 - 1, 0]], np.int32), np.array([True, False]))
    sent = Message(inner, {7: Inner(np.empty(0, np.int32))}, np.array([np.nan, -np.inf, 0.1], np.float32))
    got = cross(sent)
    np.testing.assert_array_equal(got.inner.ids, inner.ids)
    np.testing.assert_array_equal(got.inner.flags, inner.flags)
    assert (got.by_number[7].ids.shape, got.by_number[7].flags) == ((0,), None)
    np.testing.assert_array_equal(got.values, sent.values)
    assert got.values.dtype == np.float32
    assert not got.values.flags.writeable


def test_strided_views_cross_as_they_look():
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(cross(Message(Inner(ids), {}, np.empty(0, np.float32))).inner.ids, ids)


def test_an_array_of_another_type_than_declared_is_refused():
    bad = Message(Inner(np.array([1], np.int64)), {}, np.empty(0, np.float32))
    with pytest.raises(msgspec.ValidationError, match="an array of int32 is expected, this one is '<i8'"):
        cross(bad)


@pytest.mark.parametrize("value", [object(), np.array(["a"]), np.array([1.0])], ids=["object", "text", "f8"])
def test_what_does_not_cross(value):
    with pytest.raises(TypeError, match="not cross to other processes"):
        Encoder().encode([value])
