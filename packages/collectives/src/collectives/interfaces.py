"""Find the network interface that leads to an address, for gloo (Linux)."""

import os
import socket
import struct
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def local_address(host: str, port: int) -> str:
    """Return the address from which this host reaches `host`, by its routes. OSError without a route."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: looks up the route, sends nothing
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """Return the name of the interface whose first address is `address`. LookupError when none is."""
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    raise LookupError(f"no network interface of this host has {address} as its first address")


@contextmanager
def gloo_interface(host: str, port: int) -> Generator[None, None, None]:
    """Make gloo use the interface that leads to `host`, unless GLOO_SOCKET_IFNAME names one.

    By default gloo takes the interface of the host's own name, which is often the loopback.
    """
    if _GLOO_VARIABLE in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[_GLOO_VARIABLE] = interface_of(local_address(host, port))
    try:
        yield
    finally:
        del os.environ[_GLOO_VARIABLE]


def _addresses(interface: str) -> set[str]:
    import fcntl

    found: set[str] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode())
            found.add(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
        except OSError:
            pass  # an interface without an IPv4 address
    table = Path("/proc/net/if_inet6")  # address in hex, four numbers, interface
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    found |= {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == interface}
    return found
