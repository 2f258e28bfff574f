"""Two hosts on one machine: network namespaces with a cable between them. Linux, and the rights of root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

WHY_NO_HOSTS = "network namespaces need root and the command ip (package iproute2)"


class Host(NamedTuple):
    """A namespace and its end of the cable."""

    name: str
    address: str
    cable: str
    """Name of its network interface."""

    @property
    def prefix(self) -> list[str]:
        """What to put before a command for it to run there."""
        return ["ip", "netns", "exec", self.name]

    def ip(self, *arguments: str) -> None:
        """Run the command ip on this host."""
        _ip("-n", self.name, *arguments)


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Make two hosts that reach each other and nothing else."""
    hosts = [Host(f"octavo-{os.getpid()}-{i}", f"10.213.71.{1 + i}", f"cable{i}") for i in range(2)]
    left, right = hosts
    with ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
        peer = ["peer", "name", right.cable, "netns", right.name]
        left.ip("link", "add", left.cable, "type", "veth", *peer)
        for host in hosts:
            host.ip("addr", "add", f"{host.address}/24", "dev", host.cable)
            for link in (host.cable, "lo"):
                host.ip("link", "set", link, "up")
        yield hosts


def can_make_hosts() -> bool:
    """Whether `two_hosts` works here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"octavo-{os.getpid()}-probe"
    added = subprocess.run(["ip", "netns", "add", probe], capture_output=True, timeout=20)
    if added.returncode == 0:
        _ip("netns", "del", probe)
    return added.returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
