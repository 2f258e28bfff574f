"""Vocabularies that the text tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import ROLES, backend
from enginecore.frontend.text.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tokenizers and models that lies beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("shared/data is not beside the repository")
    return SHARED


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
