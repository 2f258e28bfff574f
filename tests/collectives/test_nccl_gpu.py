"""NcclCommunicator on a device, as a group of one: every call reaches NCCL, and a CUDA graph takes it."""

import pytest
import torch
import torch.distributed as dist

from collectives import NcclCommunicator

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def comm():
    comm = NcclCommunicator(dist.HashStore(), 0, 1, device=torch.device("cuda", 0), name="alone", timeout=60)
    yield comm
    comm.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_alone_every_operation_gives_back_what_it_got(comm, dtype):
    x = torch.arange(12, device=comm.device).view(4, 3).to(dtype)
    results = [
        comm.all_reduce(x.clone(), "max"),
        comm.all_gather(x),
        comm.all_gather(x, 1, out=torch.empty_like(x)),
        comm.reduce_scatter(x),
        comm.broadcast(x.clone()),
        comm.all_to_all(x),
        comm.all_to_all(x, [4], [4]),
    ]
    comm.barrier()
    comm.check()
    for result in results:
        assert torch.equal(result, x)


def test_calls_are_captured_in_a_graph_and_replayed(comm):
    x = torch.zeros(4, 3, device=comm.device)
    for _ in range(2):  # warm up outside the capture
        comm.all_to_all(comm.all_reduce(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = comm.all_gather(comm.all_to_all(comm.all_reduce(x * 2)))
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full((4, 3), 6.0, device=comm.device))
