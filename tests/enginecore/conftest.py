"""Vocabularies that the text tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from enginecore.text.tokenizer import Tokenizer

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


def byte_backend() -> tokenizers.Tokenizer:
    """Return a byte tokenizer: a token's id is its byte, and no two bytes ever join."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE({spelling[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<eot>", "<pad>"])
    return backend


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes, then <bos>, <eos>, <eot>, <pad>; nothing is put around a text."""
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return Tokenizer(byte_backend(), special_tokens=roles)


@pytest.fixture
def byte_folder(tmp_path: Path) -> Path:
    """A folder that holds only the byte tokenizer's tokenizer.json."""
    byte_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
