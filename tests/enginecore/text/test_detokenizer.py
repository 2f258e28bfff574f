import tracemalloc
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import byte_tokenizer
from enginecore.frontend.text.detokenizer import IncrementalDetokenizer
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles
from vocabularies import BYTES_START

SPICY_FAMILY = "🌶é语👨‍👩‍👧"


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True, step: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    deltas = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*deltas, detokenizer.flush()]


@pytest.fixture(scope="session")
def vocabulary(tokenizer_folders: dict[str, Path], request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders[request.param], {}))
    assert tokenizer is not None
    return tokenizer


every_vocabulary = pytest.mark.parametrize(
    "vocabulary", ["stories", "byte-fallback", "metaspace"], indirect=True
)


def test_characters_split_across_tokens_come_whole(byte_tokenizer: Tokenizer) -> None:
    deltas = stream(byte_tokenizer, list(SPICY_FAMILY.encode()))
    assert [delta for delta in deltas if delta] == list(SPICY_FAMILY)


def test_a_cut_character_is_held_until_the_end(byte_tokenizer: Tokenizer) -> None:
    assert stream(byte_tokenizer, [0xF0, 0x9F]) == ["", "", "\ufffd"]


def test_bytes_that_turn_out_to_be_no_character(byte_tokenizer: Tokenizer) -> None:
    deltas = stream(byte_tokenizer, [0xF0, 0x9F, 0x61, 0x62, 0xFF, 0x63])
    assert deltas == ["", "", "\ufffda", "b", "\ufffd", "c", ""]


def test_endless_bad_bytes_are_not_held_back(byte_tokenizer: Tokenizer) -> None:
    assert stream(byte_tokenizer, [0xFF] * 5) == ["\ufffd"] * 5 + [""]


def test_special_tokens_are_shown_only_when_asked_for(byte_tokenizer: Tokenizer) -> None:
    ids = [*b"a", 258, *b"b", 257]
    assert "".join(stream(byte_tokenizer, ids)) == "ab"
    assert "".join(stream(byte_tokenizer, ids, skip=False)) == "a<eot>b<eos>"


def test_ids_that_are_no_token_show_nothing(byte_tokenizer: Tokenizer) -> None:
    assert "".join(stream(byte_tokenizer, [*b"a", 300, 2**31 - 1, *b"b"])) == "ab"


@given(data=st.binary(max_size=40), step=st.integers(1, 5))
def test_any_bytes_join_to_the_plain_decoding(byte_tokenizer: Tokenizer, data: bytes, step: int) -> None:
    deltas = stream(byte_tokenizer, list(data), step=step)
    assert "".join(deltas) == data.decode("utf-8", "replace") == byte_tokenizer.decode(list(data))


bytes_like_text = st.lists(
    st.one_of(st.characters(), st.sampled_from(SPICY_FAMILY)).map(lambda char: char.encode("utf-8", "ignore"))
    | st.binary(min_size=1, max_size=2)
).map(b"".join)


@given(data=bytes_like_text, more=st.binary(max_size=4))
def test_what_is_shown_stays_right_whatever_follows(
    byte_tokenizer: Tokenizer, data: bytes, more: bytes
) -> None:
    shown = IncrementalDetokenizer(byte_tokenizer).push(list(data))
    assert (data + more).decode("utf-8", "replace").startswith(shown)
    whole = data.decode("utf-8", "replace")
    assert shown in (whole, whole[:-1])


@every_vocabulary
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_join_to_the_plain_decoding(vocabulary: Tokenizer, data: st.DataObject) -> None:
    token = st.integers(0, vocabulary.vocab_size + 3)
    if vocabulary.decoding.kind == "byte_fallback":
        token |= st.integers(BYTES_START, BYTES_START + 255)  # single bytes
    ids = data.draw(st.lists(token, max_size=24))
    skip = data.draw(st.booleans())
    assert "".join(stream(vocabulary, ids, skip)) == vocabulary.decode(ids, skip)


