"""When the ranks that share experts run: waves of steps in lockstep, begun for all of them at once."""

from enginecore.data_parallel.messages import NeedWave, RegisterRank, WaveEnded, WaveStatus


class Waves:
    """The waves of one group of ranks, as its coordinator knows them.

    Waves are numbered from 1. All ranks of a group run wave `started` while that is above `ended`, and are
    idle otherwise. They agree among themselves when a wave ends, so that the word of one rank, in whichever
    message, tells of all: the highest number of ended waves that any has named holds.

    `register`, `need` and `end` return the ranks to be sent `StartWave(started)`. A rank that has begun that
    wave or a later one passes it over, so it may be sent too often but never too seldom.
    """

    def __init__(self, group: int, num_ranks: int) -> None:
        self.group = group
        self.ended = 0
        self.started = 0
        self.steps = 0
        self.empty = 0
        self._num_ranks = num_ranks
        self._ready: set[int] = set()
        self._wanted = False
        self._certain_from = 0
        """Up to this wave, an earlier coordinator may have announced one to some of the ranks only."""

    @property
    def running(self) -> bool:
        """Whether a wave has been started and nobody has said that it ended."""
        return self.started > self.ended

    def register(self, message: RegisterRank, wave: int) -> list[int]:
        """Take a rank's registration, the first one or a later; `wave` is the one that it has seen end."""
        if message.num_blocks == 0:
            self._ready.discard(message.rank)
            return []
        is_new = message.rank not in self._ready
        self._ready.add(message.rank)
        lost_count = self.running and wave > self.started
        self._note_end(wave)
        if is_new and message.again and not self._certain_from:
            # Others may be in the wave after this, of which this rank, or the coordinator, has not heard; or
            # all may still be in that, and some know of the next. Empty waves cost a few steps each, a rank
            # that waits for another costs everything.
            self._certain_from = wave + 2
        if lost_count or self._is_uncertain:
            return self._start()
        if self._wanted and self._is_complete:
            return self._start()
        return [message.rank] if self.running and wave < self.started else []

    def need(self, message: NeedWave) -> list[int]:
        """Take a rank's wish to run."""
        if message.rank not in self._ready:
            return []
        self._note_end(message.wave)
        if self.running:
            return sorted(self._ready)
        self._wanted = not (self._is_complete or self._is_uncertain)
        return [] if self._wanted else self._start()

    def end(self, message: WaveEnded) -> list[int]:
        """Take a rank's word that a wave has ended."""
        if message.rank in self._ready and message.wave > self.ended:
            self._note_end(message.wave)
            self.steps += message.steps
            self.empty += message.empty
        return self._start() if self._is_uncertain else []

    def status(self) -> WaveStatus:
        """Return what `Status` tells of the waves."""
        return WaveStatus(self.group, self.ended, self.running, self.steps, self.empty)

    @property
    def _is_complete(self) -> bool:
        return len(self._ready) >= self._num_ranks

    @property
    def _is_uncertain(self) -> bool:
        """Whether the next wave is to be started though nobody has asked for it."""
        return not self.running and self.started < self._certain_from

    def _start(self) -> list[int]:
        self._wanted = False
        self.started = self.ended + 1
        return sorted(self._ready)

    def _note_end(self, wave: int) -> None:
        self.ended = max(self.ended, wave)
        self.started = max(self.started, self.ended)
