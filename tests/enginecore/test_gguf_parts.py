"""A GGUF model in several files, as llama.cpp's gguf-split writes them, and paths that name nothing."""

import shutil

import numpy as np
import pytest
from gguf import GGUFWriter

from cores import Ask, run, start_core
from enginecore import model_files
from enginecore.errors import ModelError
from enginecore.model_files import locate

HIDDEN, INNER, VOCAB, LAYERS = 32, 48, 64, 2


def write(path, **split):
    """Write a random Llama; with `split_max_tensors` in several files."""
    writer = GGUFWriter(path, "llama", **split)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)])
    random = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        products = {"attn_q": HIDDEN, "attn_k": HIDDEN, "attn_v": HIDDEN, "attn_output": HIDDEN}
        shapes |= {f"blk.{layer}.{name}": (size, HIDDEN) for name, size in products.items()}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}": (INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, INNER)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def parts(tmp_path):
    write(tmp_path / "tiny.gguf", split_max_tensors=6)
    found = sorted(tmp_path.glob("tiny-*.gguf"))
    assert [part.name for part in found] == [f"tiny-0000{i}-of-00004.gguf" for i in range(1, 5)]
    return found


def test_the_first_part_loads_them_all(parts, tmp_path):
    whole = write(tmp_path / "whole.gguf")
    ask = Ask([1, 2, 3, 4], 20)
    expected, got = (run(start_core(path), [ask])[0].tokens for path in (whole, parts[0]))
    assert got == expected
    assert len(set(got)) > 3


def test_a_later_part_alone_names_the_first(parts):
    with pytest.raises(
        ModelError, match=r"-00003-of-00004\.gguf is part 3 of a model in 4 GGUF files"
    ) as told:
        locate(str(parts[2]))
    assert "give the first, tiny-00001-of-00004.gguf" in str(told.value)


def test_a_missing_part_is_named(parts):
    parts[3].unlink()
    with pytest.raises(ModelError, match=r"tiny-00004-of-00004\.gguf is missing: it is part 4"):
        locate(str(parts[0]))


def test_a_part_under_another_name_is_refused(parts, tmp_path):
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelError, match=r"-00003-of-00004\.gguf is not part 3 of 4"):
        locate(str(parts[0]))
    other = shutil.copy(parts[0], tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"other\.gguf is one of 4 GGUF files .* NAME-00001-of-00004\.gguf"):
        locate(str(other))


@pytest.mark.parametrize("name", ["missing.gguf", "models/missing.gguf", "folder/", "a/b/c", "./x", "a b"])
def test_a_path_does_not_ask_the_hub(name, monkeypatch, tmp_path):
    def ask(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"there is no (file|folder or .gguf file) {name}"):
        locate(name)


def test_a_folder_of_gguf_files_says_which_there_are(parts, tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json.*tiny-00001-of-00004\.gguf"):
        locate(str(tmp_path))
    with pytest.raises(ModelError, match=r"there is no file .*tony\.gguf.*tiny-00001-of-00004\.gguf"):
        model_files.find(str(tmp_path / "tony.gguf"))
