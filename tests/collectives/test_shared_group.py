"""What a rank that shares memory makes of others that leave, die or stay away."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from collectives import RankLost, SharedMemoryCommunicator, shared_memory
from collectives.shared_group import SharedGroup, allocate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux")

JOIN_AND_DIE = """
import sys
import torch
from collectives.shared_group import SharedGroup
group = SharedGroup(int(sys.argv[1]), 1, 2, 30)
print("here", flush=True)
sys.stdin.readline()
group.put(0, group.slots(torch.uint8)[1][:3].fill_(9))
sys.stdin.read()
"""


def pair(timeout):
    """Both ends of a group, in this process."""
    descriptor = allocate(2)
    ends = [SharedGroup(descriptor, rank, 2, timeout) for rank in range(2)]
    os.close(descriptor)
    for end in ends:
        end.watch()
    return ends


def joined(size, timeout=30):
    """What `join` gives each of `size` threads."""
    store = dist.HashStore()
    found = [None] * size

    def join(rank):
        found[rank] = SharedMemoryCommunicator.join(store, rank, size, name="all", timeout=timeout)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_what_a_rank_did_last_is_read_after_it_left():
    mine, others = pair(30)
    others.put(0, torch.full((5,), 7, dtype=torch.uint8))
    others.close()
    data = torch.empty(5, dtype=torch.uint8)
    mine.take(1, data)
    assert data.tolist() == [7] * 5
    with pytest.raises(RankLost, match=r"rank 1 of 2 has left the group; rank 0 waits for it"):
        mine.meet()
    mine.close()
    mine.close()


def test_a_rank_that_stays_away_is_named():
    mine, others = pair(0.2)
    with pytest.raises(RankLost, match=r"rank 1 of 2 did not come within 0\.2 s"):
        mine.meet()
    for end in (mine, others):
        end.close()


def test_a_rank_that_takes_nothing_is_named_once_its_buffers_are_full():
    mine, others = pair(0.2)
    data = torch.zeros(1, dtype=torch.uint8)
    mine.put(1, data)
    mine.put(1, data)
    with pytest.raises(RankLost, match="rank 1 of 2 did not come within"):
        mine.put(1, data)
    for end in (mine, others):
        end.close()


def test_a_process_that_ends_is_named():
    descriptor = allocate(2)
    mine = SharedGroup(descriptor, 0, 2, 60)
    child = subprocess.Popen(
        [sys.executable, "-c", JOIN_AND_DIE, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        os.close(descriptor)
        assert child.stdout.readline() == b"here\n"
        mine.watch()
        child.stdin.write(b"\n")
        child.stdin.flush()
        data = torch.zeros(3, dtype=torch.uint8)
        mine.take(1, data)
        assert data.tolist() == [9] * 3
        child.kill()
        with pytest.raises(RankLost, match=rf"rank 1 of 2 \(process {child.pid}\) has ended"):
            mine.meet()
    finally:
        child.kill()
        child.communicate()
    mine.close()


def test_ranks_that_share_a_host_share_memory():
    comms = joined(3)
    assert [(comm.rank, comm.size) for comm in comms] == [(0, 3), (1, 3), (2, 3)]
    for comm in comms:
        comm.close()


def test_nobody_shares_memory_when_one_rank_is_elsewhere(monkeypatch):
    host, third = shared_memory._host, []

    def named():
        third.append(None)
        return host() if len(third) < 3 else "another host"

    monkeypatch.setattr(shared_memory, "_host", named)
    assert joined(3) == [None] * 3


def test_memory_that_cannot_be_opened_is_not_shared(monkeypatch):
    monkeypatch.setattr(shared_memory.os, "getpid", lambda: 0)  # there is no /proc/0
    assert joined(2) == [None] * 2


def test_a_rank_that_does_not_join_is_an_error_in_time():
    with pytest.raises(dist.DistError):
        SharedMemoryCommunicator.join(dist.HashStore(), 0, 2, name="all", timeout=0.2)


def test_other_memory_is_refused():
    descriptor = allocate(2)
    with pytest.raises(ValueError, match="not the memory of a group of 3 ranks"):
        SharedGroup(descriptor, 0, 3, 1)
    os.close(descriptor)
