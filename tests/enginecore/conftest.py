"""Vocabularies and a front-end that the text tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vocabularies
from byte_tokenizer import ROLES, backend
from data_files import STORIES
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.text.tokenizer import Tokenizer
from front_ends import front


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind of tokenizer: the story model's own, and those of `vocabularies`."""
    folder = tmp_path_factory.mktemp
    return {
        "stories": STORIES,
        "byte-level": vocabularies.write_byte_level(folder("byte-level")),
        "byte-fallback": vocabularies.write_byte_fallback(folder("byte-fallback"), metaspace=False),
        "metaspace": vocabularies.write_byte_fallback(folder("metaspace"), metaspace=True),
    }


@pytest.fixture(scope="session")
def transformers_tokenizer() -> Callable[[Path], Any]:
    """transformers' own loading of a tokenizer folder, to compare with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes, then <bos>, <eos>, <eot>, <pad>; nothing is put around a text."""
    return Tokenizer(backend(), special_tokens=ROLES)


@pytest.fixture
def byte_folder(tmp_path: Path) -> Path:
    """A folder that holds only the byte tokenizer's tokenizer.json."""
    backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def frontend(byte_tokenizer: Tokenizer) -> Frontend:
    """A front-end whose tokenizer's ids are bytes."""
    return front(byte_tokenizer)
