"""A rank of a grid that test_rendezvous.py starts.

usage: grid_process.py RANK TIMEOUT [--listeners FD,...] ADDRESS DP,PP,TP [ADDRESS DP,PP,TP]...

For each grid in turn it makes the communicators, and writes a line of JSON with what came of it: for each
group the number, the places and the communicator of its ranks; or the error. The listeners of rank 0, one for
each grid, are descriptors that it inherits.
"""

import argparse
import json
import os
import socket

import torch

from collectives import Communicators, Grid, RendezvousError, make_communicators


def found(communicators: Communicators, rank: int) -> dict[str, object]:
    report: dict[str, object] = {"interface": os.environ.get("GLOO_SOCKET_IFNAME")}
    for name, comm in communicators._asdict().items():
        members = comm.all_gather(torch.tensor([rank])).tolist()
        kind = type(comm).__name__
        report[name] = {"members": members, "rank": comm.rank, "size": comm.size, "kind": kind}
        assert comm.all_reduce(torch.tensor([float(rank)])).item() == sum(members)
    report["shared"] = communicators.tp is communicators.world
    return report


def main(rank: int, timeout: float, descriptors: list[int], meetings: list[str]) -> None:
    torch.set_num_threads(1)
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors if rank == 0]
    for i, (address, lengths) in enumerate(zip(meetings[::2], meetings[1::2])):
        grid = Grid(*map(int, lengths.split(",")))
        try:
            communicators = make_communicators(
                grid,
                rank,
                address=address,
                backend="gloo",
                timeout=timeout,
                listener=listeners[i] if listeners else None,
            )
            print(json.dumps(found(communicators, rank)), flush=True)
            communicators.close()
        except RendezvousError as error:
            print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("timeout", type=float)
    parser.add_argument("--listeners", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("meetings", nargs="+")
    given = parser.parse_args()
    main(given.rank, given.timeout, given.listeners, given.meetings)