@every_vocabulary
@given(text=st.text(max_size=30))
@settings(max_examples=80, deadline=None)
def test_any_text_streams_back(vocabulary: Tokenizer, text: str) -> None:
    ids = vocabulary.encode(text, add_special_tokens=False)
    deltas = stream(vocabulary, ids, step=2)
    assert "".join(deltas) == vocabulary.decode(ids)


@pytest.mark.parametrize("vocabulary", ["metaspace"], indirect=True)
def test_a_run_of_byte_tokens_counts_as_a_whole(vocabulary: Tokenizer) -> None:
    pepper = [BYTES_START + byte for byte in "🌶".encode()]
    [the] = vocabulary.encode("the", add_special_tokens=False)
    assert stream(vocabulary, [*pepper, the]) == ["", "", "", "", "🌶 the", ""]
    # SentencePiece's decoding gives up a whole run for one bad byte, even its good characters.
    assert stream(vocabulary, [*pepper, BYTES_START + 0xFF, the])[-2:] == ["\ufffd" * 5 + " the", ""]


@pytest.mark.parametrize("vocabulary", ["metaspace"], indirect=True)
def test_text_after_a_prompt_keeps_its_first_space(vocabulary: Tokenizer) -> None:
    bos, *prompt = vocabulary.encode("Once upon")
    ids = vocabulary.encode("a time", add_special_tokens=False)
    assert IncrementalDetokenizer(vocabulary).push(ids) == "a time"
    assert IncrementalDetokenizer(vocabulary, prompt=[bos]).push(ids) == "a time"
    assert IncrementalDetokenizer(vocabulary, prompt=[bos, *prompt]).push(ids) == " a time"


def words() -> list[str]:
    return ["un", "##able", "##s", "to", ".", "do", "n't", "it", "\ufffd"]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.BPEDecoder(suffix="s"),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
@given(ids=st.lists(st.integers(0, 10), max_size=30))
def test_other_decoders_join_to_the_plain_decoding(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words())}, "un"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    assert tokenizer.decoding.kind == "other"
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@every_vocabulary
def test_a_token_costs_the_same_late_in_a_text(vocabulary: Tokenizer) -> None:
    ids = vocabulary.encode("the cat sat on the mat and the dog ran off ", add_special_tokens=False) * 200

    def most_allocated(count: int) -> int:
        """The most bytes that one token allocates after `count` others."""
        detokenizer = IncrementalDetokenizer(vocabulary)
        detokenizer.push(ids[:count])
        most = 0
        tracemalloc.start()
        for token in ids[:100]:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            detokenizer.push((token,))
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
        return most

    most_allocated(0)  # fills the vocabulary's table of pieces
    # All that was pushed before would be thousands of bytes.
    assert most_allocated(2000) < most_allocated(0) + 500


@pytest.mark.parametrize("kind", ["bytes", "byte_fallback", "other"])
def test_special_tokens_that_a_caller_needs_are_shown(tokenizer_folders: dict[str, Path], kind: str) -> None:
    """Others stay hidden, and the oracle is the backend's own decoding without them."""
    backend = byte_tokenizer.backend()
    if kind == "byte_fallback":
        backend = tokenizers.Tokenizer.from_file(str(tokenizer_folders["byte-fallback"] / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>", "<hidden>"])
    if kind == "other":
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decoding.kind == kind
    ids = tokenizer.encode("a time<hidden><tool_call> é the<hidden>", add_special_tokens=False)
    hidden = tokenizer.token_id("<hidden>")
    expected = backend.decode([token for token in ids if token != hidden], skip_special_tokens=False)
    assert "<tool_call>" in expected
    for step in (1, 2, len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer, shown=["<tool_call>", "<not there>"])
        shown = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
        assert "".join(shown) + detokenizer.flush() == expected
    assert "".join(stream(tokenizer, ids)) == backend.decode(ids)
