"""Decode steps that replay graphs against steps without, on the same schedules.

CUDA graphs have a stand-in that calls the captured function again on the fixed tensors, on the CPU.
"""

import logging

import pytest

from checkpoints import llama_config, save_random
from cores import Ask, run, start_core
from graph_stand_ins import RerunRecorder
from pagedattn import CaptureError, cuda_graphs
from pagedattn.cuda_graphs import GraphProgram, graph_shapes

MODELS = {
    "llama": llama_config(),
    "llama, dynamic rope": llama_config(
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    ),
}
SCHEDULES = {
    "whole prompts": {},
    "chunks, prefix hits and preemptions": {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 5,
        "block_size": 4,
        "num_blocks_override": 30,
        "max_model_len": 100,
    },
}


@pytest.fixture
def recorders(monkeypatch):
    """Have the runner's program be graphs; yields their recorders."""
    made = []

    def capture(run, example, *, block_size, max_tokens, max_seqs, max_length):
        made.append(RerunRecorder())
        shapes = graph_shapes(max_seqs, max_length)
        return GraphProgram(run, example, shapes, made[-1], block_size=block_size, max_tokens=max_tokens)

    monkeypatch.setattr(cuda_graphs, "LENGTH", 24)
    monkeypatch.setattr("enginecore.worker.runner.program.capture", capture)
    return made


def asks():
    """Prompts of many lengths, some with a prefix in common."""
    prefix = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    return [Ask(prefix[: 4 * (number % 3)] + [7 + number] * (1 + 9 * number % 40), 12) for number in range(8)]


def answers(model, **options):
    return [answer.tokens for answer in run(start_core(model, **options), asks())]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_same_tokens(config, options, backend, tmp_path, recorders, monkeypatch):
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", backend)
    model = save_random(config, tmp_path)
    found = answers(model, **options)
    (recorder,) = recorders
    assert recorder.replays >= 8
    assert found == answers(model, enforce_eager=True, **options)
    assert len(recorders) == 1


def test_without_graphs_the_model_runs_operation_by_operation(tmp_path, monkeypatch, caplog):
    def capture(*given, **named):
        raise CaptureError("no CUDA graph of 256 decodes of up to 128 tokens: out of memory")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr("enginecore.worker.runner.program.capture", capture)
    model = save_random(llama_config(), tmp_path)
    found = answers(model)
    assert "the model runs operation by operation: no CUDA graph of 256 decodes" in caplog.text
    assert found == answers(model, enforce_eager=True)
