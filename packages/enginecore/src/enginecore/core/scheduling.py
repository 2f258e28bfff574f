"""The scheduler and paged memory of a core, and its requests as they take them."""

import itertools
import time

from batchsched import Limits, Policy, PromptTooLong, Recompute, Request, Scheduler, Swap
from enginecore.config import EngineConfig
from enginecore.core.policies import make_policy
from enginecore.data_parallel.prefixes import request_salt
from enginecore.messages import AddRequest, EngineLimits
from enginecore.sampling_params import SamplingParams
from kvblocks import PagedMemory


def make_memory(config: EngineConfig, limits: EngineLimits) -> PagedMemory:
    """Return the memory for the blocks and lengths of a loaded model."""
    return PagedMemory(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_rows=config.max_num_seqs,
        max_blocks_per_row=-(-limits.max_model_len // limits.block_size),
        prefix_caching=config.enable_prefix_caching,
        host_blocks=limits.host_blocks,
        windows=(limits.window,),
        record_events=config.follows_prefixes,
    )


def make_scheduler(
    config: EngineConfig, limits: EngineLimits, memory: PagedMemory, policy: Policy | None
) -> Scheduler:
    """Return the scheduler over `memory`; `policy` is by default the one that the configuration names."""
    return Scheduler(
        Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            # What is made of a prompt that is pooled takes a token's place, and the prompt may fill all
            # others; `SchedulerRequests` keeps what is generated within the context.
            max_model_len=limits.max_model_len + 1,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            stages=config.pipeline_parallel_size,
            max_tokens_with_drafts=config.max_tokens_with_drafts(limits.device),
        ),
        memory,
        policy or make_policy(config),
        Swap() if config.preemption_mode == "swap" else Recompute(),
    )


class SchedulerRequests:
    """Makes the scheduler's requests of front-ends' messages."""

    def __init__(self, config: EngineConfig, limits: EngineLimits) -> None:
        speculation = config.speculation
        self._limits = limits
        self._max_drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self._salts = itertools.count()

    def make(self, handle: int, message: AddRequest) -> Request:
        """Return the request of a message.

        Raises:
            PromptTooLong: its prompt leaves no room for a token.
            RequestRefused: as `batchsched.Request`.
        """
        sampling = message.sampling
        return Request(
            handle=handle,
            prompt=message.prompt,
            generated=message.generated,
            max_tokens=self._most_tokens(message),
            stop_ids=tuple(sampling.stop_ids),
            # A grammar's end beats the minimum length: the worker says where a stop id may come.
            min_tokens=sampling.params.min_tokens if sampling.guide is None else 0,
            priority=message.priority,
            extra=self._prefix_salt(message),
            arrival=time.monotonic() - message.age,
            use_cache=_may_read_cache(sampling.params),
            held=message.alone,
            max_drafts=self._max_drafts,
        )

    def _most_tokens(self, message: AddRequest) -> int:
        """Return how many tokens a request may have, within the context."""
        if message.sampling.pooling is not None:
            return 1
        num_prompt, context = len(message.prompt), self._limits.max_model_len
        if num_prompt >= context:
            raise PromptTooLong(num_prompt, context)
        return min(message.max_tokens, context - num_prompt)

    def _prefix_salt(self, message: AddRequest) -> tuple[tuple[str, bytes], ...]:
        """Return what a request's prefix-cache keys depend on besides its tokens."""
        salt = request_salt(message.cache_salt)
        limit = self._limits.dynamic_length
        if limit is not None and len(message.prompt) > limit:
            # Its keys are rotated by its own length: only it can use them again, after a preemption.
            return (*salt, ("request", next(self._salts).to_bytes(8, "little")))
        return salt


def _may_read_cache(params: SamplingParams) -> bool:
    """Whether a request may start from cached blocks; a prompt's log probabilities need every position."""
    if params.skip_reading_prefix_cache is not None:
        return not params.skip_reading_prefix_cache
    return params.prompt_logprobs is None
