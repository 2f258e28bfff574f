"""A decoder cut into pipeline stages computes what the whole one does, and each stage loads only its own."""

import pytest
import torch

from checkpoints import gemma_config, gpt2_config, llama_config, qwen3_moe_config, save_random
from collectives import LocalCommunicator
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.models.parallel import ModelParallel
from model_steps import load, run_stages

IDS = [(5 * i * i + i + 3) % 256 for i in range(24)]

MODELS = {
    "llama": lambda: llama_config(num_hidden_layers=3),
    "gpt2": lambda: gpt2_config(n_layer=3),
    "gemma2 tied": lambda: gemma_config(2),
    "qwen3 moe": lambda: qwen3_moe_config(),
}


@pytest.mark.parametrize("model", MODELS)
def test_stages_give_the_logits_of_the_whole(model, tmp_path):
    path = save_random(MODELS[model](), tmp_path)
    whole = load(path)
    layers = whole.spec.num_layers
    stages = [load(path, layers=held) for held in (range(1), range(1, 2), range(2, layers))]
    expected = run_stages([whole], IDS, prefill=20)
    torch.testing.assert_close(run_stages(stages, IDS, prefill=20), expected, atol=0, rtol=0)


def test_each_stage_holds_its_layers_and_ends(tmp_path):
    path = save_random(gpt2_config(n_layer=3), tmp_path)
    first, middle, last = (load(path, layers=held) for held in (range(1), range(1, 2), range(2, 3)))
    assert [len(stage.layers) for stage in (first, middle, last)] == [1, 1, 1]
    assert [stage.embed is not None for stage in (first, middle, last)] == [True, False, False]
    assert [stage.head is not None for stage in (first, middle, last)] == [False, False, True]
    with pytest.raises(ValueError, match="not the last stage"):
        first.logits(torch.zeros(1, 64))


@pytest.mark.parametrize("held", [range(0), range(0, 3, 2), range(2, 4)])
def test_a_stage_is_a_run_of_layers(held, tmp_path):
    spec = load(save_random(gpt2_config(n_layer=3), tmp_path)).spec
    with pytest.raises(ValueError, match="some of the 3 layers in order"):
        Decoder(spec, ModelParallel(LocalCommunicator()), max_positions=8, layers=held)


def test_a_step_without_tokens_runs(tmp_path):
    model = load(save_random(qwen3_moe_config(), tmp_path))
    assert run_stages([model], [], prefill=0).shape == (0, 320)
