"""Runs steps: applies deltas to the rows, runs the model over the batch, samples."""

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from enginecore.executor.step import BlockCopies, PositionLogprobs, StepInput, StepOutput
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.runner.inputs import ModelInputs, build_inputs
from enginecore.worker.runner.rows import Rows
from enginecore.worker.sampling.sampler import sample, token_logprobs
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
    """One rank's model on its device, with its KV cache and the rows of the running requests.

    Every rank runs the same steps. Of the ranks of `tp` the first alone samples and reports; the others get
    its tokens. Of the stages along `pp` each gets hidden states from the one before, and the last samples;
    the others hear what it sampled with a later step. Where a stage sends, the next may still be at work on
    the step before: on a CPU it waits for that, on a device its stream does.
    """

    def __init__(
        self,
        model: Decoder,
        cache: Tensor,
        host_cache: Tensor | None,
        tp: Communicator,
        pp: Communicator,
        *,
        dtype: torch.dtype,
        max_rows: int,
        max_len: int,
    ) -> None:
        """`cache` and `host_cache` are of one shape but for their blocks, dimension 1.

        `dtype` is that of hidden states.
        """
        self._model = model
        self._tp = tp
        self._pp = pp
        self._dtype = dtype
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
            return _nothing(step)
        inputs = build_inputs(
            step.rows,
            step.starts,
            step.counts,
            tokens=state.tokens,
            block_tables=state.block_tables,
            host_tables=state.host_tables,
            block_size=self._block_size,
        )
        hidden = self._hidden(inputs)
        if not self._model.last:
            self._pp.send(hidden, self._pp.rank + 1)
            return _nothing(step)
        prompt_logprobs = self._prompt_logprobs(step, inputs, hidden)
        return self._sample(step, inputs, hidden, prompt_logprobs)

    def _hidden(self, inputs: ModelInputs) -> Tensor:
        """Run this stage's layers."""
        x = inputs.ids
        if not self._model.first:
            shape = len(x), self._model.spec.hidden_size
            x = self._pp.recv(torch.empty(shape, dtype=self._dtype, device=x.device), self._pp.rank - 1)
        return self._model(x, inputs.positions, self._cache, inputs.batch)

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
        if self._tp.rank == 0:
            tokens, logprobs = sample(logits, rows, lengths, self._rows)
        else:
            tokens, logprobs = torch.empty(len(rows), dtype=torch.int64, device=logits.device), {}
        tokens = self._tp.broadcast(tokens)
        self._rows.append(rows, lengths, tokens)
        return PendingOutput(step.step, tokens, logprobs, prompt_logprobs)

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
            logits = self._model.logits(hidden[offset + first : offset + end])
            state.prompt_logprobs_from[row] = end
            if self._tp.rank != 0:
                continue
            logprobs = logits.float().log_softmax(-1)
            actual = state.tokens[row, first + 1 : end + 1].long()
            parts = token_logprobs(logprobs, actual, int(state.prompt_logprobs[row]))
            ids, values, ranks = (part.cpu().numpy() for part in parts)
            found.append(PositionLogprobs(row, ids.astype(np.int32), values, ranks.astype(np.int32)))
        return found


def _nothing(step: StepInput) -> PendingOutput:
    return PendingOutput(step.step, torch.empty(0, dtype=torch.int32), {}, [])


def _pairs(sources: np.ndarray, destinations: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack([sources, destinations], axis=1).astype(np.int64))
