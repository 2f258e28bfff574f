"""Which implementation runs: `torch` anywhere, `triton` on GPUs."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from typing import NamedTuple, Protocol, cast

import torch

from pagedattn.batch import AttentionBatch

BACKEND_VARIABLE = "OCTAVO_ATTENTION_BACKEND"
BACKENDS = ("torch", "triton")


class BackendUnavailable(RuntimeError):
    """The back end that was asked for cannot run on this device or in this installation."""


class ScoreOptions(NamedTuple):
    """How attention scores are made from query · key; see `attend`."""

    scale: float
    window: int | None
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    kv_scales: torch.Tensor | None = None


class Backend(Protocol):
    """What a back-end module provides. Arguments were validated by `pagedattn.attention`."""

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


def backend_name(device: torch.device, requested: str | None = None) -> str:
    """The back end for `device`: `requested`, else OCTAVO_ATTENTION_BACKEND, else the device's own.

    Raises ValueError for an unknown name and BackendUnavailable for one that cannot run on `device`.
    """
    if requested is not None:
        return _checked(requested, "the backend argument", device.type)
    from_environment = os.environ.get(BACKEND_VARIABLE)
    if from_environment:
        return _checked(from_environment, BACKEND_VARIABLE, device.type)
    return "triton" if device.type == "cuda" and _has_triton() else "torch"


@cache
def load_backend(name: str) -> Backend:
    """The module of a back end that `backend_name` approved; triton is imported here, not before."""
    return cast("Backend", importlib.import_module(f"pagedattn.{name}_backend"))


def _checked(name: str, source: str, device_type: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} names an unknown attention back end {name!r}; there are {BACKENDS}")
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
