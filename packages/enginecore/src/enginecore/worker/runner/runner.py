"""The runner: applies a step's deltas to its rows, runs the model over the batch, samples."""

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from enginecore.executor.step import StepInput, StepOutput
from enginecore.messages import PositionLogprobs
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.runner.buffers import InputBuffers
from enginecore.worker.runner.inputs import ModelInputs, build_inputs
from enginecore.worker.sampling.sampler import position_logprobs, sample
from enginecore.worker.sampling.state import SamplingState
from kvblocks import BlockCopies, CopyList
from pagedattn import Program, copy_blocks


class PendingOutput:
    """A step under way; `result` waits for its sampled ids."""

    def __init__(
        self,
        step: int,
        tokens: Tensor,
        logprobs: dict[int, PositionLogprobs],
        prompt_logprobs: dict[int, PositionLogprobs],
    ) -> None:
        self._step = step
        self._tokens = tokens.to(torch.int32).to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._unfinished: Tensor | None = None

    def add_answer(self, unfinished: Tensor) -> None:
        """Have `result` tell whether any engine has unfinished requests: `unfinished` int32 [1]."""
        self._unfinished = unfinished.to("cpu", non_blocking=True)
        if unfinished.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def result(self) -> StepOutput:
        """Return what the step sampled."""
        if self._copied is not None:
            self._copied.synchronize()
        unfinished = None if self._unfinished is None else bool(self._unfinished)
        return StepOutput(self._step, self._tokens.numpy(), self._logprobs, self._prompt_logprobs, unfinished)


