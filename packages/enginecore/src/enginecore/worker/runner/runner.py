"""The runner: applies a step's deltas to its rows, runs the model over the batch, samples."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from batchsched import StepPlan
from collectives import Communicator
from enginecore.executor.step import NOT_FINITE, StepInput, StepOutput
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.runner.buffers import InputBuffers
from enginecore.worker.runner.drafts import accept, draft_tokens, spread_drafts
from enginecore.worker.runner.inputs import ModelInputs, build_inputs
from enginecore.worker.runner.pooling import PendingPooled, PoolingColumn
from enginecore.worker.sampling.guides import Guides, TokenMasks
from enginecore.worker.sampling.logprobs import LogprobColumns, merged
from enginecore.worker.sampling.processors import Registered
from enginecore.worker.sampling.sampler import Sampled, SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState
from enginecore.worker.upload import upload_integers
from kvblocks import BlockCopies, CopyList
from pagedattn import Program, copy_blocks


class PendingOutput:
    """A step under way; `result` waits for its sampled ids."""

    def __init__(
        self,
        step: int,
        tokens: Tensor,
        places: np.ndarray,
        logprobs: list[LogprobColumns],
        prompt_logprobs: list[LogprobColumns],
        errors: Mapping[int, str],
    ) -> None:
        """`places` int[n] says where each of `tokens` [n] is in the results.

        The keys of `logprobs` and `errors` are indices into `tokens`, on whose device the copies of log
        probabilities to the host have been started.
        """
        self._step = step
        self._tokens = tokens.to("cpu", torch.int32, non_blocking=True)
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._places = places
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._errors = errors
        self._unfinished: Tensor | None = None
        self._pooled: PendingPooled | None = None
        self._num_results = len(places)
        self._drafted: StepPlan | None = None

    def add_pooled(self, pooled: PendingPooled | None, num_results: int) -> None:
        """Have `result` give parts of vectors too, and 0 for those of its `num_results` tokens that no row
        has sampled. The copy of `pooled` to the host was started before that of the tokens."""
        self._pooled, self._num_results = pooled, num_results

    def add_answer(self, unfinished: Tensor) -> None:
        """Have `result` tell whether any engine has unfinished requests: `unfinished` int32 [1]."""
        self._unfinished = unfinished.to("cpu", non_blocking=True)
        if unfinished.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def add_drafts(self, plan: StepPlan) -> None:
        """Have `result` leave out what was sampled behind rejected drafts of `plan`."""
        self._drafted = plan

    def result(self) -> StepOutput:
        """Return what the step sampled."""
        if self._copied is not None:
            self._copied.synchronize()
        sampled = self._tokens.numpy()
        tokens = np.zeros(self._num_results, np.int32)
        tokens[self._places] = sampled
        unfinished = None if self._unfinished is None else bool(self._unfinished)
        logprobs = {int(self._places[index]): entry for index, entry in merged(self._logprobs).items()}
        errors: dict[int, str] = {}
        if self._errors:
            errors = {int(self._places[index]): error for index, error in self._errors.items()}
        counts = None
        if self._drafted is not None and tokens.size:
            kept, counts = accept(self._drafted, tokens)
            tokens, place = tokens[kept], np.cumsum(kept) - 1
            logprobs = {int(place[index]): entry for index, entry in logprobs.items() if kept[index]}
            if errors:
                errors = {int(place[index]): error for index, error in errors.items() if kept[index]}
        if errors:
            errors = {index: error for index, error in errors.items() if tokens[index] == NOT_FINITE}
        pooled = None if self._pooled is None else self._pooled.result()
        prompt_logprobs = merged(self._prompt_logprobs)
        return StepOutput(self._step, tokens, logprobs, prompt_logprobs, unfinished, pooled, errors, counts)


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
        processors: Sequence[Registered] = (),
        guides: Guides | None = None,
    ) -> None:
        """`cache` and `host_cache` are of one shape but for their blocks, dimension 1.

        `dtype` is that of hidden states. `program` runs this stage's layers in the place of the modules.
        `processors` are those that change logits, and `guides` those of rows with a grammar, on the rank that
        samples.
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
        self._sampling = SamplingState(max_rows, processors)
        self._pooling = PoolingColumn(max_rows)
        self._guides = guides

    @torch.inference_mode()
    def run(self, step: StepInput) -> PendingOutput:
        """Start a step; its results are those of the plan's sampling rows, in the plan's order."""
        self._apply(step)
        if step.plan.drafts.size:
            output = self._run_rows(step._replace(plan=spread_drafts(step.plan)))
            output.add_drafts(step.plan)
        elif len(step.plan.rows):
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
            host_tokens=self._buffers.host_tokens,
            block_tables=self._buffers.block_tables,
            host_tables=self._buffers.host_tables,
            block_size=self._block_size,
        )
        # In the batch's order: whether a sequence samples. One that is pooled does not.
        samples = step.plan.samples[inputs.order]
        if self._pooling.num_rows:
            samples &= ~self._pooling.has(step.plan.rows[inputs.order])
        # Made while the model runs.
        masks = None if self._guides is None else self._start_masks(self._guides, step, inputs, samples)
        hidden = self._hidden(inputs, self._rotation_lengths(step, inputs))
        if not self._model.last:
            self._pp.send(hidden, self._pp.rank + 1)
            return _nothing(step)
        prompt_logprobs = self._prompt_logprobs(step, inputs, hidden)
        if not self._pooling.num_rows:
            return self._sample(step, inputs, hidden, samples, prompt_logprobs, masks)
        pooled = self._pooling.pool(step.plan, inputs, hidden) if self._tp.rank == 0 else None
        output = self._sample(step, inputs, hidden, samples, prompt_logprobs, masks)
        output.add_pooled(pooled, int(step.plan.samples.sum()))
        return output

    def _apply(self, step: StepInput) -> None:
        """Bring rows and cache to the state that the step starts from."""
        if step.sampled is not None:
            self._buffers.append_from_host(step.sampled)
        if step.copies.num_blocks:
            self._swap_blocks(step.copies)
        freed = step.plan.freed.tolist()
        self._sampling.free(freed)
        if self._pooling.num_rows:
            self._pooling.free(freed)
        if self._guides is not None:
            self._guides.free(freed)
        for admitted, sampling in zip(step.plan.admitted, step.sampling, strict=True):
            self._buffers.fill(admitted)
            self._sampling.set(admitted.row, admitted.num_prompt, sampling)
            self._pooling.set(admitted.row, sampling.pooling)
            if self._guides is not None:
                self._guides.set(admitted.row, admitted.num_prompt, sampling)
        if step.plan.drafts.size:
            self._buffers.append_from_host(draft_tokens(step.plan))
        self._buffers.change_tables(step.changes)

    def _start_masks(
        self, guides: Guides, step: StepInput, inputs: ModelInputs, samples: np.ndarray
    ) -> Future[TokenMasks] | None:
        """Start making the masks of rows that sample, by `samples` bool[n], and have a grammar."""
        plan, order = step.plan, inputs.order[samples]
        return guides.start(plan.rows[order], plan.starts[order] + plan.counts[order], self._buffers.tokens)

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
        samples: np.ndarray,
        prompt_logprobs: list[LogprobColumns],
        masks: Future[TokenMasks] | None,
    ) -> PendingOutput:
        """Sample for those sequences of the batch that `samples` bool[n] says."""
        plan = step.plan
        if not samples.any():
            # On the device, so that the prompts' log probabilities are waited for.
            nothing = torch.empty(0, dtype=torch.int64, device=hidden.device)
            return PendingOutput(plan.step, nothing, np.empty(0, np.int64), [], prompt_logprobs, {})
        # Which of the plan's sampling rows each is.
        places = (np.cumsum(plan.samples) - 1)[inputs.order[samples]]
        batch, hidden = self._sampling_rows(step, inputs, hidden, samples)
        logits = self._model.logits(hidden)
        if self._tp.rank == 0:
            made = None if masks is None else masks.result().to(logits.device)
            sampled = sample(logits, batch, self._buffers.tokens, self._sampling, made)
        else:
            sampled = Sampled(torch.empty(len(batch.rows), dtype=torch.int64, device=logits.device), [])
        tokens = self._tp.broadcast(sampled.tokens)
        # Behind a rejected draft stands what nobody reads before the row's next steps have written there.
        self._buffers.append(batch.device_rows, batch.device_lengths, tokens)
        return PendingOutput(plan.step, tokens, places, sampled.logprobs, prompt_logprobs, sampled.errors)

    def _sampling_rows(
        self, step: StepInput, inputs: ModelInputs, hidden: Tensor, samples: np.ndarray
    ) -> tuple[SamplingRows, Tensor]:
        """Return the rows that sample, by `samples` bool[n], and the last token's hidden state of each."""
        plan, order = step.plan, inputs.order
        rows, lengths = plan.rows[order], plan.starts[order] + plan.counts[order]
        if samples.sum() == len(hidden):
            # Each token is the last of its row.
            return SamplingRows(rows, lengths, inputs.rows, inputs.batch.lengths.long()), hidden
        columns = [column[samples] for column in (rows, lengths, inputs.last)]
        device_rows, device_lengths, last = upload_integers(columns, hidden.device)
        return SamplingRows(columns[0], columns[1], device_rows, device_lengths), hidden[last]

    def _prompt_logprobs(self, step: StepInput, inputs: ModelInputs, hidden: Tensor) -> list[LogprobColumns]:
        """Return the log probabilities of the prompt tokens that this step's positions predict, by row."""
        plan, state = step.plan, self._sampling
        taken, firsts, ends = state.take_prompt_positions(plan.rows, plan.starts, plan.starts + plan.counts)
        if not len(taken):
            return []
        places = np.empty(len(inputs.order), np.int64)
        places[inputs.order] = np.arange(len(inputs.order))
        offsets = inputs.query_starts[places[taken]] - plan.starts[taken]
        rows, counts = plan.rows[taken], ends - firsts
        widths = state.prompt_logprobs[rows]
        found = []
        for width in np.unique(widths).tolist():
            columns = [column[widths == width] for column in (rows, firsts, counts, offsets)]
            found.append(self._prompt_columns(hidden, *columns, width=width))
        return found if self._tp.rank == 0 else []

    def _prompt_columns(
        self,
        hidden: Tensor,
        rows: np.ndarray,
        firsts: np.ndarray,
        counts: np.ndarray,
        offsets: np.ndarray,
        *,
        width: int,
    ) -> LogprobColumns:
        """Return the `width` likeliest successors of `counts` positions of `rows` from `firsts` on.

        Hidden states of a row are at its positions plus its offset; all but `hidden` and `width` are int[k].
        """
        each = np.arange(len(rows)).repeat(counts)
        positions = np.arange(len(each)) + (firsts - np.cumsum(counts) + counts)[each]
        columns = [rows[each], positions + 1, positions + offsets[each]]
        of, following, where = upload_integers(columns, hidden.device)
        actual = self._buffers.tokens[of, following].long()
        found = LogprobColumns(rows, counts, width, self._model.spec.vocab_size, hidden.device)
        # Never more logits at once than sampling has, which memory was measured with.
        for begin in range(0, len(each), self._max_rows):
            piece = slice(begin, begin + self._max_rows)
            logits = self._model.logits(hidden[where[piece]])
            if self._tp.rank == 0:
                found.write(begin, logits, actual[piece])
        return found


def _nothing(step: StepInput) -> PendingOutput:
    return PendingOutput(step.plan.step, torch.empty(0), np.empty(0, np.int64), [], [], {})


def _pairs(copies: CopyList) -> Tensor:
    return torch.from_numpy(np.stack(copies, axis=1).astype(np.int64))
