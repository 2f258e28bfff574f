from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from enginecore.errors import ModelError
from enginecore.gguf import read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("a.text", "wörd")
    writer.add_int8("a.small", -3)
    writer.add_uint64("a.large", 2**40)
    writer.add_float32("a.real", 0.5)
    writer.add_bool("a.truth", True)
    writer.add_array("a.texts", ["", "x", "語"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.truths", [True, False])
    writer.add_array("a.reals", [0.25, -1.5])
    writer.add_tensor("single", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.arange(4, dtype=np.float16))
    blocks = np.arange(2 * 36, dtype=np.uint8).reshape(2, 36)
    writer.add_tensor("blocks", blocks, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_become_python_values(file: Path) -> None:
    metadata, _ = read_header(file)
    assert metadata == {
        "general.architecture": "llama",
        "a.text": "wörd",
        "a.small": -3,
        "a.large": 2**40,
        "a.real": 0.5,
        "a.truth": True,
        "a.texts": ["", "x", "語"],
        "a.numbers": [1, -2, 3],
        "a.truths": [True, False],
        "a.reals": [0.25, -1.5],
    }


def test_tensors_are_where_the_gguf_package_finds_them(file: Path) -> None:
    _, tensors = read_header(file)
    expected = GGUFReader(file).tensors
    assert list(tensors) == [tensor.name for tensor in expected]
    for theirs in expected:
        ours = tensors[theirs.name]
        assert ours.shape == tuple(theirs.shape.tolist())
        assert ours.tensor_type == theirs.tensor_type
        assert ours.data.dtype == theirs.data.dtype
        np.testing.assert_array_equal(ours.data, theirs.data)


def test_a_file_cut_short_is_refused(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:200])
    with pytest.raises(ModelError, match=r"x\.gguf is not a readable GGUF file"):
        read_header(file)
    file.write_bytes(content[:-64])
    with pytest.raises(ModelError, match="cut short: tensor blocks"):
        _ = read_header(file)[1]["blocks"].data


@pytest.mark.parametrize(
    ("start", "message"),
    [(b"", "empty"), (b"PK\x03\x04", "begins with"), (b"GGUF\x01\x00\x00\x00", "version is 1")],
)
def test_other_files_are_refused(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(start + bytes(64 if start else 0))
    with pytest.raises(ModelError, match=message):
        read_header(path)
