"""State of the running requests, a row each: tokens, block tables, sampling settings."""

import numpy as np
import torch
from torch import Tensor

from enginecore.executor.step import RowStart, StepInput
from enginecore.sampling_params import SamplingParams

_MOST = 2**31 - 1
"""More than any vocabulary has, and what an int32 column holds."""

_LARGEST = 1e30
"""Settings beyond it act like it; float32 and what is computed from it stay finite."""

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class RowExtras:
    """Settings that few requests have, kept beside the columns."""

    def __init__(self, start: RowStart) -> None:
        params = start.params
        self.stop_ids = start.stop_ids
        self.bad_words = start.bad_words
        self.logit_bias = params.logit_bias or {}
        self.allowed = params.allowed_token_ids
        self.min_tokens = params.min_tokens if start.stop_ids else 0

    def __bool__(self) -> bool:
        return bool(self.bad_words or self.logit_bias or self.allowed or self.min_tokens)


class Rows:
    """Fixed rows that only deltas change; indexing them by a step's rows gives the batch."""

    def __init__(self, max_rows: int, max_len: int, max_blocks: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_rows, max_len, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        on_host = self.block_tables.device.type == "cpu"
        self.host_tables = (
            self.block_tables.numpy() if on_host else np.zeros((max_rows, max_blocks), np.int32)
        )
        """What `block_tables` holds, readable without waiting for the device."""
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.logprobs = np.full(max_rows, -2, np.int32)
        """Candidates asked for; -1 is the whole vocabulary, -2 is none."""
        self.prompt_logprobs = np.full(max_rows, -2, np.int32)
        self.prompt_logprobs_from = np.zeros(max_rows, np.int32)
        self.floats = {name: np.zeros(max_rows, np.float32) for name in _FLOATS}
        self.penalised = np.zeros(max_rows, bool)
        self.extras: dict[int, RowExtras] = {}

    def apply(self, step: StepInput) -> None:
        """Make the changes that come with a step: tokens sampled, rows given up and started, blocks added."""
        if step.sampled is not None:
            rows, positions, ids = step.sampled
            copied = torch.from_numpy(np.array(ids)).to(self.tokens.device, non_blocking=True)
            self.append(rows, positions, copied)
        for row in step.closed.tolist():
            self.extras.pop(row, None)
        for start in step.started:
            self._start(start)
        if len(step.block_rows):
            entries = torch.from_numpy(np.stack([step.block_rows, step.block_indices, step.block_ids]))
            rows, indices, ids = entries.to(self.block_tables.device, non_blocking=True)
            self.block_tables[rows.long(), indices.long()] = ids
            if self.block_tables.device.type != "cpu":
                self.host_tables[step.block_rows, step.block_indices] = step.block_ids

    def append(self, rows: np.ndarray, positions: np.ndarray, sampled: Tensor) -> None:
        """Write the sampled ids [k] at `positions` of `rows`, without reading them back."""
        where = torch.from_numpy(np.stack([rows, positions]).astype(np.int64)).to(
            sampled.device, non_blocking=True
        )
        self.tokens[where[0], where[1]] = sampled.to(torch.int32)

    def _start(self, start: RowStart) -> None:
        row, params = start.row, start.params
        tokens = torch.from_numpy(np.array(start.tokens, np.int32))
        self.tokens[row, : len(tokens)] = tokens.to(self.tokens.device, non_blocking=True)
        self.num_prompt[row] = start.num_prompt
        self.top_k[row] = min(params.top_k, _MOST)
        self.seed[row] = np.uint64(start.seed % 2**64)
        self.logprobs[row] = _count(params.logprobs)
        self.prompt_logprobs[row] = _count(params.prompt_logprobs)
        self.prompt_logprobs_from[row] = start.prompt_logprobs_from
        for name, column in self.floats.items():
            column[row] = min(getattr(params, name), _LARGEST)
        self.penalised[row] = _penalised(params)
        extras = RowExtras(start)
        if extras:
            self.extras[row] = extras
        else:
            self.extras.pop(row, None)


def _count(asked: int | None) -> int:
    return -2 if asked is None else min(asked, _MOST)


def _penalised(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)
