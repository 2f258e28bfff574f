"""Ranks and front-ends that speak to a coordinator process, which dies and comes back."""

import asyncio
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from data_parallel.coordinators import LIMIT_S, CoordinatorUnderTest, wait_for
from enginecore.codec import Decoder
from enginecore.data_parallel import link as link_module
from enginecore.data_parallel.connection import read_key, write_key
from enginecore.data_parallel.link import FrontendLink, RankLink, ask_status
from enginecore.data_parallel.messages import (
    CoordinatorAddress,
    GroupAddress,
    LoadReport,
    NeedWave,
    RegisterRank,
    Snapshot,
    StartWave,
    Status,
    ToCoordinator,
)
from enginecore.errors import ConfigError
from enginecore.messages import Failed


@pytest.fixture
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    return CoordinatorAddress(f"ipc://{folder}/r", f"ipc://{folder}/s")


@contextmanager
def running(address: CoordinatorAddress, **settings):
    made = CoordinatorUnderTest(address, **settings)
    try:
        yield made
    finally:
        made.kill()


@contextmanager
def rank_link(address: CoordinatorAddress, rank: int = 0, **more):
    fields = {"num_ranks": 1, "incarnation": 0, "num_blocks": 50, "max_num_seqs": 8, **more}
    link = RankLink(address, RegisterRank(rank=rank, **fields))
    try:
        yield link
    finally:
        link.close()


def load(waiting: int, rank: int = 0) -> LoadReport:
    return LoadReport(rank, time.monotonic(), waiting, 0, 50, 0, 0.0, 0)


def received(links: list[RankLink], *others: RankLink) -> list[list]:
    """What each of `links` has got once all have something, while the loops of `others` turn too."""
    found = [[] for _ in links]

    def all_have() -> bool:
        for link in others:
            link.receive()
        for got, link in zip(found, links):
            got += link.receive()
        return all(found)

    wait_for(all_have)
    return found


async def snapshot_where(link: FrontendLink, condition) -> Snapshot:
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = await link.receive()
            if condition(found):
                return found


def pumped(links: list[RankLink], work) -> object:
    """Run the coroutine `work` while the ranks' loops turn."""

    async def turn() -> None:
        while True:
            for link in links:
                link.receive()
            await asyncio.sleep(0.01)

    async def both() -> object:
        turning = asyncio.create_task(turn())
        try:
            return await work
        finally:
            turning.cancel()

    return asyncio.run(both())


def waiting_is(count: int):
    return lambda found: found.waiting.tolist() == [count]


def test_a_front_end_gets_the_newest_load(address):
    async def follow(rank: RankLink) -> Snapshot:
        link = FrontendLink(address, 0)
        try:
            for waiting in (1, 2, 3):
                rank.report(load(waiting))
            return await snapshot_where(link, waiting_is(3))
        finally:
            link.close()

    with running(address), rank_link(address) as rank:
        found = pumped([rank], follow(rank))
    assert (found.ranks.tolist(), found.num_blocks.tolist()) == ([0], [50])
    assert 0 <= found.ages[0] < LIMIT_S


def test_both_register_again_when_the_coordinator_comes_back(address):
    """Meanwhile neither waits nor raises, and what is out of date is not sent later."""

    async def follow(rank: RankLink) -> None:
        link = FrontendLink(address, 5)
        try:
            first = CoordinatorUnderTest(address)
            rank.report(load(1))
            await snapshot_where(link, waiting_is(1))
            first.kill()
            for waiting in range(2, 100):
                rank.report(load(waiting))
            with running(address):
                await snapshot_where(link, waiting_is(99))
                while (await asyncio.to_thread(ask_status, address)).frontends != [5]:
                    await link.receive()
        finally:
            link.close()

    with rank_link(address) as rank:
        pumped([rank], follow(rank))


