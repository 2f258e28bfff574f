import os
import subprocess
import sys

import pytest
import torch

from pagedattn import BackendUnavailable, backend_name, backends

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("OCTAVO_ATTENTION_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_the_device_decides():
    assert backend_name(CPU) == "cpu"
    assert backend_name(CUDA) == "triton"
    assert backend_name(torch.device("meta")) == "torch"


def test_without_triton_cuda_falls_back_to_torch(monkeypatch):
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    assert backend_name(CUDA) == "torch"
    with pytest.raises(BackendUnavailable, match="not installed"):
        backend_name(CUDA, "triton")


def test_the_environment_overrides_the_device_and_the_argument_both(monkeypatch):
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", "torch")
    assert backend_name(CUDA) == "torch"
    assert backend_name(CUDA, "triton") == "triton"


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", "")
    assert backend_name(CUDA) == "triton"


def test_unknown_names_are_refused_with_their_source(monkeypatch):
    with pytest.raises(ValueError, match=r"the backend argument names .* 'flash'; there are .*torch.*triton"):
        backend_name(CPU, "flash")
    monkeypatch.setenv("OCTAVO_ATTENTION_BACKEND", "xformers")
    with pytest.raises(ValueError, match=r"OCTAVO_ATTENTION_BACKEND names .* 'xformers'"):
        backend_name(CPU)


def test_triton_on_a_cpu_is_refused_unless_interpreted(monkeypatch):
    with pytest.raises(BackendUnavailable, match="CUDA devices, not on 'cpu'"):
        backend_name(CPU, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend_name(CPU, "triton") == "triton"


def test_importing_and_attending_on_a_cpu_loads_no_triton():
    program = """
import sys, torch, pagedattn
batch = pagedattn.build_batch([1], [3], [[0]], block_size=4)
pagedattn.attend(torch.ones(1, 1, 8), torch.ones(1, 2, 1, 4, 8), batch, scale=1.0)
print([name for name in sys.modules if name.split(".")[0] == "triton"])
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_back_end_has_every_operation(name):
    module = backends.load_backend(name)
    operations = [name for name in vars(backends.Backend) if not name.startswith("_")]
    assert len(operations) == 19
    # Not a submodule of the same name.
    assert [name for name in operations if not callable(getattr(module, name))] == []
