"""Tokenizers from the metadata of GGUF files (keys: ggml's docs/gguf.md)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginecore import gguf
from enginecore.errors import ModelError
from enginecore.frontend.text.pre_tokenizers import GGUF_PRE_TOKENIZERS, byte_level_backend, frame
from enginecore.frontend.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.models import BPE

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Values of tokenizer.ggml.token_type."""

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # so spelled in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}

_SPACE = "▁"
"""How SentencePiece writes a space."""


def tokenizer_from_gguf(path: Path) -> Tokenizer | None:
    """Return the tokenizer that a GGUF file carries; None when it carries none.

    Raises:
        ModelError: it is of a kind that is not supported, or incomplete.
    """
    metadata = gguf.read(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    try:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(metadata, path)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(metadata), True
        else:
            raise ModelError(f"{path}: tokenizer {kind!r} is not supported (supported: gpt2, llama)")
    except KeyError as error:
        raise ModelError(f"{path}: metadata key {error} is missing") from error
    tokens = metadata["tokenizer.ggml.tokens"]
    _add_marked_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    ids = {role: metadata.get(f"tokenizer.ggml.{key}") for role, key in _ROLES.items()}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    roles = {role: tokens[token] for role, token in ids.items() if token is not None and token < len(tokens)}
    frame(
        backend,
        bos=roles.get("bos_token") if adds_bos else None,
        eos=roles.get("eos_token") if adds_eos else None,
    )
    return Tokenizer(backend, special_tokens=roles, chat_template=_chat_template(metadata))


def _byte_level(metadata: Mapping[str, Any], path: Path) -> tuple["tokenizers.Tokenizer", bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in GGUF_PRE_TOKENIZERS:
        known = ", ".join(sorted(GGUF_PRE_TOKENIZERS))
        raise ModelError(f"{path}: pre-tokenizer {name!r} is not supported (supported: {known})")
    kind = GGUF_PRE_TOKENIZERS[name]
    # A token may itself begin with a space, so the first character is never what separates the two.
    pairs = []
    for merge in metadata["tokenizer.ggml.merges"]:
        head, _, right = merge[1:].partition(" ")
        pairs.append((merge[:1] + head, right))
    return byte_level_backend(_bpe(metadata, pairs), kind), kind.adds_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = _bpe(
        metadata, _merges_by_score(metadata), byte_fallback=True, unk_token=tokens[unknown], fuse_unk=True
    )
    backend = Backend(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if prefix else steps)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return backend


def _bpe(metadata: Mapping[str, Any], merges: list[tuple[str, str]], **options: Any) -> "BPE":
    from tokenizers.models import BPE

    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    try:
        return BPE(vocabulary, merges, **options)
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ModelError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error


def _merges_by_score(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return merges that join pieces in the order SentencePiece would: what scores best comes first.

    Source: Kudo and Richardson, SentencePiece (2018); each piece's score is minus its rank in training.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    normal = {token: score for token, score, kind in zip(tokens, scores, types) if kind == _NORMAL}
    found = []
    for token, score in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-score, left, right))
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def _add_marked_tokens(backend: "tokenizers.Tokenizer", tokens: list[str], types: list[int]) -> None:
    """Let tokens that the file marks be found in text as a whole: control tokens, and users' own."""
    from tokenizers import AddedToken

    marked = {
        kinds: [AddedToken(token, normalized=False) for token, kind in zip(tokens, types) if kind in kinds]
        for kinds in ((_CONTROL, _UNKNOWN), (_USER_DEFINED,))
    }
    backend.add_special_tokens(marked[_CONTROL, _UNKNOWN])
    backend.add_tokens(marked[_USER_DEFINED,])


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates", [])
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in names}
    if not named:
        return default
    return named if default is None else {"default": default, **named}
