"""Load a model's tokenizer: from tokenizer.json, vocab.json and merges.txt, or a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginecore.errors import ModelError
from enginecore.frontend.text.pre_tokenizers import BYTE_LEVEL_CLASSES, byte_level_backend, frame
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles, find, read_json

if TYPE_CHECKING:
    import tokenizers

_HUB_PATTERNS = ["*.json", "*.jinja", "*.txt"]
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(files: ModelFiles, tokenizer: str | None = None) -> Tokenizer | None:
    """Return the model's tokenizer, or the one that `tokenizer` names: a folder, `.gguf` file or hub id.

    None when the model comes without one and none is named: then only token ids can be sent.

    Raises:
        ModelError: there is a tokenizer, but it is broken or of a kind that is not supported.
    """
    path = files.path if tokenizer is None else find(tokenizer, patterns=_HUB_PATTERNS)
    if path.suffix == ".gguf":
        from enginecore.frontend.text.gguf_tokenizer import tokenizer_from_gguf

        loaded = tokenizer_from_gguf(path)
    else:
        loaded = _from_folder(path, files.config)
    if loaded is None and tokenizer is not None:
        raise ModelError(f"{tokenizer} holds no tokenizer")
    return loaded


def _from_folder(path: Path, model_config: Mapping[str, Any]) -> Tokenizer | None:
    settings = read_json(path / "tokenizer_config.json") or {}
    if "added_tokens_decoder" not in settings:
        settings |= read_json(path / "special_tokens_map.json") or {}
    if (path / "tokenizer.json").is_file():
        backend = _from_tokenizer_json(path / "tokenizer.json")
        _add_missing_tokens(backend, settings)
    elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        backend = _from_vocab_and_merges(path, settings, model_config)
    elif (path / "tokenizer.model").is_file():
        raise ModelError(
            f"{path} has only a tokenizer.model; save its tokenizer as tokenizer.json (transformers does)"
        )
    else:
        return None
    return Tokenizer(
        backend, special_tokens=_special_tokens(settings), chat_template=_chat_template(path, settings)
    )


def _from_tokenizer_json(path: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from error


def _from_vocab_and_merges(
    path: Path, settings: dict[str, Any], model_config: Mapping[str, Any]
) -> "tokenizers.Tokenizer":
    """Load byte-level BPE in GPT-2's two files, as transformers' classes of that name do."""
    from tokenizers.models import BPE

    name = settings.get("tokenizer_class") or _class_of(model_config)
    kind = name.removesuffix("Fast")
    if kind not in BYTE_LEVEL_CLASSES:
        known = ", ".join(sorted(BYTE_LEVEL_CLASSES))
        raise ModelError(
            f"{path} has no tokenizer.json, and without it {name} is not supported (only {known})"
        )
    try:
        model = BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ModelError(f"{path}: vocab.json and merges.txt are not readable: {error}") from error
    backend = byte_level_backend(
        model, BYTE_LEVEL_CLASSES[kind], prefix_space=bool(settings.get("add_prefix_space"))
    )
    if backend.token_to_id("<|endoftext|>") is not None:
        for role in ("bos_token", "eos_token", "unk_token") if kind == "GPT2Tokenizer" else ("eos_token",):
            settings.setdefault(role, "<|endoftext|>")
    _add_missing_tokens(backend, settings, read_json(path / "added_tokens.json") or {})
    roles = _special_tokens(settings)
    frame(
        backend,
        bos=roles.get("bos_token") if settings.get("add_bos_token") else None,
        eos=roles.get("eos_token") if settings.get("add_eos_token") else None,
    )
    return backend


def _class_of(model_config: Mapping[str, Any]) -> str:
    is_qwen = str(model_config.get("model_type", "")).startswith(("qwen2", "qwen3"))
    return "Qwen2Tokenizer" if is_qwen else "GPT2Tokenizer"


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return every setting that names a token by its role, model-specific roles too."""
    found = {}
    for role, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if role.endswith("_token") and isinstance(text, str):
            found[role] = text
    return found


def _add_missing_tokens(
    backend: "tokenizers.Tokenizer", settings: Mapping[str, Any], listed: Mapping[str, int] | None = None
) -> None:
    """Add what is named as an added or special token and the vocabulary does not have as one.

    `listed` is the content of added_tokens.json, an older way to write what `settings` hold now.
    """
    from tokenizers import AddedToken

    named = _named_tokens(settings)
    wanted: dict[int, Mapping[str, Any]] = {
        int(token_id): token for token_id, token in settings.get("added_tokens_decoder", {}).items()
    }
    for text, token_id in (listed or {}).items():
        wanted[token_id] = {"content": text, "special": text in named, "normalized": text not in named}
    in_order = [wanted[token_id] for token_id in sorted(wanted)]
    in_order += [{"content": text, "special": True} for text in named]
    present = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    for token in in_order:
        if token["content"] in present:
            continue
        present.add(token["content"])
        flags = {flag: bool(token.get(flag)) for flag in _TOKEN_FLAGS}
        add = backend.add_special_tokens if flags["special"] else backend.add_tokens
        add([AddedToken(token["content"], **flags)])


def _named_tokens(settings: Mapping[str, Any]) -> list[str]:
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, Mapping):
        extra = list(extra.values())
    names = [token["content"] if isinstance(token, Mapping) else str(token) for token in extra]
    roles = _special_tokens(settings)
    return [roles[role] for role in _ROLES if role in roles] + names


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the template in a file of its own, or else the one among the settings."""
    own_file = path / "chat_template.jinja"
    named = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if own_file.is_file():
        named["default"] = own_file
    if named:
        templates = {name: file.read_text(encoding="utf-8") for name, file in named.items()}
        return templates["default"] if list(templates) == ["default"] else templates
    setting = settings.get("chat_template")
    if setting is None:
        setting = (read_json(path / "chat_template.json") or {}).get("chat_template")
    if isinstance(setting, list):
        return {entry["name"]: entry["template"] for entry in setting}
    return setting
