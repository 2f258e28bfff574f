"""The choice of a back end: `torch` anywhere, `cpu` on CPUs that have a C compiler, `triton` on GPUs."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from typing import Literal, NamedTuple, Protocol, cast

import torch

from pagedattn.batch import AttentionBatch
from pagedattn.packed import PackedExperts, PackedWeight
from pagedattn.quantized import Quantization

BACKEND_VARIABLE = "OCTAVO_ATTENTION_BACKEND"
BACKENDS = ("torch", "cpu", "triton")


class BackendUnavailable(RuntimeError):
    """The back end that was asked for cannot run on this device or in this installation."""


Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""Activations without a gate; "gelu" is the exact form, by erf."""


class ScoreOptions(NamedTuple):
    """Options of the attention scores, made from query · key; see `attend`."""

    scale: float
    window: int | None
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    kv_scales: torch.Tensor | None = None


class Routing(NamedTuple):
    """The experts of each token, those of the highest weights first."""

    weights: torch.Tensor
    """float32 [tokens, k]."""
    experts: torch.Tensor
    """int32 [tokens, k]."""


class Groups(NamedTuple):
    """The rows that tokens become where each goes to k experts, sorted by expert and then by token."""

    starts: torch.Tensor
    """int32 [experts + 1]: rows starts[e] to starts[e + 1] are for expert e."""
    index: torch.Tensor
    """int32 [tokens * k]: the token of each row."""
    places: torch.Tensor
    """int32 [tokens, k]: the row of each token's choice."""


class Backend(Protocol):
    """Interface of a back-end module. Arguments were validated by `pagedattn.attention`."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        kv_scales: torch.Tensor | None,
    ) -> None: ...

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        options: ScoreOptions,
        out: torch.Tensor,
    ) -> None: ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def rotary(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor | None,
        cos_sin: torch.Tensor,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...

    def gelu_and_mul(self, x: torch.Tensor, approximate: Literal["tanh", "none"]) -> torch.Tensor: ...

    def activation(self, x: torch.Tensor, kind: Activation) -> torch.Tensor: ...

    def embedding(
        self,
        ids: torch.Tensor,
        table: PackedWeight,
        dtype: torch.dtype,
        scale: float,
        first: int | None,
        positions: torch.Tensor | None,
        position_table: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None: ...

    def grouped_matmul(self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor: ...

    def top_k_softmax(self, logits: torch.Tensor, k: int, normalise: bool) -> Routing: ...

    def group_by_expert(
        self, experts: torch.Tensor, num_experts: int, loads: torch.Tensor | None
    ) -> Groups: ...

    def grouped_linear(
        self,
        x: torch.Tensor,
        weight: PackedExperts,
        starts: torch.Tensor,
        index: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def weighted_sum(
        self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor: ...

    def linear_panel(self, dtype: torch.dtype, quantization: Quantization | None) -> int: ...

    def linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def apply_token_bitmask(
        self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None
    ) -> None: ...

    def top_k_top_p_sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor: ...


def backend_name(device: torch.device, requested: str | None = None) -> str:
    """The back end for `device`: `requested`, else OCTAVO_ATTENTION_BACKEND, else the device's own.

    Raises ValueError for an unknown name and BackendUnavailable for one that cannot run on `device`.
    """
    if requested is not None:
        return _checked(requested, "the backend argument", device.type)
    from_environment = os.environ.get(BACKEND_VARIABLE)
    if from_environment:
        return _checked(from_environment, BACKEND_VARIABLE, device.type)
    if device.type == "cuda":
        return "triton" if _has_triton() else "torch"
    return "cpu" if device.type == "cpu" and _has_kernels() else "torch"


@cache
def load_backend(name: str) -> Backend:
    """The module of a back end that `backend_name` approved; triton is imported here, not before."""
    return cast("Backend", importlib.import_module(f"pagedattn.{name}_backend"))


@cache
def backend_of(device: torch.device, requested: str | None = None) -> Backend:
    """The module of the back end for `device`: `backend_name`'s choice, made once a process.

    What calls it runs hundreds of times a step, and reading the environment takes longer than the rest.
    """
    return load_backend(backend_name(device, requested))


def _checked(name: str, source: str, device_type: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} names an unknown attention back end {name!r}; there are {BACKENDS}")
    if name == "cpu":
        if device_type != "cpu":
            raise BackendUnavailable(f"{source} asks for cpu, but the tensors are on {device_type!r}")
        importlib.import_module("pagedattn.cpu_backend.build").load_library()
    if name == "triton":
        if not _has_triton():
            raise BackendUnavailable(f"{source} asks for triton, which is not installed")
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise BackendUnavailable(
                f"{source} asks for triton, which runs on CUDA devices, not on {device_type!r} "
                f"(TRITON_INTERPRET=1 interprets its kernels on the CPU, slowly)"
            )
    return name


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _has_kernels() -> bool:
    return importlib.import_module("pagedattn.cpu_backend.build").usable()
