import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from kvblocks import PrefixHasher

# sha256 of the header (format, block size 2, no extra keys) and the tokens as little-endian int32.
PLAIN_HEADER = b"kvblocks-1" + b"\x02\x00\x00\x00" + b"\x00\x00\x00\x00"
ONE_TWO = b"\x01\x00\x00\x00\x02\x00\x00\x00"
THREE_FOUR = b"\x03\x00\x00\x00\x04\x00\x00\x00"


def keys(tokens, extra=(), block_size=2):
    return PrefixHasher(block_size, extra).extend(tokens)


def test_a_key_is_the_hash_of_all_that_precedes_the_end_of_its_block():
    assert keys([1, 2, 3, 4, 5]) == [
        hashlib.sha256(PLAIN_HEADER + ONE_TWO).digest(),
        hashlib.sha256(PLAIN_HEADER + ONE_TWO + THREE_FOUR).digest(),
    ]


def test_extra_keys_come_first_length_prefixed_and_sorted_by_tag():
    header = (
        b"kvblocks-1" + b"\x02\x00\x00\x00" + b"\x02\x00\x00\x00"
        b"\x04\0\0\0\0\0\0\0lora" + b"\x02\0\0\0\0\0\0\0\xc3\xa9"
        b"\x04\0\0\0\0\0\0\0salt" + b"\x01\0\0\0\0\0\0\0x"
    )  # fmt: skip
    expected = [hashlib.sha256(header + ONE_TWO).digest()]
    assert keys([1, 2], {"salt": b"x", "lora": "é"}) == expected
    assert keys([1, 2], [("lora", "é"), ("salt", "x")]) == expected


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6, 7], [3], [4, 4], [2, 7], [0]])
def test_it_does_not_matter_how_tokens_arrive(cuts):
    tokens = np.arange(100, 109, dtype=np.int32)
    hasher = PrefixHasher(2)
    arrived = [key for part in np.split(tokens, cuts) for key in hasher.extend(part)]
    assert arrived == keys(tokens)
    assert len(arrived) == 4
    assert hasher.num_tokens == 9


def test_extend_returns_only_the_blocks_that_became_full():
    hasher = PrefixHasher(4)
    assert [len(hasher.extend([7] * n)) for n in (3, 1, 9, 2, 1)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint16, ">i4"])
def test_integer_types_agree(dtype):
    assert keys(np.array([1, 2, 3, 4], dtype)) == keys([1, 2, 3, 4])


def test_strided_tokens_agree():
    assert keys(np.arange(8, dtype=np.int32)[::2]) == keys([0, 2, 4, 6])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "adapter"}, {"lora": "adapter"}),
        ({"salt": "a", "lora": "b"}, {"salt": "b", "lora": "a"}),
        ({"salt": "a"}, {"salt": "a", "lora": ""}),
        ({}, {"salt": ""}),
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": b"\x01\0\0\0\0\0\0\0b"}, {"a": "", "b": ""}),
        ([("image", "1"), ("image", "2")], [("image", "2"), ("image", "1")]),
        ([("image", "12")], [("image", "1"), ("image", "2")]),
    ],
)
def test_different_extra_keys_give_different_keys(one, other):
    assert not set(keys([1, 2, 3, 4], one)) & set(keys([1, 2, 3, 4], other))


def test_an_extra_key_cannot_stand_for_tokens():
    assert keys([3, 4], {"salt": ONE_TWO})[0] not in keys([1, 2, 3, 4], {"salt": ""})


def test_block_size_and_every_earlier_token_count():
    assert not set(keys([1, 2, 3, 4], block_size=2)) & set(keys([1, 2, 3, 4], block_size=4))
    changed, same = keys([9, 2, 3, 4]), keys([1, 2, 3, 4])
    assert changed[0] != same[0]
    assert changed[1] != same[1]
    assert keys([1, 2, 9, 4])[0] == same[0]


def test_the_same_keys_in_every_process():
    program = (
        "from kvblocks import PrefixHasher\n"
        "print([k.hex() for k in PrefixHasher(2, {'salt': 's', 'lora': 'l'}).extend([1, 2, 3, 4])])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1234")
    }
    assert outputs == {str([key.hex() for key in keys([1, 2, 3, 4], {"salt": "s", "lora": "l"})])}


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, -1], ValueError),
        (np.array([-1], np.int32), ValueError),
        ([2**31], ValueError),
        (np.array([2**31], np.uint32), ValueError),
        (np.array([2**32 + 1], np.int64), ValueError),
        ([0.5], TypeError),
        ([True], TypeError),
        ([[1, 2]], ValueError),
    ],
)
def test_what_is_no_token_is_refused(tokens, error):
    hasher = PrefixHasher(2)
    with pytest.raises(error):
        hasher.extend(tokens)
    assert hasher.num_tokens == 0
    assert hasher.extend([1, 2]) == keys([1, 2])


@pytest.mark.parametrize("extra", [{"salt": 3}, {"salt": None}, [(b"salt", b"x")]])
def test_extra_keys_of_other_types_are_refused(extra):
    with pytest.raises(TypeError, match="salt"):
        PrefixHasher(2, extra)


def test_a_block_holds_at_least_one_token():
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        PrefixHasher(0)
