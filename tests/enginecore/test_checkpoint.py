"""A checkpoint that is not whole is refused with the name of what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import llama_config, save_random
from collectives import LocalCommunicator
from cores import Ask, run, start_core
from enginecore import LLMEngine
from enginecore.config import make_config
from enginecore.errors import ModelError
from enginecore.model_files import locate
from enginecore.sampling_params import SamplingParams
from enginecore.worker.weights.loading import load_decoder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_random(llama_config(), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def single(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "single")


@pytest.fixture
def sharded(single):
    """The model in three files with an index."""
    tensors = load_file(single / "model.safetensors")
    (single / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, single / file)
    (single / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return single


def load(path):
    return load_decoder(
        locate(str(path)),
        LocalCommunicator(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=64,
    )


def test_shards_give_what_one_file_gives(whole, sharded):
    shutil.copy(whole / "model.safetensors", sharded / "consolidated.safetensors")
    ask = Ask([1, 2, 3], 8, SamplingParams(temperature=0, logprobs=5))
    expected, got = (run(start_core(path), [ask])[0] for path in (whole, sharded))
    assert got.tokens == expected.tokens
    assert got.logprobs == expected.logprobs


def test_loading_tells_how_many_tensors_are_there(whole):
    told: list[tuple[int, int]] = []
    config = make_config({"model": str(whole), "dtype": "float32", "device": "cpu", "max_model_len": 64})
    LLMEngine(config, on_loaded=lambda *counts: told.append(counts)).shutdown()
    total = len(load_file(whole / "model.safetensors"))
    assert told == [(done, total) for done in range(1, total + 1)]


def test_a_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors"):
        load(sharded)


def test_a_folder_named_like_a_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    (sharded / "model-00002-of-00003.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors"):
        load(sharded)


def test_an_index_that_names_a_tensor_no_shard_has(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"model-00001.* lacks tensor model\.extra\.weight"):
        load(sharded)


@pytest.mark.parametrize("keep", [0, 7, 500, 0.5, -1])
def test_a_truncated_file(single, keep):
    file = single / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        load(single)


def change(path, edit):
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_missing_tensor(single):
    change(single, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"1 tensors .* first model\.layers\.1\.mlp\.up_proj\.weight"):
        load(single)


def test_an_unknown_tensor(single):
    change(single, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(96)}))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.bias has no place"):
        load(single)


def test_a_wrong_shape(single):
    change(single, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight: .*64.*63"):
        load(single)


def test_no_weights(single):
    (single / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no \.safetensors weights"):
        load(single)
    (single / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only \.bin weights"):
        load(single)


def test_places_that_hold_no_model(single, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="there is no folder"):
        locate(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        locate(str(tmp_path / "empty"))
    (single / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        locate(str(single))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        locate(str(tmp_path / "broken.gguf"))
