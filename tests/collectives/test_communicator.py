"""Communicators in real gloo processes, and alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from primitives import *  # noqa: F403 the checks that hold for every communicator

from collectives import Communicator, LocalCommunicator

pytestmark = pytest.mark.xdist_group("ranks")


def test_on_every_rank(check, ranks):
    ranks.assert_passed(check)


def test_all_processes_end_well(ranks):
    assert ranks.returncodes == [0, 0, 0, 0], ranks.stderr()


def ranks_reduce_scatter_sums_bfloat16_in_float32(comm: Communicator):
    # Steps of bfloat16 are 2 from 256 on: 256 + 1 rounds back to 256, however often 1 is added.
    x = torch.full((comm.size,), 256.0 if comm.rank == 0 else 1.5, dtype=torch.bfloat16)
    expected = {2: 258.0, 3: 260.0, 4: 260.0}[comm.size]  # 257.5, 259 and 260.5, rounded once, ties to even
    assert comm.reduce_scatter(x).tolist() == [expected]


def ranks_barrier_waits_for_the_last(comm: Communicator):
    # Every process has the same working directory, of its own for this run.
    mark = Path(f"the last of {comm.size} from {dist.get_rank() - comm.rank} came")
    if comm.rank == comm.size - 1:
        mark.touch()
    comm.barrier()
    assert mark.exists()


def ranks_gloo_refuses_what_it_cannot_carry(comm: Communicator):
    with pytest.raises(TypeError, match=r"gloo cannot carry torch\.float8_e4m3fn"):
        comm.all_to_all(torch.zeros(comm.size, 2).to(torch.float8_e4m3fn))


def test_local_returns_its_argument_itself():
    comm, x = LocalCommunicator(), torch.ones(2, 3)
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_reduce(x, "max") is x
    assert comm.all_gather(x, -1, [3]) is x
    assert comm.reduce_scatter(x, [2]) is x
    assert comm.broadcast(x) is x
    assert comm.reduce(x) is x
    assert comm.all_to_all(x, [2], [2]) is x
    comm.barrier()
    comm.close()


def test_local_gathers_into_a_given_tensor():
    x, out = torch.ones(2, 3), torch.zeros(2, 3)
    assert LocalCommunicator().all_gather(x, 1, out=out) is out
    assert torch.equal(out, x)
    with pytest.raises(ValueError, match="out must be of shape"):
        LocalCommunicator().all_gather(x, out=torch.zeros(3, 2))


def test_local_has_nobody_to_send_to():
    comm, x = LocalCommunicator(), torch.ones(1)
    with pytest.raises(ValueError, match="cannot send to rank 1: rank 0 is the only one"):
        comm.send(x, 1)
    with pytest.raises(ValueError, match="cannot receive from rank 0: rank 0 is the only one"):
        comm.recv(x, 0)
