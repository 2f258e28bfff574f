from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter

from enginecore.errors import ModelError
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles, locate
from vocabularies import BYTES_START, END_OF_TEXT, STORY, byte_fallback, byte_level, encode_sentencepiece

PROSE = [
    "Once upon a time, there was a girl.",
    "  two  spaces\n\n\ttabs AND don't StopNow",
    "héllo wörld 语言 👨‍👩‍👧 🌶 \u0301x",
    "<|im_start|>user\nHi<|im_end|>",
    "",
]
SPACE = byte_fallback().index("▁")
DIGITS = ["in 2024 we had 1234567 of ²3½", "a1b22c333", " 42"]


def write_gguf(path: Path, **metadata: Any) -> Path:
    """Write a GGUF file with a tokenizer's metadata and no tensors; a key's dots are written as __."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = "tokenizer." + key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(ModelFiles("", path, {}))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    tokenizer = load_tokenizer(locate("demo"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def gpt2() -> dict[str, Any]:
    """A byte-level vocabulary as a GGUF file would hold it."""
    tokens, merges = byte_level()
    return {
        "ggml__model": "gpt2",
        "ggml__tokens": [*tokens, "<|endoftext|>"],
        "ggml__token_type": [1] * END_OF_TEXT + [3],
        "ggml__merges": [" ".join(merge) for merge in merges],
        "ggml__bos_token_id": END_OF_TEXT,
        "ggml__eos_token_id": END_OF_TEXT,
    }


@pytest.fixture(scope="session")
def llama() -> dict[str, Any]:
    """A SentencePiece vocabulary as a GGUF file would hold it."""
    tokens = byte_fallback()
    return {
        "ggml__model": "llama",
        "ggml__tokens": tokens,
        "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "ggml__scores": [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)],
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0,
    }


@pytest.mark.slow
def test_the_demo_model_encodes_as_transformers_does(
    demo: Tokenizer, transformers_tokenizer: Callable[..., Any]
) -> None:
    path = locate("demo").path
    theirs = transformers_tokenizer(path.parent, gguf_file=path.name)
    for text in PROSE:
        ids = theirs.encode(text)
        assert demo.encode(text) == ids
        assert demo.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert demo.special_tokens == theirs.special_tokens_map
    metadata = GGUFReader(path).fields
    kinds = metadata["tokenizer.ggml.token_type"].contents()
    assert demo.special_ids == {token for token, kind in enumerate(kinds) if kind == 3}
    assert demo.chat_template == metadata["tokenizer.chat_template"].contents()


def test_the_demo_model_splits_every_digit(demo: Tokenizer) -> None:
    assert [demo.token_text(token) for token in demo.encode("in 2024.")] == ["in", " ", *"2024", "."]
    assert [demo.token_text(token) for token in demo.encode("x12²y")] == ["x", "1", "2", "²", "y"]


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_splits_as_transformers_does(gpt2: dict[str, Any], tmp_path: Path, pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    path = write_gguf(tmp_path / "x.gguf", **gpt2, ggml__pre=pre, ggml__add_bos_token=False)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    ours = load(path)
    for text in PROSE + DIGITS:
        assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("pre", ["smollm", "starcoder"])
def test_splits_digits_as_hugging_face_s_own_files_do(gpt2: dict[str, Any], tmp_path: Path, pre: str) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    tokens = gpt2["ggml__tokens"]
    merges = [tuple(merge.split(" ")) for merge in gpt2["ggml__merges"]]
    theirs = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = load(write_gguf(tmp_path / "x.gguf", **gpt2, ggml__pre=pre))
    for text in PROSE + DIGITS:
        assert ours.encode(text) == theirs.encode(text).ids


def test_llama3_takes_whole_words_that_no_merges_reach(tmp_path: Path) -> None:
    tokens = [*"abc", "ab", "abc", "<s>"]
    common: dict[str, Any] = {
        "ggml__model": "gpt2",
        "ggml__tokens": tokens,
        "ggml__token_type": [1] * 5 + [3],
        "ggml__merges": ["a b"],
        "ggml__bos_token_id": 5,
    }
    assert load(write_gguf(tmp_path / "l.gguf", **common, ggml__pre="llama-bpe")).encode("abc") == [5, 4]
    assert load(write_gguf(tmp_path / "q.gguf", **common, ggml__pre="qwen2")).encode("abc") == [3, 2]


def test_unknown_kinds_are_named(gpt2: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pre-tokenizer 'newest' is not supported"):
        load(write_gguf(tmp_path / "a.gguf", **gpt2, ggml__pre="newest"))
    with pytest.raises(ModelError, match="tokenizer 'rwkv' is not supported"):
        load(write_gguf(tmp_path / "b.gguf", ggml__model="rwkv", ggml__tokens=["a"]))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges.* is missing"):
        load(write_gguf(tmp_path / "c.gguf", ggml__model="gpt2", ggml__tokens=["a"]))
    with pytest.raises(ModelError, match="do not fit together"):
        load(write_gguf(tmp_path / "d.gguf", ggml__model="gpt2", ggml__tokens=["a"], ggml__merges=["a b"]))


def test_a_file_may_hold_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(ModelFiles("", write_gguf(tmp_path / "x.gguf"), {})) is None


def test_sentencepiece_encodes_by_its_definition(llama: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load(write_gguf(tmp_path / "x.gguf", **llama))
    for text in [*PROSE[:4], *DIGITS, STORY, "the theatre of shells", "<0x0A> is text", "a\nb"]:
        ids = encode_sentencepiece(text)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("dog</s>") == [1, *encode_sentencepiece("dog"), 2]
    assert tokenizer.token_bytes(BYTES_START + 0xF0) == b"\xf0"


def test_sentencepiece_puts_a_space_first_even_before_spaces(llama: dict[str, Any], tmp_path: Path) -> None:
    with_prefix = load(write_gguf(tmp_path / "x.gguf", **llama))
    without = load(write_gguf(tmp_path / "y.gguf", **llama, ggml__add_space_prefix=False))
    text = " a"
    assert [with_prefix.token_text(token) for token in with_prefix.encode(text)][1:] == ["  ", "a"]
    assert [without.token_text(token) for token in without.encode(text)][1:] == [" a"]
    assert with_prefix.decode(with_prefix.encode(text)) == text
    assert without.decode(without.encode(text)) == text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, SPACE]),
        ({"ggml__add_bos_token": False}, [SPACE]),
        ({"ggml__add_eos_token": True}, [1, SPACE, 2]),
        ({"ggml__add_bos_token": False, "ggml__add_eos_token": True}, [SPACE, 2]),
    ],
)
def test_bos_and_eos_as_the_file_says(
    llama: dict[str, Any], tmp_path: Path, settings: dict[str, Any], expected: list[int]
) -> None:
    tokenizer = load(write_gguf(tmp_path / "x.gguf", **llama, **settings, ggml__add_space_prefix=False))
    assert tokenizer.encode(" ") == expected


def test_users_own_tokens_stand_whole_and_are_shown(gpt2: dict[str, Any], tmp_path: Path) -> None:
    tokens = [*gpt2["ggml__tokens"], "<think>", "two  spaces"]
    types = [*gpt2["ggml__token_type"], 4, 4]
    tokenizer = load(
        write_gguf(tmp_path / "x.gguf", **{**gpt2, "ggml__tokens": tokens, "ggml__token_type": types})
    )
    ids = tokenizer.encode("<think>two  spaces<|endoftext|>")
    assert ids == [END_OF_TEXT + 1, END_OF_TEXT + 2, END_OF_TEXT]
    assert tokenizer.decode(ids) == "<think>two  spaces"
    assert tokenizer.token_bytes(END_OF_TEXT + 2) == b"two  spaces"


def test_templates_by_name(gpt2: dict[str, Any], tmp_path: Path) -> None:
    named: dict[str, Any] = {"chat_templates": ["tool_use"], "chat_template__tool_use": "T"}
    tokenizer = load(write_gguf(tmp_path / "x.gguf", **gpt2, **named, chat_template="D"))
    assert tokenizer.chat_template == {"default": "D", "tool_use": "T"}
