"""The core's side of its socket: who is answered, and who is forgotten."""

import time

import numpy as np
import pytest
import zmq

from enginecore.codec import Decoder, Encoder
from enginecore.core.board import Board
from enginecore.core.identity import frontend_identity
from enginecore.core.process import CoreServer
from enginecore.messages import (
    AbortRequests,
    CoreMessage,
    EngineStats,
    Outputs,
    ResetPrefixCache,
    StepsView,
    WatchSteps,
)

LIMIT_S = 60
"""Seconds after which waiting is given up, on the slowest machine."""


class Core:
    """Records what it is told; `step` answers with `outputs`."""

    lockstep = None
    step_log = None

    def __init__(self):
        self.told = []
        self.outputs: dict[int, Outputs] = {}

    def abort(self, client, numbers):
        self.told.append((client, numbers))

    def reset_prefix_cache(self):
        self.told.append("reset")

    def forget(self, client):
        self.told.append(("forget", client))

    def step(self):
        return self.outputs

    def stats(self):
        return EngineStats()

    def steps_view(self, *, with_blocks):
        return StepsView(np.zeros((1, 7), np.float32))


def wait_until(condition):
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Wire:
    """A server over `Core`, and front-ends that are connected to it."""

    def __init__(self, folder):
        self.context = zmq.Context()
        self.address = f"ipc://{folder}/core"
        router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(self.address)
        Board.prepare(folder / "board", 4)
        self.core = Core()
        self.server = CoreServer(self.core, router, Board(folder / "board"))

    def client(self, number):
        """Return a connected socket that the server has heard of."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, frontend_identity(number))
        socket.linger = 0
        socket.connect(self.address)
        self.tell(socket, AbortRequests([number]))
        return socket

    def tell(self, socket, message):
        before = len(self.core.told)
        socket.send(Encoder().encode(message))
        wait_until(lambda: self.read() and len(self.core.told) > before)

    def read(self):
        self.server._read()
        self.server._forget_gone()
        return True

    def close(self):
        self.server.close()
        self.context.destroy(linger=0)


@pytest.fixture
def wire(tmp_path):
    made = Wire(tmp_path)
    yield made
    made.close()


def received(socket):
    """The next outputs that are of some request."""
    decoder: Decoder[CoreMessage] = Decoder(CoreMessage)
    while True:
        assert socket.poll(1000 * LIMIT_S)
        message = decoder.decode(socket.recv())
        if len(message.numbers):
            return message


def outputs(number):
    return Outputs(np.array([number]), np.array([5], np.int32), np.zeros(1, np.int8))


def test_each_front_end_gets_its_own(wire):
    clients = [wire.client(number) for number in (0, 7)]
    assert wire.core.told == [(0, [0]), (7, [7])]
    wire.core.outputs = {0: outputs(10), 7: outputs(70)}
    wire.server._step()
    assert [received(client).numbers.tolist() for client in clients] == [[10], [70]]


def test_a_front_end_that_has_gone_is_forgotten_and_the_others_are_not(wire):
    stays, goes = wire.client(1), wire.client(2)
    wire.core.told.clear()
    goes.close()
    wait_until(lambda: wire.read() and wire.core.told)
    assert wire.core.told == [("forget", 2)]
    # It is heard of no more, and the other is served as before.
    wire.tell(stays, ResetPrefixCache())
    wire.core.outputs = {1: outputs(3)}
    wire.server._step()
    assert received(stays).numbers.tolist() == [3]
    assert wire.core.told == [("forget", 2), "reset"]


def test_outputs_for_a_front_end_that_went_during_the_step_end_nothing(wire):
    wire.client(2).close()
    wait_until(lambda: wire.server._ends.poll(0))
    wire.core.outputs = {2: outputs(1)}
    wire.server._step()
    assert ("forget", 2) in wire.core.told


def test_views_go_to_those_who_watch_and_end_when_they_leave(wire):
    watches, does_not = wire.client(1), wire.client(2)
    watches.send(Encoder().encode(WatchSteps(True)))
    wait_until(lambda: wire.read() and wire.core.step_log is not None)
    wire.server._step()
    assert watches.poll(1000 * LIMIT_S)
    assert isinstance(Decoder(CoreMessage).decode(watches.recv()), StepsView)
    wire.core.outputs = {2: outputs(3)}
    wire.server._step()
    assert received(does_not).numbers.tolist() == [3]
    watches.close()
    wait_until(lambda: wire.read() and wire.core.step_log is None)


def test_a_front_end_may_come_back(wire):
    wire.client(2).close()
    wait_until(lambda: wire.read() and ("forget", 2) in wire.core.told)
    again = wire.client(2)
    wire.core.outputs = {2: outputs(4)}
    wire.server._step()
    assert received(again).numbers.tolist() == [4]
