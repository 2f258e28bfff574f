"""The layers of a stage, recorded as a program."""

import logging

import torch
from torch import Tensor

from enginecore.worker.models.decoder import Decoder
from pagedattn import CaptureError, Program, capture

logger = logging.getLogger(__name__)


@torch.inference_mode()
def layer_program(model: Decoder, cache: Tensor, dtype: torch.dtype, max_tokens: int) -> Program | None:
    """Return a program that does what `model.run_layers` does with `cache` in steps of up to `max_tokens`.

    None, with a line in the log, where they cannot be recorded, as on devices. `dtype` is that of hidden
    states.
    """

    def example(tokens: int) -> tuple[Tensor, ...]:
        positions = torch.zeros(tokens, dtype=torch.int64, device=cache.device)
        hidden = torch.zeros(tokens, model.spec.hidden_size, dtype=dtype, device=cache.device)
        return model.layer_inputs(positions if model.first else hidden, positions)

    try:
        program = capture(
            lambda inputs, batch: model.run_layers(inputs, cache, batch),
            example,
            block_size=cache.shape[-2],
            max_tokens=max_tokens,
        )
    except CaptureError as error:
        logger.info("the model runs operation by operation: %s", error)
        return None
    logger.info(
        "the layers are one program (operations: %d, segments: %d, memory for results: %.0f MiB)",
        program.num_operations,
        program.num_host_calls + 1,
        program.nbytes / 2**20,
    )
    return program