def test_a_report_is_sent_on_change_and_at_most_every_20_ms(address, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    decoder: Decoder[ToCoordinator] = Decoder(ToCoordinator)

    def reports(count: int) -> list[int]:
        """The `waiting` of the load reports among the next `count` messages."""
        found = [decoder.decode(router.recv_multipart()[1]) for _ in range(count)]
        return [message.waiting for message in found if isinstance(message, LoadReport)]

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, rank_link(address) as rank:
        router.bind(address.reports)
        while not router.poll(10):
            clock[0] += 0.1
            rank.receive()
        assert reports(1) == []  # it registers
        for waiting in (1, 2, 3, 4):
            rank.report(load(waiting))
        assert rank.due() == pytest.approx(0.02)
        clock[0] += 0.01
        rank.receive()
        assert rank.due() == pytest.approx(0.01)
        clock[0] += 0.01
        rank.receive()
        rank.report(load(4))
        clock[0] += 0.5
        rank.report(load(4))
        rank.report(load(5))
        assert rank.due() > 0.02
        assert reports(3) == [1, 4, 5]
        assert not router.poll(0)


def test_ranks_are_told_of_a_wave_and_of_where_they_meet(address):
    group = {"num_ranks": 2, "group": 3, "wave": 0}
    with (
        running(address),
        rank_link(address, 0, **group, num_blocks=0) as first,
        rank_link(address, 1, **group, num_blocks=0) as second,
    ):
        meeting = GroupAddress(0, 3, "host:1")
        first.send(meeting)
        (got,) = received([second], first)
        assert got[0] == meeting
        for rank, link in enumerate((first, second)):
            link.register(RegisterRank(rank, 2, 0, 50, 8, group=3, wave=0))
        second.send(NeedWave(1, 0))
        found = [[], []]

        def all_have() -> bool:
            for got, link in zip(found, (first, second)):
                got += [message for message in link.receive() if message != meeting]
            return all(found)

        wait_for(all_have)
        assert [got[-1] for got in found] == [StartWave(1)] * 2


def test_a_wish_for_a_wave_outlives_the_coordinator(address):
    with rank_link(address, wave=0) as rank:
        rank.send(NeedWave(0, 0))
        with running(address):
            assert received([rank]) == [[StartWave(1)]]


def test_a_rank_that_closes_or_never_reaches_it_does_not_wait(address):
    with rank_link(address) as rank:
        rank.report(load(1))
        assert rank.receive() == []
        assert rank.due() <= 1


def test_it_ends_with_its_parent(address):
    assert CoordinatorUnderTest(address).stop() == 0


def test_an_address_that_is_taken_is_refused():
    free = CoordinatorAddress("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    with running(free) as first:
        assert first.address.reports.startswith("tcp://127.0.0.1:")
        second = CoordinatorUnderTest(first.address)
        assert second.process.wait(LIMIT_S) == 2
        assert isinstance(second.started, Failed)
        assert "cannot listen on tcp://127.0.0.1:" in second.started.message


def test_the_status_is_json_over_http(address):
    with running(address, http_port=0) as made, rank_link(address) as rank:
        wait_for(lambda: rank.receive() or ask_status(address).ranks)
        with urllib.request.urlopen(made.started.http) as answer:
            status = msgspec.json.decode(answer.read(), type=Status)
        assert [rank.num_blocks for rank in status.ranks] == [50]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(made.started.http + "/else")


def test_a_message_that_cannot_be_read_hurts_nobody(address):
    with running(address), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address.reports)
        for body in (b"", b"\xc1", b"\x91\xa4rank", b"[]"):
            socket.send(body)
        socket.send_multipart([b"two", b"parts"])
        assert ask_status(address).ranks == []


class TestKeys:
    def test_only_who_has_the_key_is_heard(self, tmp_path):
        for name in ("key", "other"):
            write_key(tmp_path / name)
        key, other = read_key(tmp_path / "key"), read_key(tmp_path / "other")
        free = CoordinatorAddress("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", key)
        with running(free) as made:
            assert ask_status(made.address).ranks == []
            assert ask_status(msgspec.structs.replace(made.address, key=other), timeout=0.5) is None
            assert ask_status(msgspec.structs.replace(made.address, key=None), timeout=0.5) is None
            # Who knows the server's public key, but has a pair of its own.
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.curve_serverkey = zmq.curve_public(key.encode())
                socket.connect(made.address.reports)
                socket.send(b"\x91\xaaask_status")
                assert not socket.poll(500)
            assert ask_status(made.address).messages == 2

    def test_snapshots_come_to_who_has_the_key(self, tmp_path):
        write_key(tmp_path / "key")
        free = CoordinatorAddress("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", read_key(tmp_path / "key"))

        async def follow(address: CoordinatorAddress, rank: RankLink) -> Snapshot:
            link = FrontendLink(address, 0)
            try:
                rank.report(load(4))
                return await snapshot_where(link, waiting_is(4))
            finally:
                link.close()

        with running(free) as made, rank_link(made.address) as rank:
            assert pumped([rank], follow(made.address, rank)).ranks.tolist() == [0]

    def test_a_key_is_for_its_owner_only_and_is_not_replaced(self, tmp_path):
        path = tmp_path / "key"
        write_key(path)
        assert path.stat().st_mode & 0o777 == 0o600
        before = read_key(path)
        with pytest.raises(ConfigError, match="exists"):
            write_key(path)
        assert read_key(path) == before

    @pytest.mark.parametrize("text", ["", "short", "x" * 40 + "y", "ü" * 40])
    def test_a_file_without_a_key_is_refused(self, tmp_path, text):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ConfigError, match="--write-key"):
            read_key(tmp_path / "key")
