"""Pre-tokenizers of byte-level vocabularies, by the names of GGUF and transformers.

The patterns are those of the models' own tokenizer.json; GGUF names them in `tokenizer.ggml.pre`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.models import BPE

_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION_OR_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _CONTRACTION_OR_WORD + r"|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTION_OR_WORD + r"|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split text."""

    pattern: str | None = None
    """What a piece looks like; None for GPT-2's pattern, which `tokenizers` has built in."""
    single_digits: bool = False
    """Split every digit off first."""
    compose: bool = False
    """Compose characters with their accents first (Unicode NFC)."""
    whole_words: bool = False
    """Take a piece that is a token as that token, without applying merges."""
    adds_bos: bool = False
    """Whether a GGUF file that does not say so has BOS put first."""


GPT2 = PreTokenizer()
QWEN2 = PreTokenizer(_QWEN2, compose=True)
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3_WHOLE = PreTokenizer(_LLAMA3, whole_words=True, adds_bos=True)

GGUF_PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3_WHOLE,
    "llama3": _LLAMA3_WHOLE,
    "llama-v3": _LLAMA3_WHOLE,
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "dbrx": PreTokenizer(_LLAMA3),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, adds_bos=True),
}

BYTE_LEVEL_CLASSES = {"GPT2Tokenizer": GPT2, "Qwen2Tokenizer": QWEN2}
"""transformers' tokenizer classes that are read from vocab.json and merges.txt."""


def byte_level_backend(
    model: "BPE", kind: PreTokenizer, *, prefix_space: bool = False
) -> "tokenizers.Tokenizer":
    """Return a byte-level tokenizer that splits text as `kind` says; `prefix_space` puts a space first."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    model.ignore_merges = kind.whole_words
    backend = Tokenizer(model)
    steps: list[Any] = []
    if kind.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=kind.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    if kind.compose:
        backend.normalizer = normalizers.NFC()
    return backend


def frame(backend: "tokenizers.Tokenizer", *, bos: str | None, eos: str | None) -> None:
    """Let `encode` put these tokens around a text, where they are not None."""
    from tokenizers.processors import TemplateProcessing

    ids = {"bos": bos and backend.token_to_id(bos), "eos": eos and backend.token_to_id(eos)}
    around = [(name, token_id) for name, token_id in ids.items() if isinstance(token_id, int)]
    before = ["bos"] if bos else []
    after = ["eos"] if eos else []
    if around:
        backend.post_processor = TemplateProcessing([*before, "$A", *after], special_tokens=around)
