"""The coordinator as a function of messages and a clock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginecore.codec import Decoder, Encoder
from enginecore.data_parallel.coordinator import Coordinator, Send
from enginecore.data_parallel.messages import (
    AskStatus,
    GroupAddress,
    LoadReport,
    NeedWave,
    RegisterAgain,
    RegisterFrontend,
    RegisterRank,
    Snapshot,
    StartWave,
    Status,
    WaveEnded,
)


def registration(rank: int, incarnation: int = 0, **more) -> RegisterRank:
    fields = {"num_ranks": 2, "num_blocks": 100, "max_num_seqs": 8, **more}
    return RegisterRank(rank=rank, incarnation=incarnation, **fields)


def report(rank: int, at: float = 0.0, **more: int) -> LoadReport:
    fields = {"waiting": 0, "running": 0, "free_blocks": 100, "tokens": 0, "step_seconds": 0.0, "steps": 0}
    return LoadReport(rank=rank, at=at, **{**fields, **more})


def lines(snapshot: Snapshot | None) -> list[tuple[int, int, int, int]]:
    """Rank, incarnation, waiting and running of each line."""
    assert snapshot is not None
    columns = snapshot.ranks, snapshot.incarnations, snapshot.waiting, snapshot.running
    return list(zip(*(column.tolist() for column in columns)))


@pytest.fixture
def coordinator():
    """One that has sent its first snapshot at 0, and knows ranks 0 and 1 as b"0" and b"1"."""
    made = Coordinator(0.0)
    made.receive(b"1", registration(1), 0.0)
    made.receive(b"0", registration(0), 0.0)
    made.snapshot(0.0)
    return made


class TestSnapshots:
    def test_they_have_the_newest_loads_of_all_ranks_in_order(self, coordinator):
        coordinator.receive(b"1", report(1, waiting=7), 0.01)
        coordinator.receive(b"1", report(1, waiting=3, running=4, free_blocks=55), 0.02)
        found = coordinator.snapshot(0.06)
        assert lines(found) == [(0, 0, 0, 0), (1, 0, 3, 4)]
        assert found.free_blocks.tolist() == [0, 55] and found.num_blocks.tolist() == [100, 100]

    def test_they_come_every_50_ms_and_only_on_change(self, coordinator):
        assert coordinator.wait(0.1) == pytest.approx(0.9)
        coordinator.receive(b"0", report(0, running=1), 0.02)
        assert coordinator.snapshot(0.04) is None
        assert coordinator.wait(0.04) == pytest.approx(0.01)
        assert lines(coordinator.snapshot(0.05)) == [(0, 0, 0, 1), (1, 0, 0, 0)]
        coordinator.receive(b"0", report(0, running=1, steps=9, tokens=5), 0.06)
        assert coordinator.snapshot(0.2) is None

    def test_one_a_second_comes_without_a_change(self, coordinator):
        assert coordinator.snapshot(0.9) is None
        assert coordinator.snapshot(1.0) is not None

    def test_a_report_ages(self, coordinator):
        coordinator.receive(b"0", report(0, at=500.0), 0.5)
        # On its way for 0.3 s, by the clock of its first report.
        coordinator.receive(b"0", report(0, at=500.2, running=1), 1.0)
        assert coordinator.snapshot(1.0).ages.tolist() == pytest.approx([0.3, -1], abs=1e-3)

    def test_a_front_end_that_comes_makes_one_due(self, coordinator):
        coordinator.receive(b"f", RegisterFrontend(3), 0.06)
        assert coordinator.snapshot(0.06) is not None
        coordinator.receive(b"f", RegisterFrontend(3), 0.2)
        assert coordinator.snapshot(0.2) is None

    def test_a_rank_whose_model_loads_is_in_none(self, coordinator):
        coordinator.receive(b"2", registration(2, num_blocks=0), 0.01)
        assert [line[0] for line in lines(coordinator.snapshot(1.0))] == [0, 1]
        coordinator.receive(b"2", registration(2), 1.01)
        assert [line[0] for line in lines(coordinator.snapshot(1.1))] == [0, 1, 2]

    def test_without_ranks_they_are_empty(self):
        found = Coordinator(0.0).snapshot(1.0)
        assert lines(found) == []
        assert lines(Decoder(Snapshot).decode(Encoder().encode(found))) == []


class TestRegistration:
    @pytest.mark.parametrize(
        "message", [report(7), NeedWave(7, 0), WaveEnded(7, 1, 32, 0), GroupAddress(7, 0, "host:1")]
    )
    def test_an_unknown_sender_is_told_to_register(self, coordinator, message):
        assert coordinator.receive(b"x", message, 0.1) == [Send(b"x", RegisterAgain())]

    def test_a_rank_that_starts_again_has_none_of_its_old_load(self, coordinator):
        coordinator.receive(b"0", report(0, waiting=5), 0.1)
        coordinator.receive(b"new", registration(0, incarnation=1), 0.2)
        assert lines(coordinator.snapshot(0.3)) == [(0, 1, 0, 0), (1, 0, 0, 0)]
        assert coordinator.receive(b"0", report(0, waiting=6), 0.3) == [Send(b"0", RegisterAgain())]

    def test_what_a_process_that_has_ended_left_behind_is_passed_over(self, coordinator):
        coordinator.receive(b"new", registration(0, incarnation=1), 0.2)
        coordinator.receive(b"0", registration(0, incarnation=0), 0.3)
        assert lines(coordinator.snapshot(0.4))[0] == (0, 1, 0, 0)

    def test_a_new_connection_keeps_the_load(self, coordinator):
        coordinator.receive(b"0", report(0, waiting=5), 0.1)
        coordinator.receive(b"again", registration(0), 0.2)
        assert lines(coordinator.snapshot(0.3))[0] == (0, 0, 5, 0)

    def test_who_is_silent_is_forgotten(self, coordinator):
        coordinator.receive(b"f", RegisterFrontend(0), 0.0)
        for second in range(1, 12):
            coordinator.receive(b"1", registration(1), second)
            found = coordinator.snapshot(second)
        assert [line[0] for line in lines(found)] == [1]
        status = coordinator.status(11.0)
        assert (status.frontends, [rank.rank for rank in status.ranks]) == ([], [1])
        assert coordinator.receive(b"0", report(0), 11.5) == [Send(b"0", RegisterAgain())]
        coordinator.receive(b"0", registration(0), 11.6)
        assert [line[0] for line in lines(coordinator.snapshot(12.0))] == [0, 1]

    def test_the_status_tells_of_all(self, coordinator):
        coordinator.receive(b"0", report(0, waiting=2, running=3, tokens=77, step_seconds=0.5, steps=9), 0.1)
        coordinator.receive(b"f", RegisterFrontend(1), 0.1)
        (answer,) = coordinator.receive(b"who", AskStatus(), 2.0)
        status = Decoder(Status).decode(Encoder().encode(answer.message))
        assert answer.to == b"who"
        assert (status.uptime, status.messages, status.snapshots) == (2.0, 5, 1)
        assert (status.frontends, status.waves) == ([1], None)
        first = status.ranks[0]
        assert (first.waiting, first.running, first.tokens, first.steps) == (2, 3, 77, 9)
        assert (first.ready, first.age, status.ranks[1].age) == (True, pytest.approx(1.9), 2.0)


class TestGroupAddress:
    def test_it_goes_to_the_ranks_that_load_also_later_ones(self):
        made = Coordinator(0.0)
        for rank in (0, 1):
            made.receive(b"%d" % rank, registration(rank, num_blocks=0, num_ranks=3, group=4), 0.0)
        address = GroupAddress(0, 4, "host:5000")
        assert made.receive(b"0", address, 0.1) == [Send(b"1", address)]
        assert made.receive(b"2", registration(2, num_blocks=0, num_ranks=3, group=4), 0.2) == [
            Send(b"2", address)
        ]
        assert made.receive(b"2", registration(2, num_ranks=3, group=4), 0.3) == []

    def test_it_is_that_of_the_newest_start_of_the_group(self):
        made = Coordinator(0.0)
        made.receive(b"0", registration(0, num_blocks=0, group=1), 0.0)
        made.receive(b"0", GroupAddress(0, 1, "host:1"), 0.0)
        assert made.receive(b"1", registration(1, incarnation=1, num_blocks=0, group=2), 0.1) == []
        made.receive(b"00", registration(0, incarnation=1, num_blocks=0, group=2), 0.2)
        newest = GroupAddress(0, 2, "host:2")
        assert made.receive(b"00", newest, 0.2) == [Send(b"1", newest)]
        assert made.receive(b"00", GroupAddress(0, 1, "host:1"), 0.3) == []
        assert made.receive(b"1", registration(1, incarnation=1, num_blocks=0, group=2), 0.4) == [
            Send(b"1", newest)
        ]


def lockstep(*waves: int, **more) -> Coordinator:
    """A coordinator of as many ranks, b"0" and so on, that have seen so many waves end."""
    made = Coordinator(0.0)
    for rank, wave in enumerate(waves):
        made.receive(b"%d" % rank, registration(rank, num_ranks=len(waves), wave=wave, **more), 0.0)
    return made


def told(sends: list[Send]) -> dict[bytes, int]:
    assert all(isinstance(send.message, StartWave) for send in sends)
    return {send.to: send.message.wave for send in sends}


class TestWaves:
    def test_one_starts_when_any_rank_needs_it_for_all(self):
        made = lockstep(0, 0, 0)
        assert told(made.receive(b"1", NeedWave(1, 0), 0.1)) == {b"0": 1, b"1": 1, b"2": 1}

    def test_it_waits_until_all_are_registered_and_loaded(self):
        made = Coordinator(0.0)
        made.receive(b"0", registration(0, wave=0), 0.0)
        assert made.receive(b"0", NeedWave(0, 0), 0.0) == []
        assert made.receive(b"1", registration(1, wave=0, num_blocks=0), 0.1) == []
        assert told(made.receive(b"1", registration(1, wave=0), 0.2)) == {b"0": 1, b"1": 1}

    def test_the_next_follows_when_one_rank_says_that_the_last_has_ended(self):
        made = lockstep(0, 0)
        made.receive(b"0", NeedWave(0, 0), 0.1)
        assert made.receive(b"0", WaveEnded(0, 1, 64, 3), 0.2) == []
        assert told(made.receive(b"0", NeedWave(0, 1), 0.3)) == {b"0": 2, b"1": 2}
        made.receive(b"1", WaveEnded(1, 1, 64, 9), 0.4)
        waves = made.status(0.5).waves
        assert (waves.ended, waves.running, waves.steps, waves.empty) == (1, True, 64, 3)

    def test_a_stale_number_is_announced_again(self):
        made = lockstep(0, 0)
        made.receive(b"0", NeedWave(0, 0), 0.1)
        assert told(made.receive(b"1", NeedWave(1, 0), 0.2)) == {b"0": 1, b"1": 1}

    def test_a_rank_that_missed_the_start_is_told_when_it_registers(self):
        made = lockstep(0, 0)
        made.receive(b"0", NeedWave(0, 0), 0.1)
        assert told(made.receive(b"again", registration(1, wave=0, again=True), 0.2)) == {b"again": 1}

    @pytest.mark.parametrize("waves", [(0, 5), (5, 0)])
    def test_the_greatest_number_holds(self, waves):
        made = lockstep(*waves)
        for rank, wave in enumerate(waves):
            assert set(told(made.receive(b"%d" % rank, NeedWave(rank, wave), 0.1)).values()) == {6}

    def test_a_greater_number_during_a_wave_begins_the_next_at_once(self):
        """The others are in wave 1 and wait for this rank, which idles after its wave 3."""
        made = lockstep(0, 0)
        made.receive(b"0", NeedWave(0, 0), 0.1)
        assert told(made.receive(b"1", registration(1, wave=3), 0.2)) == {b"0": 4, b"1": 4}

    def test_ranks_that_were_registered_before_run_twice_after_a_restart_of_the_coordinator(self):
        """One may wait in a wave of which the other was not told before the coordinator died.

        That may be the wave after the one that they had both seen end, or the one after that, if they were
        still in the first of these.
        """
        made = Coordinator(0.0)
        assert told(made.receive(b"1", registration(1, wave=4, again=True), 0.0)) == {b"1": 5}
        assert told(made.receive(b"0", registration(0, wave=4, again=True), 0.1)) == {b"0": 5}
        made.receive(b"0", WaveEnded(0, 5, 32, 32), 0.2)
        assert told(made.receive(b"1", registration(1, wave=5, again=True), 0.3)) == {b"1": 6}
        assert made.receive(b"1", WaveEnded(1, 6, 32, 32), 0.4) == []
        assert made.receive(b"1", registration(1, wave=6, again=True), 0.5) == []

    def test_signs_of_life_start_nothing(self):
        made = lockstep(0, 0)
        for rank in (0, 1):
            assert made.receive(b"%d" % rank, registration(rank, wave=0, again=True), 1.0) == []

    def test_a_group_that_starts_again_counts_anew(self):
        made = lockstep(7, 7)
        made.receive(b"0", NeedWave(0, 7), 0.1)
        made.receive(b"00", registration(0, incarnation=1, group=1, wave=0), 0.2)
        assert made.receive(b"1", NeedWave(1, 8), 0.2) == []
        assert made.receive(b"00", NeedWave(0, 0), 0.3) == []
        sends = made.receive(b"11", registration(1, incarnation=1, group=1, wave=0), 0.4)
        assert told(sends) == {b"00": 1, b"11": 1}


class LockstepRank:
    """A rank as `StartWave` and the messages say it behaves; its loop stands still in a wave of its own."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ended = self.current = self.target = 0
        self.work = 0
        self.again = False

    @property
    def in_wave(self) -> bool:
        return self.target > self.ended

    def messages(self) -> list:
        """What it sends once a second while it idles."""
        found = [registration(self.rank, num_ranks=self.size, wave=self.ended, again=self.again)]
        self.again = True
        return found + ([NeedWave(self.rank, self.ended)] if self.work else [])

    def take(self, message: StartWave) -> None:
        idle = not self.in_wave
        self.target = max(self.target, message.wave)
        if idle or message.wave > self.current + 1:
            self.current = self.target

    def end_wave(self) -> None:
        self.ended = self.current
        self.current = self.target


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.randoms(use_true_random=False))
def test_no_rank_ever_waits_for_an_idle_one(size, random):
    """Messages get lost and the coordinator is killed at any moment; then both stop, and all work is done."""
    ranks = [LockstepRank(rank, size) for rank in range(size)]
    coordinator = Coordinator(0.0)
    for second in range(60):
        calm = second >= 40
        if not calm and random.random() < 0.2:
            coordinator = Coordinator(float(second))
        if not calm and random.random() < 0.5:
            random.choice(ranks).work += 1
        senders = [rank for rank in ranks if not rank.in_wave]
        random.shuffle(senders)
        for rank in senders:
            for message in rank.messages():
                if not calm and random.random() < 0.3:
                    continue
                for send in coordinator.receive(b"%d" % rank.rank, message, float(second)):
                    if isinstance(send.message, StartWave) and (calm or random.random() > 0.3):
                        ranks[int(send.to)].take(send.message)
        # A step is one of all ranks or none; every wave ends when no rank has work.
        if all(rank.in_wave for rank in ranks):
            for rank in ranks:
                rank.work = 0
                rank.end_wave()
    assert [rank.work for rank in ranks] == [0] * size
    assert not any(rank.in_wave for rank in ranks)


def test_snapshot_columns_cross_as_they_are(coordinator):
    coordinator.receive(b"0", report(0, waiting=1), 0.01)
    found = Decoder(Snapshot).decode(Encoder().encode(coordinator.snapshot(0.1)))
    assert found.waiting.dtype == np.int32 and lines(found) == [(0, 0, 1, 0), (1, 0, 0, 0)]
