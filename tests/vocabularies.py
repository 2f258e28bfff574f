"""Tokenizers trained by the tests: byte-level BPE as GPT-2's, BPE with byte fallback as Llama 2's."""

import json
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

STORY = """\
Once upon a time, there was a girl who lived by the sea. Every morning she went down to the shore with her
dog, and the two of them looked for shells. One day the dog ran off behind the rocks and did not come back.
"Where are you?" called the girl, and she ran after him. There, in a pool that the tide had left, sat a
small green fish. "I can't swim home," said the fish, "for the sea has gone away without me." So the girl
took off her hat, filled it with water, and carried the fish to the waves. The dog barked, the fish jumped,
and the cat that had watched it all from the wall went home hungry.
    It rained for three days. On the fourth the sun was out again, and the girl found a shell on her step:
it was white, with a red edge, and when she held it to her ear she heard somebody say "thank you" from very
far away. She told her mother, who only smiled. But the dog, who was lying on the mat, sat up and listened
too.
"""
"""The training text of both vocabularies."""

MERGES = 250
"""Tokens of each vocabulary beside its bytes, characters and special tokens."""

END_OF_TEXT = 256 + MERGES
"""The id of <|endoftext|>, the last of the byte-level vocabulary."""

BYTES_START = 3
"""The id of <0x00> in the vocabulary with byte fallback, after <unk>, <s> and </s>."""


def byte_level() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id, without <|endoftext|>, and merges of a byte-level BPE that has all 256 bytes."""
    return _trained(pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel.alphabet())


def write_byte_level(path: Path) -> Path:
    """Write vocab.json, merges.txt and tokenizer_config.json, the form GPT-2's tokenizer has."""
    tokens, merges = byte_level()
    vocabulary = {token: number for number, token in enumerate([*tokens, "<|endoftext|>"])}
    _write_json(path / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *map(" ".join, merges)]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **roles})
    return path


def byte_fallback() -> list[str]:
    """Pieces by id in the order SentencePiece writes them; behind the bytes, an earlier one merges first."""
    tokens, merges = _trained(pre_tokenizers.Metaspace(), [])
    characters = tokens[: len(tokens) - len(merges)]
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    return ["<unk>", "<s>", "</s>", *single_bytes, "▁▁", *map("".join, merges), *characters]


def write_byte_fallback(path: Path, *, metaspace: bool) -> Path:
    """Write tokenizer.json and tokenizer_config.json, the form of a SentencePiece BPE converted.

    Spaces become ▁ in a pre-tokenizer if `metaspace` (as Mistral's), or in a normalizer (as Llama 2's).
    """
    ids = {piece: number for number, piece in enumerate(byte_fallback())}
    model = models.BPE(ids, _ways_to_merge(ids), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    else:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", ids["<s>"])])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(path / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", **roles})
    return path


def encode_sentencepiece(text: str) -> list[int]:
    """Encode by the definition of SentencePiece's BPE: join the two neighbours that make the best piece."""
    pieces = byte_fallback()
    ids = {piece: number for number, piece in enumerate(pieces)}
    found = list("▁" + text.replace(" ", "▁"))
    while joins := [(ids[a + b], at) for at, (a, b) in enumerate(pairwise(found)) if a + b in ids]:
        _, at = min(joins)
        found[at : at + 2] = ["".join(found[at : at + 2])]
    encoded = []
    for piece in found:
        encoded += [ids[piece]] if piece in ids else [BYTES_START + byte for byte in piece.encode()]
    return encoded


def _trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer, alphabet: list[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id, single characters first, and the merges that make the others, of a BPE of the story."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    characters = {each for word, _ in pre_tokenizer.pre_tokenize_str(STORY) for each in word}
    size = len(characters.union(alphabet)) + MERGES
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([STORY], trainer)
    model = json.loads(backend.to_str())["model"]
    vocabulary = model["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [tuple(pair) for pair in model["merges"]]


def _ways_to_merge(ids: dict[str, int]) -> list[tuple[str, str]]:
    """All merges that make a piece, by its rank, as converters derive them from SentencePiece scores."""
    ways = []
    for piece, rank in ids.items():
        if rank >= BYTES_START + 256:
            cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
            ways += [(rank, cut) for cut in cuts if cut[0] in ids and cut[1] in ids]
    return [cut for _, cut in sorted(ways, key=lambda way: way[0])]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
