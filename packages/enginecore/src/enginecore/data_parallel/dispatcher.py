"""The dispatcher: sends one front-end's requests to ranks, and sends them again when a rank has ended."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from enginecore.core.client import CoreClient
from enginecore.data_parallel.link import FrontendLink
from enginecore.data_parallel.loads import LoadView
from enginecore.data_parallel.messages import CoordinatorAddress
from enginecore.data_parallel.prefixes import PrefixView, prompt_keys
from enginecore.errors import ModelError
from enginecore.frontend.frontend import Frontend
from enginecore.messages import (
    AbortRequests,
    AddRequest,
    CoreMessage,
    EngineLimits,
    ExpertLoads,
    FollowPrefixes,
    FrontendMessage,
    KVEvents,
    Outputs,
    RankChange,
    RankDown,
    RankOut,
    RankUp,
    ReportExpertLoads,
    StepsView,
    WatchSteps,
)

logger = logging.getLogger(__name__)

_DEATHS_BEFORE_TRIAL = 2
"""A request that was in so many steps which ended a core runs alone from then on."""
_DEATHS_ALONE = 2
"""A request that has ended so many cores while it ran alone fails: one end may have had another cause."""
_LONGEST_READ = 0.05
"""Seconds for which outputs are read that came meanwhile, before callers hear of those so far."""


class _Rank:
    """A rank that is up."""

    def __init__(self, client: CoreClient, reading: asyncio.Task[None]) -> None:
        self.client = client
        self.reading = reading
        self.expert_loads: asyncio.Queue[ExpertLoads | None] = asyncio.Queue()
        """Answers in the order of the questions; None when the rank has ended."""

    def close(self) -> None:
        self.reading.cancel()
        self.client.close()
        self.expert_loads.put_nowait(None)


class Dispatcher:
    """The ranks as one front-end sees them, and which of its requests each has.

    A request goes to the rank with the least load, all samples of it to the same. What a rank had when it
    ended goes on elsewhere, after the tokens that came so far; while no rank is up requests wait for one. To
    be used in one event loop.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        frontend: Frontend,
        number: int,
        coordinator: CoordinatorAddress | None = None,
        *,
        follow_prefixes: bool = False,
    ) -> None:
        """`number` is this front-end's among all of these ranks.

        `follow_prefixes` is to choose ranks by what they have cached too.
        """
        self._all = list(ranks)
        self._frontend = frontend
        self._number = number
        self._up: dict[int, _Rank] = {}
        self.down: dict[int, str] = {}
        """Ranks that have ended, and why: they are being started again."""
        self.out: dict[int, str] = {}
        """Ranks that are not started again, and why."""
        self._never_loaded: str | None = None
        """Why a rank could not load the model."""
        self.on_outputs: Callable[[int, Outputs], None] = lambda rank, outputs: None
        """Called with each rank's outputs."""
        self.on_caught_up: Callable[[], None] = lambda: None
        """Called after `on_outputs`, once for all the outputs that there were to be read."""
        self.on_view: Callable[[int, StepsView], None] = lambda rank, view: None
        """Called with each rank's views, while they are watched."""
        self._watched = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when a rank is up, down or out."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        """Called when this front-end cannot go on."""
        self._loads = LoadView(self._all, number)
        self._prefixes: PrefixView | None = None
        """Where the rank is chosen by what it has cached."""
        self._follows_prefixes = follow_prefixes
        self._rank_of: dict[int, int] = {}
        """By number of a request's sample that has not finished."""
        self._waiting: list[tuple[float, list[AddRequest]]] = []
        """What found no rank up, and since when, in seconds of the monotonic clock."""
        self._deaths: Counter[int] = Counter()
        """By number: steps that ended a core with it."""
        self._deaths_alone: Counter[int] = Counter()
        """Those of them that ran nothing else."""
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        if coordinator is not None:
            self._following = asyncio.create_task(self._follow(FrontendLink(coordinator, number)))

    @property
    def up(self) -> list[int]:
        """Ranks that run requests."""
        return sorted(self._up)

    @property
    def failure(self) -> str | None:
        """The reason of the rank that was given up last, if there is no other; None while one may run."""
        return next(reversed(self.out.values())) if len(self.out) == len(self._all) else None

    async def ready(self) -> EngineLimits:
        """Wait until all ranks have loaded the model, and return its limits.

        Ranks that had loaded it and have ended are not waited for, if there is another.

        Raises:
            ModelError: one could not load it, or none is left.
        """
        while True:
            reason = self._never_loaded or self.failure
            if reason is not None:
                raise ModelError(reason)
            if self._up and len(self._up) + len(self.down) + len(self.out) == len(self._all):
                break
            self._changed.clear()
            await self._changed.wait()
        limits = self._frontend.limits
        assert limits is not None, "a rank that is up has told its limits"
        return limits

    def take(self, event: RankChange) -> None:
        """Take in what has become of a rank."""
        match event:
            case RankUp():
                self._on_up(event)
            case RankDown():
                self._on_down(event)
            case RankOut(rank=rank, reason=reason):
                self.down.pop(rank, None)
                self.out[rank] = reason
                self._never_loaded = self._never_loaded or (None if event.ever_up else reason)
        self._changed.set()
        self.on_change()

    def send(self, messages: Sequence[AddRequest]) -> None:
        """Send the samples of one request to a rank; while none is up they wait for one."""
        now = time.monotonic()
        rank = self._loads.choose(now, self._cached_tokens(messages[0]))
        if rank is None:
            self._waiting.append((now, list(messages)))
            return
        for message in messages:
            self._rank_of[message.number] = rank
            self._loads.sent(rank, now)
            self._up[rank].client.send(message)

    def abort(self, numbers: Sequence[int]) -> None:
        """Let ranks forget samples."""
        by_rank: dict[int, list[int]] = {}
        for number in numbers:
            rank = self._forget(number)
            if rank is not None:
                by_rank.setdefault(rank, []).append(number)
        for rank, mine in by_rank.items():
            self._up[rank].client.send(AbortRequests(mine))
        if self._waiting:
            dropped = set(numbers)
            kept = (
                (since, [message for message in messages if message.number not in dropped])
                for since, messages in self._waiting
            )
            self._waiting = [entry for entry in kept if entry[1]]

    def _cached_tokens(self, message: AddRequest) -> NDArray[np.int64] | None:
        """Return the tokens of a request that each rank has cached; None where that does not count."""
        view, limits = self._prefixes, self._frontend.limits
        if view is None or limits is None:
            return None
        if limits.dynamic_length is not None and len(message.prompt) > limits.dynamic_length:
            return None  # it shares no prefix with any other
        return view.cached_tokens(prompt_keys(message.prompt, limits.block_size, message.cache_salt))

    def broadcast(self, message: FrontendMessage) -> None:
        """Send a message to every rank that is up."""
        for rank in self._up.values():
            rank.client.send(message)

    def watch(self, on: bool) -> None:
        """Have `on_view` called from now on, or no longer."""
        self._watched = on
        self.broadcast(WatchSteps(on))

    async def expert_loads(self) -> NDArray[np.int64] | None:
        """Return how many tokens went to each expert on the ranks that are up, since each was started.

        int64 [layers with experts, experts]; None for a model without experts.
        """
        asked = list(self._up.values())
        self.broadcast(ReportExpertLoads())
        answers = [await rank.expert_loads.get() for rank in asked]
        loads = [answer.tokens for answer in answers if answer is not None and answer.tokens is not None]
        return np.sum(loads, axis=0) if loads else None

    def close(self) -> None:
        """Close all connections."""
        if self._following is not None:
            self._following.cancel()
        for rank in self._up.values():
            rank.close()
        self._up.clear()

    def _on_up(self, event: RankUp) -> None:
        rank = event.rank
        self.down.pop(rank, None)
        if self._frontend.limits is None:
            self._frontend.limits = event.limits
        client = CoreClient(event.address, self._number)
        self._up[rank] = _Rank(client, asyncio.create_task(self._read(rank, client)))
        self._loads.set_up(rank, event.incarnation)
        if self._follows_prefixes:
            if self._prefixes is None:
                self._prefixes = PrefixView(self._all, event.limits.block_size)
            client.send(FollowPrefixes())
        if self._watched:
            client.send(WatchSteps(True))
        waiting, self._waiting = self._waiting, []
        now = time.monotonic()
        for since, messages in waiting:
            self.send([replace(message, age=message.age + now - since) for message in messages])

    def _on_down(self, event: RankDown) -> None:
        self.down[event.rank] = event.reason
        self._loads.set_down(event.rank)
        if self._prefixes is not None:
            self._prefixes.clear(event.rank)
        rank = self._up.pop(event.rank, None)
        if rank is not None:
            rank.close()
        lost = [number for number, where in self._rank_of.items() if where == event.rank]
        suspects = [number for frontend, number in event.suspects if frontend == self._number]
        for number in suspects:
            self._deaths[number] += 1
        if event.alone and len(event.suspects) == len(suspects) == 1:
            [number] = suspects
            self._deaths_alone[number] += 1
            if self._deaths_alone[number] == _DEATHS_ALONE:
                self._convict(event.rank, number, event.reason)
        self._resume(lost)

    def _convict(self, rank: int, number: int, reason: str) -> None:
        """End a request that has ended cores while it ran alone."""
        if number not in self._rank_of:
            return
        said = f"the engine ended each time that it ran this request, in the end with nothing else: {reason}"
        outputs = Outputs.empty()
        outputs.errors = {number: said}
        self._forget(number)
        self.on_outputs(rank, outputs)
        self.on_caught_up()

    def _resume(self, lost: Sequence[int]) -> None:
        """Send samples whose rank has ended to another."""
        suspected = [number for number in lost if self._deaths[number] >= _DEATHS_BEFORE_TRIAL]
        messages = self._frontend.resume(lost, alone=suspected)
        for number in lost:
            self._rank_of.pop(number, None)
            for counts in (self._deaths, self._deaths_alone):
                count = counts.pop(number, 0)
                if number in messages and count:
                    counts[messages[number].number] = count
        if messages:
            logger.info("%d requests go on elsewhere", len(messages))
        for message in messages.values():
            self.send([message])

    def _forget(self, number: int) -> int | None:
        """Forget a sample that has ended; return the rank that had it."""
        self._deaths.pop(number, None)
        self._deaths_alone.pop(number, None)
        rank = self._rank_of.pop(number, None)
        if rank is not None and rank in self._up:
            self._loads.ended(rank)
            return rank
        return None

    async def _read(self, rank: int, client: CoreClient) -> None:
        while True:
            message = await client.receive()
            began = time.monotonic()
            try:
                self._take_message(rank, message)
                while client.has_more and time.monotonic() - began < _LONGEST_READ:
                    self._take_message(rank, await client.receive())
                self.on_caught_up()
            except Exception as error:
                # Whoever waits for them must not wait for ever.
                logger.exception("outputs of rank %d cannot be read", rank)
                self.on_failure(f"outputs of rank {rank} cannot be read: {type(error).__name__}: {error}")
                return
            # A socket that always has more would never let anyone else have a turn.
            await asyncio.sleep(0)

    def _take_message(self, rank: int, message: CoreMessage) -> None:
        match message:
            case Outputs():
                self._take_outputs(rank, message)
            case ExpertLoads():
                self._up[rank].expert_loads.put_nowait(message)
            case StepsView():
                self.on_view(rank, message)
            case KVEvents() if self._prefixes is not None:
                self._prefixes.update(rank, message)

    def _take_outputs(self, rank: int, outputs: Outputs) -> None:
        for number in outputs.numbers[outputs.finished != 0].tolist():
            self._forget(number)
        for number in outputs.errors:
            self._forget(number)
        self.on_outputs(rank, outputs)

    async def _follow(self, link: FrontendLink) -> None:
        """Take in the coordinator's snapshots."""
        try:
            while True:
                self._loads.update(await link.receive(), time.monotonic())
        finally:
            link.close()
