"""Runs steps: applies deltas to the rows, runs the model over the batch, samples."""

import numpy as np
import torch
from torch import Tensor

from enginecore.models.decoder import Decoder
from enginecore.runner.inputs import ModelInputs, build_inputs
from enginecore.runner.rows import Rows
from enginecore.runner.step import BlockCopies, PositionLogprobs, StepInput, StepOutput
from enginecore.sampling.sampler import sample, token_logprobs
from pagedattn import copy_blocks


class PendingOutput:
    """A step under way; `result` waits for its sampled ids."""

    def __init__(
        self,
        step: int,
        tokens: Tensor,
        logprobs: dict[int, PositionLogprobs],
        prompt_logprobs: list[PositionLogprobs],
    ) -> None:
        self._step = step
        self._tokens = tokens.to(torch.int32).to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def result(self) -> StepOutput:
        """Return what the step sampled."""
        if self._copied is not None:
            self._copied.synchronize()
        return StepOutput(self._step, self._tokens.numpy(), self._logprobs, self._prompt_logprobs)


class Runner:
    """One model on one device with its KV cache and the rows of its running requests."""

    def __init__(
        self, model: Decoder, cache: Tensor, host_cache: Tensor | None, *, max_rows: int, max_len: int
    ) -> None:
        """`cache` and `host_cache` are of one shape but for their blocks, dimension 1."""
        self._model = model
        self._cache = cache
        self._host_cache = host_cache
        self._block_size = cache.shape[-2]
        self._rows = Rows(max_rows, max_len, -(-max_len // self._block_size), cache.device)

    @torch.inference_mode()
    def run(self, step: StepInput) -> PendingOutput:
        """Start a step; its results are those of the plan's sampling rows, in the plan's order."""
        state = self._rows
        if step.copies is not None:
            self._copy_blocks(step.copies)
        state.apply(step)
        if not len(step.rows):
            return PendingOutput(step.step, torch.empty(0, dtype=torch.int32), {}, [])
        inputs = build_inputs(
            step.rows,
            step.starts,
            step.counts,
            tokens=state.tokens,
            block_tables=state.block_tables,
            host_tables=state.host_tables,
            block_size=self._block_size,
        )
        hidden = self._model(inputs.ids, inputs.positions, self._cache, inputs.batch)
        prompt_logprobs = self._prompt_logprobs(step, inputs, hidden)
        return self._sample(step, inputs, hidden, prompt_logprobs)

    def _copy_blocks(self, copies: BlockCopies) -> None:
        """Move blocks of all layers between device and host, then within the device."""
        cache, host = self._cache, self._host_cache
        if host is not None:
            copy_blocks(cache, host, _pairs(copies.out_sources, copies.out_destinations))
            copy_blocks(host, cache, _pairs(copies.in_sources, copies.in_destinations))
        copy_blocks(cache, cache, _pairs(copies.sources, copies.destinations))

    def _sample(
        self, step: StepInput, inputs: ModelInputs, hidden: Tensor, prompt_logprobs: list[PositionLogprobs]
    ) -> PendingOutput:
        picked = np.flatnonzero(step.samples)
        if not len(picked):
            return PendingOutput(step.step, torch.empty(0, dtype=torch.int32), {}, prompt_logprobs)
        place = np.empty(len(inputs.order), np.int64)
        place[inputs.order] = np.arange(len(inputs.order))
        last = inputs.last[torch.from_numpy(place[picked]).to(hidden.device, non_blocking=True)]
        logits = self._model.logits(hidden[last])
        rows = step.rows[picked]
        lengths = step.starts[picked] + step.counts[picked]
        sampled = sample(logits, rows, lengths, self._rows)
        self._rows.append(rows, lengths, sampled.tokens)
        return PendingOutput(step.step, sampled.tokens, sampled.logprobs, prompt_logprobs)

    def _prompt_logprobs(
        self, step: StepInput, inputs: ModelInputs, hidden: Tensor
    ) -> list[PositionLogprobs]:
        state = self._rows
        asked = np.flatnonzero(state.prompt_logprobs[step.rows] > -2)
        found = []
        for index in asked.tolist():
            row, start = int(step.rows[index]), int(step.starts[index])
            end = min(start + int(step.counts[index]), int(state.num_prompt[row]) - 1)
            first = max(start, int(state.prompt_logprobs_from[row]))
            if first >= end:
                continue
            place = int(np.flatnonzero(inputs.order == index)[0])
            offset = int(inputs.query_starts[place]) - start
            logprobs = self._model.logits(hidden[offset + first : offset + end]).float().log_softmax(-1)
            actual = state.tokens[row, first + 1 : end + 1].long()
            parts = token_logprobs(logprobs, actual, int(state.prompt_logprobs[row]))
            ids, values, ranks = (part.cpu().numpy() for part in parts)
            found.append(PositionLogprobs(row, ids.astype(np.int32), values, ranks.astype(np.int32)))
            state.prompt_logprobs_from[row] = end
        return found


def _pairs(sources: np.ndarray, destinations: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack([sources, destinations], axis=1).astype(np.int64))
