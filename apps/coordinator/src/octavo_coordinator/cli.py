"""`octavo-coordinator`: serve ranks and front-ends, show the status of one that runs, or write a key."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from enginecore import __version__
from enginecore.errors import ConfigError, OctavoError
from enginecore.options import OptionParser, run_command
from octavo_coordinator.config import CoordinatorConfig

if TYPE_CHECKING:
    from enginecore.data_parallel.messages import CoordinatorAddress

PROGRAM = "octavo-coordinator"

logger = logging.getLogger(__name__)


def main() -> int:
    """Do what the command line asks for; return 0, or 2 when it cannot be done as asked."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    return run_command(PROGRAM, _run)


def _run() -> int:
    description = "Coordinate the ranks and servers that share the requests of one model."
    parser = OptionParser(PROGRAM, description, __version__, {"coordinator": CoordinatorConfig}, model=False)
    (options,) = parser.read()
    if options.write_key is not None:
        from enginecore.data_parallel.connection import write_key

        write_key(Path(options.write_key).expanduser())
    elif options.status:
        _show_status(options)
    else:
        _serve(options)
    return 0


def _show_status(options: CoordinatorConfig) -> None:
    import msgspec

    from enginecore.data_parallel.link import ask_status
    from octavo_coordinator.table import table

    where = options.address or _endpoint(options)
    status = ask_status(_address(options, where))
    if status is None:
        raise OctavoError(f"no coordinator answers on {where}, or it has another key")
    text = msgspec.json.encode(status).decode() if options.json else table(status)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _serve(options: CoordinatorConfig) -> None:
    from enginecore import logs
    from enginecore.data_parallel.coordinator_process import CoordinatorServer, CoordinatorSettings

    logs.configure(logs.LogSettings(getattr(logging, options.log_level.upper()), options.log_format))
    settings = CoordinatorSettings(
        _address(options, _endpoint(options)), http_host=options.host, http_port=options.http_port
    )
    server = CoordinatorServer(settings)
    logger.info("version %s", __version__)
    logger.info("listening on %s and the port above it", server.ports.address.reports)
    if server.ports.http is not None:
        logger.info("status on %s", server.ports.http)
    server.run()


def _address(options: CoordinatorConfig, host_and_port: str) -> "CoordinatorAddress":
    from enginecore.data_parallel.connection import read_key, tcp_address
    from enginecore.data_parallel.messages import CoordinatorAddress

    if host_and_port.startswith("ipc://"):
        return CoordinatorAddress(host_and_port, snapshots="")

    key = None if options.key_file is None else read_key(Path(options.key_file).expanduser())
    return tcp_address(host_and_port, key)


def _endpoint(options: CoordinatorConfig) -> str:
    """Return the host's IP address and the port; ZMQ binds to no names."""
    import socket

    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {options.host}: {error.strerror}") from error
    family, _, _, _, (host, *_) = found[0]
    return f"[{host}]:{options.port}" if family == socket.AF_INET6 else f"{host}:{options.port}"


def _leave(number: int, frame: object) -> None:
    """End with the status of an asked stop; there is nothing to save."""
    os._exit(0)
