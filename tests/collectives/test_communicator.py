"""Communicators in real processes, over gloo and over shared memory, and alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from primitives import *  # noqa: F403 the checks that hold for every communicator

from collectives import Communicator, GlooCommunicator, LocalCommunicator

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
    mark = Path(f"{type(comm).__name__} the last of {comm.size} from {dist.get_rank() - comm.rank} came")
    if comm.rank == comm.size - 1:
        mark.touch()
    comm.barrier()
    assert mark.exists()


def ranks_gloo_refuses_what_it_cannot_carry(comm: Communicator):
    with pytest.raises(TypeError, match=r"gloo cannot carry torch\.float8_e4m3fn"):
        comm.all_to_all(torch.zeros(comm.size, 2).to(torch.float8_e4m3fn))


def ranks_all_reduce_adds_bfloat16_in_float32(comm: Communicator):
    for n in (3, 100_001):
        x = torch.full((n,), 256.0 if comm.rank == 0 else 1.5, dtype=torch.bfloat16)
        assert comm.all_reduce(x).eq({2: 258.0, 3: 260.0, 4: 260.0}[comm.size]).all()


def ranks_shared_memory_carries_tensors_of_many_pieces(comm: Communicator):
    # Of 2 MiB and more, uneven, to be cut into chunks that do not fit.
    n = 600_001
    everyones = [torch.arange(n, dtype=torch.float32) % (1009 + rank) for rank in range(comm.size)]
    mine = everyones[comm.rank]
    total = torch.stack(everyones).sum(0)  # whole numbers: exact in any order
    assert torch.equal(comm.all_reduce(mine.clone()), total)
    assert torch.equal(comm.all_gather(mine.view(-1, 1), 1), torch.stack(everyones, 1))
    sizes = [n - 7 * rank for rank in range(comm.size)]
    cut = torch.cat([x[:size] for x, size in zip(everyones, sizes)])
    out = torch.empty_like(cut)
    assert comm.all_gather(mine[: sizes[comm.rank]], 0, sizes, out) is out
    assert torch.equal(out, cut)
    assert torch.equal(comm.broadcast(mine.clone(), comm.size - 1), everyones[-1])
    # Only rank 0 has something to send, and all of it goes to the last.
    sends, receives = [0] * comm.size, [0] * comm.size
    sends[-1] = n if comm.rank == 0 else 0
    receives[0] = n if comm.rank == comm.size - 1 else 0
    received = comm.all_to_all(mine if comm.rank == 0 else mine[:0], sends, receives)
    assert torch.equal(received, everyones[0][: receives[0]])
    if comm.rank == 0:
        comm.send(mine, 1)
    elif comm.rank == 1:
        assert torch.equal(comm.recv(torch.empty(n), 0), everyones[0])


def ranks_shared_memory_has_the_bits_of_a_sum_in_the_order_of_ranks(comm: Communicator):
    for n in (100, 50_000):  # each rank adds all, and each its part
        everyones = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
        expected = everyones[0]
        for x in everyones[1:]:
            expected = expected + x
        assert torch.equal(comm.all_reduce(everyones[comm.rank].clone()), expected)


def ranks_shared_memory_keeps_what_was_returned(comm: Communicator):
    returned = [comm.all_gather(torch.full((4,), float(turn))) for turn in range(5)]
    assert [x.tolist() for x in returned] == [[float(turn)] * 4 * comm.size for turn in range(5)]


def ranks_shared_memory_refuses_what_it_cannot_add(comm: Communicator):
    with pytest.raises(TypeError, match=r"torch\.float8_e4m3fn cannot be reduced"):
        comm.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match="shared memory carries tensors of the CPU, not of meta"):
        comm.send(torch.zeros(2, device="meta"), (comm.rank + 1) % comm.size)


def test_a_process_group_of_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    with pytest.raises(ValueError, match="the backend of the process group is nccl, not gloo"):
        GlooCommunicator()


def test_local_returns_its_argument_itself():
    comm, x = LocalCommunicator(), torch.ones(2, 3)
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_reduce(x, "max") is x
    assert comm.all_gather(x, -1, [3]) is x
    assert comm.reduce_scatter(x, [2]) is x
    assert comm.broadcast(x) is x
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
