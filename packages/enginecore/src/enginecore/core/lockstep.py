"""Lockstep of the engines that share experts: when each runs a step, and when all stop."""

from enginecore.data_parallel.messages import NeedWave, StartWave, ToRank, WaveEnded

STEPS_TO_ASK = 32
"""Steps from one question to all engines, whether any has unfinished requests, to the next."""


class Lockstep:
    """One engine's part in the waves of its group. Knows no sockets and no workers.

    Every step exchanges tokens with the experts of all engines, so that none can run one alone: in a *wave*
    all run equally many steps, empty ones where there is nothing else, and between waves none. Every 32nd
    step asks all engines whether any has unfinished requests, and if none has, the wave ends with it on all.
    Until the answer is there no further step is started, so that nobody starts one that others do not.

    Waves are numbered from 1, alike on all engines. An engine that gets requests between waves asks the
    coordinator for the next one, which then starts on all. Another engine may be faster to see the end of a
    wave and to ask for the next, so that this is announced during the last steps of the one before; no later
    one can be, as it takes all engines to run a wave. Announcements of older waves, which the coordinator
    repeats to be sure, are passed over.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.ended = 0
        """Number of waves that have ended."""
        self._announced = 0
        """Number of the last wave that runs, has run, or is to follow the one that runs."""
        self._asked_for = -1
        """`ended` when a wave was last asked for."""
        self._steps = 0
        self._empty = 0
        self._asking = False
        self._ends: list[WaveEnded] = []

    @property
    def running(self) -> bool:
        """Whether the group is in a wave."""
        return self._announced > self.ended

    @property
    def may_start(self) -> bool:
        """Whether a step is to be started, be it an empty one."""
        return self.running and not self._asking

    def start(self, *, empty: bool, unfinished: bool) -> bool | None:
        """Count a step that is started; return `unfinished` if it asks the other engines, None if not."""
        self._steps += 1
        self._empty += empty
        if self._steps % STEPS_TO_ASK:
            return None
        self._asking = True
        return unfinished

    def answer(self, unfinished: bool) -> None:
        """Take the answer of a step that asked: whether any engine has unfinished requests."""
        self._asking = False
        if unfinished:
            return
        self.ended += 1
        self._ends.append(WaveEnded(self._rank, self.ended, self._steps, self._empty))
        self._steps = self._empty = 0

    def receive(self, message: ToRank) -> None:
        """Take a message of the coordinator."""
        follows = self._announced + 1
        if isinstance(message, StartWave) and message.wave == follows and follows <= self.ended + 2:
            self._announced = follows

    def messages(self, unfinished: bool) -> list[NeedWave | WaveEnded]:
        """Return what is to be sent to the coordinator, where `unfinished` tells whether there are requests.

        A wave is asked for once: the link repeats that until it comes.
        """
        messages: list[NeedWave | WaveEnded] = [*self._ends]
        self._ends.clear()
        if unfinished and not self.running and self._asked_for < self.ended:
            self._asked_for = self.ended
            messages.append(NeedWave(self._rank, self.ended))
        return messages
