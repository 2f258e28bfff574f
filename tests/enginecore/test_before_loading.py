"""On a CPU all that the files' headers tell is checked before a weight is read."""

import pytest

from checkpoints import llama_config, save_random
from enginecore import LLM
from enginecore.errors import ConfigError, ModelError
from enginecore.worker.runner import kv_sizing

OPTIONS = {"dtype": "float32", "device": "cpu"}


@pytest.fixture
def without_weights(tmp_path):
    path = save_random(llama_config(), tmp_path)
    (path / "model.safetensors").write_bytes(b"no weights")
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513 is more than the 512 positions the model has"),
        ({"max_model_len": 400, "num_blocks_override": 4}, "the longest that fits is 65"),
        ({"kv_cache_memory_bytes": 100}, "the KV cache has no block"),
        ({"kv_cache_memory_bytes": 1 << 60}, "is more than the .* that are left"),
        ({}, "not a readable safetensors file"),
    ],
)
def test_what_cannot_be_is_refused_before(options, message, without_weights):
    with pytest.raises((ConfigError, ModelError), match=message):
        LLM(str(without_weights), **OPTIONS, **options)


STEP = 4 * 2048 * (4 * 64 + 2 * 128 + 64) + 256 * 320 * (4 + 4)
"""2,048 tokens: four of 64 hidden features, projections, those rotated, mixed values; 256 rows of logits."""


def test_weights_that_do_not_fit_are_refused_before(without_weights, monkeypatch):
    """320 * 64 * 2 numbers at the ends, 2 * (64 * (64 + 32 + 32 + 64 + 3 * 96) + 128) + 64 between them."""
    monkeypatch.setattr(kv_sizing, "free_memory", lambda: 300 << 10)
    said = r"does not fit in memory: 300\.0 KiB free, of it 4\d\d\.\d KiB weights, 5\.1 MiB activations"
    with pytest.raises(ConfigError, match=said):
        LLM(str(without_weights), **OPTIONS)


def test_the_cache_gets_two_fifths_of_what_weights_and_activations_leave(tmp_path, monkeypatch):
    """The weights, and rotary tables of 512 * 16."""
    path = save_random(llama_config(), tmp_path)
    monkeypatch.setattr(kv_sizing, "free_memory", lambda: 14 << 20)
    weights = 4 * (2 * 320 * 64 + 2 * (64 * (64 + 32 + 32 + 64 + 3 * 96) + 2 * 64) + 64 + 512 * 16)
    block = 2 * 2 * 2 * 16 * 16 * 4
    blocks = int(0.4 * ((14 << 20) - weights - STEP)) // block
    assert LLM(str(path), **OPTIONS).llm_engine.limits.num_blocks == blocks
