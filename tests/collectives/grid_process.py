"""A rank of a grid that test_rendezvous.py starts.

usage: grid_process.py RANK TIMEOUT ADDRESS DP,PP,TP [ADDRESS DP,PP,TP]...

For each grid in turn it makes the communicators, and writes a line of JSON with what came of it: for each
group the number, the places and the communicator of its ranks; or the error.
"""

import json
import os
import sys

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


def main(rank: int, timeout: float, meetings: list[str]) -> None:
    torch.set_num_threads(1)
    for address, lengths in zip(meetings[::2], meetings[1::2]):
        grid = Grid(*map(int, lengths.split(",")))
        try:
            communicators = make_communicators(grid, rank, address=address, backend="gloo", timeout=timeout)
            print(json.dumps(found(communicators, rank)), flush=True)
            communicators.close()
        except RendezvousError as error:
            print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
