"""A worker in a process of its own: connect to the core, get settings, serve.

`executor.processes` starts it as a program, with the address of its link (JSON) as the only argument; an
actor of a Ray cluster calls `serve_link`. It ends when the core does, in whatever way.
"""

import faulthandler
import os
import signal
import socket
import sys

import msgspec

from enginecore import logs
from enginecore.executor.link import LinkError, WorkerEnd
from enginecore.executor.messages import LinkSettings, Listening, WorkerSettings
from enginecore.threads import prepare as prepare_threads


def main() -> None:
    """Serve until the core goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    try:
        serve_link(msgspec.json.decode(sys.argv[1], type=LinkSettings))
    except LinkError as error:
        sys.exit(str(error))
    sys.stderr.flush()
    # At once, without waiting for the threads of torch and gloo, of which some may wait for other ranks.
    os._exit(0)


def serve_link(address: LinkSettings) -> None:
    """Serve the core at the other end of a link. An exception is sent to it, and ends this process.

    Raises LinkError when the core cannot be reached.
    """
    link = WorkerEnd(address)
    try:
        settings = msgspec.json.decode(link.receive(), type=WorkerSettings)
        first = settings.place.rank * settings.config.world_size
        logs.configure(settings.log, rank=first + settings.rank)
        listener = None
        if not settings.rendezvous:
            listener = _listen(settings.host)
            host, port = listener.getsockname()[:2]
            settings.rendezvous = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            link.send(Listening(settings.rendezvous))
        prepare_threads(settings.local_size)
        # Only now what takes seconds to import: the core may end meanwhile, and other ranks want the address.
        from enginecore.worker.loop import serve

        serve(settings, link, listener)
    except Exception as error:
        link.fail(error)


def _listen(host: str) -> socket.socket:
    """Listen on a free port of `host`, an address of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


if __name__ == "__main__":
    main()
