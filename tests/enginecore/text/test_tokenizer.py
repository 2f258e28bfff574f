from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from enginecore.errors import RequestError
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles

TEXTS = [
    "Once upon a time, there was a girl.",
    "  two  spaces\n\n\ttabs and don't stop",
    "héllo wörld 语言 👨‍👩‍👧 🌶 \u0301x ½ \x00",
    "def f(x):\n    return x if x else [\n    ]\r\n",
    "",
    " ",
    "a <s> </s> <|endoftext|> <|im_start|>user b",
]


@pytest.fixture(scope="session", params=["stories", "byte-level", "byte-fallback", "metaspace"])
def folder(tokenizer_folders: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    """Each of the folders in turn."""
    return tokenizer_folders[request.param]


@pytest.fixture(scope="session")
def ours(folder: Path) -> Tokenizer:
    """Our tokenizer of a folder."""
    tokenizer = load_tokenizer(ModelFiles("", folder, {}))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def theirs(folder: Path, transformers_tokenizer: Callable[[Path], Any]) -> Any:
    """transformers' tokenizer of the same folder."""
    return transformers_tokenizer(folder)


def test_ids_and_text_are_transformers_own(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


def test_special_tokens_are_transformers_own(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        token for token, entry in theirs.added_tokens_decoder.items() if entry.special
    }
    # transformers' Llama class makes up an unk_token that the folder may not name.
    assert ours.special_tokens.items() <= theirs.special_tokens_map.items()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=60, deadline=None)
def test_bytes_of_tokens_join_to_the_text(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text, add_special_tokens=False)
    joined = b"".join(ours.token_bytes(token) for token in ids)
    if ours.decoding.kind == "byte_fallback" and text:
        # SentencePiece writes a space as ▁, and puts one first.
        spaced = text.replace("▁", " ").encode()
        assert joined in (spaced, b" " + spaced)
    else:
        assert joined == text.encode()


def test_a_byte_is_a_token(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode("aé\n") == [0x61, 0xC3, 0xA9, 0x0A]
    assert [byte_tokenizer.token_bytes(token) for token in range(256)] == [bytes([b]) for b in range(256)]
    assert byte_tokenizer.token_text(0xC3) == "\ufffd"
    assert byte_tokenizer.vocab_size == 260


def test_special_tokens_in_text_become_their_ids(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode("a<eot>b") == [0x61, 258, 0x62]
    assert byte_tokenizer.token_bytes(258) == b"<eot>"
    assert byte_tokenizer.special_ids == {256, 257, 258, 259}
    assert (byte_tokenizer.bos_token_id, byte_tokenizer.eos_token_id) == (256, 257)


def test_ids_that_are_no_token_have_no_text(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.token_bytes(319) == b""
    assert byte_tokenizer.token_text(-1) == ""
    assert byte_tokenizer.decode([0x61, 319, -1, 2**40]) == "a"


def test_words_keep_their_space(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders["metaspace"], {}))
    assert tokenizer is not None
    ids = tokenizer.encode("the cat 🌶", add_special_tokens=False)
    assert [tokenizer.token_text(token) for token in ids[:2]] == [" the", " cat"]
    assert [tokenizer.token_bytes(token) for token in ids[-4:]] == [b"\xf0", b"\x9f", b"\x8c", b"\xb6"]


def test_half_a_surrogate_pair_is_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D83C at character 2"):
        byte_tokenizer.encode("ab\ud83c")
    with pytest.raises(RequestError, match=r"U\+DC00 at character 0"):
        byte_tokenizer.encode_batch(["fine", "\udc00"])


def test_truncation_and_padding_of_the_file_are_off() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[PAD]": 1}, "a"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8, pad_id=1)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert Tokenizer(backend).encode("a a a a") == [0, 0, 0, 0]