class Runner:
    """One rank's model on its device, with its KV cache and the rows of the running requests.

    Every rank runs the same steps. Of the ranks of `tp` the first alone samples and reports; the others get
    its tokens. Of the stages along `pp` each gets hidden states from the one before, and the last samples;
    the others hear what it sampled with a later step. Where a stage sends, the next may still be at work on
    the step before: on a CPU it waits for that, on a device its stream does.

    Where engines share experts, all ranks of `ep` run as many steps, some of them without rows.
    """

    def __init__(
        self,
        model: Decoder,
        cache: Tensor,
        host_cache: Tensor | None,
        tp: Communicator,
        pp: Communicator,
        ep: Communicator,
        *,
        dtype: torch.dtype,
        max_rows: int,
        max_len: int,
        program: Program | None = None,
    ) -> None:
        """`cache` and `host_cache` are of one shape but for their blocks, dimension 1.

        `dtype` is that of hidden states. `program` runs this stage's layers in the place of the modules.
        """
        self._model = model
        self._program = program
        self._tp = tp
        self._pp = pp
        self._ep = ep
        self._dtype = dtype
        self._cache = cache
        self._host_cache = host_cache
        self._block_size = cache.shape[-2]
        self._max_rows = max_rows
        self._buffers = InputBuffers(max_rows, max_len, -(-max_len // self._block_size), cache.device)
        self._sampling = SamplingState(max_rows)

    @torch.inference_mode()
    def run(self, step: StepInput) -> PendingOutput:
        """Start a step; its results are those of the plan's sampling rows, in the plan's order."""
        self._apply(step)
        if len(step.plan.rows):
            output = self._run_rows(step)
        else:
            self._model.run_without_tokens()
            output = _nothing(step)
        if step.unfinished is not None and self._model.last:
            own = torch.tensor([step.unfinished], dtype=torch.int32, device=self._cache.device)
            output.add_answer(self._ep.all_reduce(own, "max"))
        return output

    def _run_rows(self, step: StepInput) -> PendingOutput:
        plan = step.plan
        inputs = build_inputs(
            plan.rows,
            plan.starts,
            plan.counts,
            tokens=self._buffers.tokens,
            block_tables=self._buffers.block_tables,
            host_tables=self._buffers.host_tables,
            block_size=self._block_size,
        )
        hidden = self._hidden(inputs, self._rotation_lengths(step, inputs))
        if not self._model.last:
            self._pp.send(hidden, self._pp.rank + 1)
            return _nothing(step)
        prompt_logprobs = self._prompt_logprobs(step, inputs, hidden)
        return self._sample(step, inputs, hidden, prompt_logprobs)

    def _apply(self, step: StepInput) -> None:
        """Bring rows and cache to the state that the step starts from."""
        if step.sampled is not None:
            self._buffers.append_from_host(step.sampled)
        if step.copies.num_blocks:
            self._swap_blocks(step.copies)
        self._sampling.free(step.plan.freed.tolist())
        for admitted, sampling in zip(step.plan.admitted, step.sampling, strict=True):
            self._buffers.fill(admitted)
            self._sampling.set(admitted.row, admitted.num_prompt, sampling)
        self._buffers.change_tables(step.changes)

    def _rotation_lengths(self, step: StepInput, inputs: ModelInputs) -> Tensor | None:
        """Return the sequence length by which each token is rotated, int64 [tokens]; None where no matter.

        A prompt's tokens go by the prompt's length, however it is cut into chunks, and a generated token by
        its own place, whether computed the first time or again after a preemption: as in transformers' cache.
        """
        if self._model.spec.dynamic_length is None:
            return None
        rows, counts = step.plan.rows[inputs.order], step.plan.counts[inputs.order]
        prompts = np.repeat(self._sampling.num_prompt[rows], counts).astype(np.int64)
        on_device = torch.from_numpy(prompts).to(inputs.positions.device, non_blocking=True)
        return torch.maximum(on_device, inputs.positions + 1)

    def _hidden(self, inputs: ModelInputs, rotation_lengths: Tensor | None) -> Tensor:
        """Run this stage's layers."""
        x = inputs.ids
        if not self._model.first:
            shape = len(x), self._model.spec.hidden_size
            x = self._pp.recv(torch.empty(shape, dtype=self._dtype, device=x.device), self._pp.rank - 1)
        given = self._model.layer_inputs(x, inputs.positions, rotation_lengths)
        if self._program is not None:
            return self._model.hidden(self._program(given, inputs.batch))
        return self._model.hidden(self._model.run_layers(given, self._cache, inputs.batch))

    def _swap_blocks(self, copies: BlockCopies) -> None:
        """Copy blocks of all layers from the device to the host, then from the host to the device."""
        assert self._host_cache is not None, "there is no host cache to swap with"
        copy_blocks(self._cache, self._host_cache, _pairs(copies.swap_out))
        copy_blocks(self._host_cache, self._cache, _pairs(copies.swap_in))

    def _sample(
        self,
        step: StepInput,
        inputs: ModelInputs,
        hidden: Tensor,
        prompt_logprobs: dict[int, PositionLogprobs],
    ) -> PendingOutput:
        plan = step.plan
        picked = np.flatnonzero(plan.samples)
        if not len(picked):
            return PendingOutput(plan.step, torch.empty(0, dtype=torch.int32), {}, prompt_logprobs)
        place = np.empty(len(inputs.order), np.int64)
        place[inputs.order] = np.arange(len(inputs.order))
        last = inputs.last[torch.from_numpy(place[picked]).to(hidden.device, non_blocking=True)]
        logits = self._model.logits(hidden[last])
        rows = plan.rows[picked]
        lengths = plan.starts[picked] + plan.counts[picked]
        if self._tp.rank == 0:
            tokens, logprobs = sample(logits, rows, lengths, self._buffers.tokens, self._sampling)
        else:
            tokens, logprobs = torch.empty(len(rows), dtype=torch.int64, device=logits.device), {}
        tokens = self._tp.broadcast(tokens)
        self._buffers.append(rows, lengths, tokens)
        return PendingOutput(plan.step, tokens, logprobs, prompt_logprobs)

    def _prompt_logprobs(
        self, step: StepInput, inputs: ModelInputs, hidden: Tensor
    ) -> dict[int, PositionLogprobs]:
        """Return the log probabilities of the prompt tokens that this step's positions predict, by row."""
        plan, state = step.plan, self._sampling
        found: dict[int, PositionLogprobs] = {}
        for index in np.flatnonzero(state.prompt_logprobs[plan.rows] > -2).tolist():
            row, start = int(plan.rows[index]), int(plan.starts[index])
            end = min(start + int(plan.counts[index]), int(state.num_prompt[row]) - 1)
            first = max(start, int(state.prompt_logprobs_done[row]))
            if first >= end:
                continue
            place = int(np.flatnonzero(inputs.order == index)[0])
            offset = int(inputs.query_starts[place]) - start
            state.prompt_logprobs_done[row] = end
            pieces = []
            # Never more logits at once than sampling has, which memory was measured with.
            for begin in range(first, end, self._max_rows):
                stop = min(begin + self._max_rows, end)
                logits = self._model.logits(hidden[offset + begin : offset + stop])
                if self._tp.rank == 0:
                    actual = self._buffers.tokens[row, begin + 1 : stop + 1].long()
                    logprobs = logits.float().log_softmax(-1)
                    pieces.append(position_logprobs(logprobs, actual, int(state.prompt_logprobs[row])))
            if pieces:
                found[row] = PositionLogprobs(*map(np.concatenate, zip(*pieces)))
        return found


def _nothing(step: StepInput) -> PendingOutput:
    return PendingOutput(step.plan.step, torch.empty(0, dtype=torch.int32), {}, {})


def _pairs(copies: CopyList) -> Tensor:
    return torch.from_numpy(np.stack(copies, axis=1).astype(np.int64))
