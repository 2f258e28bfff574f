"""The layers of a stage, recorded as a program."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from enginecore.worker.models.decoder import Decoder
from pagedattn import AttentionBatch, CaptureError, Program, capture, estimate_graph_bytes

logger = logging.getLogger(__name__)


class StepLimits(NamedTuple):
    """The most of a step: its tokens, its sequences and the tokens of the longest with its context."""

    max_tokens: int
    max_seqs: int
    max_length: int


@torch.inference_mode()
def layer_program(model: Decoder, cache: Tensor, dtype: torch.dtype, limits: StepLimits) -> Program | None:
    """Return a program that does what `model.run_layers` does with `cache` in steps within `limits`.

    None, with a line in the log, where they cannot be recorded, as on devices. `dtype` is that of hidden
    states.
    """
    try:
        layers = _Layers(model, cache, dtype)
        program = capture(layers.run, layers.example, block_size=cache.shape[-2], **limits._asdict())
    except CaptureError as error:
        logger.info("the model runs operation by operation: %s", error)
        return None
    mebibytes = program.nbytes / 2**20
    if cache.is_cuda:
        logger.info(
            "decode steps replay one of %d CUDA graphs of the layers, which take %.0f MiB",
            program.num_operations,
            mebibytes,
        )
    else:
        logger.info(
            "the layers are one program (operations: %d, segments: %d, memory for results: %.0f MiB)",
            program.num_operations,
            program.num_host_calls + 1,
            mebibytes,
        )
    return program


@torch.inference_mode()
def graph_bytes(model: Decoder, cache: Tensor, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return about how many bytes of a device `layer_program` will take with a cache of any size.

    0 where there is no program, of which `layer_program` will say why.
    """
    try:
        layers = _Layers(model, cache, dtype)
        return estimate_graph_bytes(
            layers.run,
            layers.example,
            block_size=cache.shape[-2],
            max_seqs=limits.max_seqs,
            max_length=limits.max_length,
        )
    except CaptureError:
        return 0


class _Layers:
    """The layers of a stage as `pagedattn.capture` takes them.

    Raises CaptureError on a CUDA device where ranks exchange results within layers, or padded rows would be
    counted.
    """

    def __init__(self, model: Decoder, cache: Tensor, dtype: torch.dtype) -> None:
        if cache.is_cuda and model.is_sharded:
            raise CaptureError("ranks exchange results in each layer, which CUDA graphs are not known to do")
        if cache.is_cuda and model.expert_loads() is not None:
            raise CaptureError("experts count their tokens, and in a CUDA graph they would count padding")
        self._model = model
        self._cache = cache
        self._dtype = dtype

    def run(self, inputs: tuple[Tensor, ...], batch: AttentionBatch) -> tuple[Tensor, ...]:
        return self._model.run_layers(inputs, self._cache, batch)

    def example(self, tokens: int) -> tuple[Tensor, ...]:
        device, size = self._cache.device, self._model.spec.hidden_size
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        hidden = torch.zeros(tokens, size, dtype=self._dtype, device=device)
        ids = torch.zeros_like(positions)
        return self._model.layer_inputs(ids if self._model.first else hidden, positions)
