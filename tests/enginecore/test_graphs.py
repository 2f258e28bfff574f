"""Decode steps that replay graphs against steps without, on the same schedules.

CUDA graphs have a stand-in that calls the captured function again on the fixed tensors, on the CPU.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

import graph_stand_ins
from checkpoints import llama_config, mixtral_config, save_random
from cores import run, start_core
from enginecore.config import make_config
from enginecore.model_files import locate
from enginecore.worker.runner.program import StepLimits, graph_bytes, layer_program
from enginecore.worker.worker import Worker
from graph_stand_ins import RerunRecorder
from pagedattn import CaptureError, KVLayout, allocate, cuda_graphs
from pagedattn.cuda_graphs import GraphProgram, graph_shapes
from schedules import SCHEDULES, asks

MODELS = {
    "llama": llama_config(),
    "llama, dynamic rope": llama_config(
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    ),
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


def load(path, **options):
    """A worker on the CPU, its configuration, and the layout of its cache."""
    config = make_config({"model": str(path), "dtype": "float32", "device": "cpu", **options})
    worker = Worker(config, locate(str(path)))
    model = worker._model
    layout = KVLayout(len(model.layers), model.kv_heads, model.spec.head_dim, 16, torch.float32)
    return worker, config, layout


LIMITS = StepLimits(64, 20, 5000)


@pytest.mark.parametrize("eager", [False, True])
def test_the_cache_leaves_room_for_graphs(eager, tmp_path, monkeypatch):
    path = save_random(llama_config(), tmp_path)
    worker, config, layout = load(path, enforce_eager=eager)
    graph_stand_ins.put_in_place(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_cuda_device", lambda example: torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 5 << 20)
    needed = worker._measured_bytes(config, layout, LIMITS)
    if eager:
        assert needed == 5 << 20
        return
    # 1, 2, 4, 8, 16 and 20 sequences, of up to 4096 tokens and up to 5000; and the fixed tensors.
    fixed = needed - (5 << 20) - (12 << 20)
    columns = -(-5000 // 16)
    assert fixed == 20 * (8 + 4 * worker._model.spec.hidden_size + 8 + 4 + 4 * columns + 8) + 4 * 21
    assert len(graph_stand_ins.graph.captures) == 2


def test_no_room_is_left_where_there_are_no_graphs(tmp_path):
    worker, _, layout = load(save_random(llama_config(), tmp_path))
    assert graph_bytes(worker._model, allocate(layout, 1, "cpu"), torch.float32, LIMITS) == 0


def test_experts_would_count_padding(tmp_path, caplog):
    worker, _, _ = load(save_random(mixtral_config(), tmp_path))
    caplog.set_level(logging.INFO)
    on_a_device = SimpleNamespace(is_cuda=True)
    assert layer_program(worker._model, on_a_device, torch.float32, LIMITS) is None
    assert "operation by operation: experts count their tokens" in caplog.text
