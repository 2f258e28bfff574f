"""`octavo-serve`: read the options, take the port, then load everything else."""

import os
import signal
import sys

PROGRAM = "octavo-serve"


def main() -> int:
    """Serve until asked to stop; return 0 then, 1 when the engine died, 2 when it could not start."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    # Imported under the handlers: a signal meanwhile ends the command quietly.
    from enginecore.options import run_command

    return run_command(PROGRAM, _serve)


def _serve() -> int:
    from enginecore import EngineConfig, __version__
    from enginecore.options import OptionParser
    from octavo_serve.config import ServeConfig
    from octavo_serve.listening import open_listener

    description = "Serve a model over HTTP, with OpenAI's API."
    records = {"engine": EngineConfig, "server": ServeConfig}
    # `octavo-serve serve MODEL` is `vllm serve MODEL`; a folder of that name is ./serve.
    arguments = sys.argv[2:] if sys.argv[1:2] == ["serve"] else sys.argv[1:]
    engine_config, options = OptionParser(PROGRAM, description, __version__, records).read(arguments)
    if options.otlp_traces_endpoint is not None:
        from octavo_serve import tracing

        tracing.check()
    # Taken before the model and the web framework load: a port in use is known at once.
    listener = open_listener(options)
    from octavo_serve.supervisor import Supervisor, announce

    announce(listener, engine_config, options)
    return Supervisor(listener, engine_config, options).run()


def _leave(number: int, frame: object) -> None:
    """End, with the status of an asked stop, when a signal comes before the server handles them itself.

    At once: an exception would be lost in a weak reference's callback, and imports have many.
    """
    os._exit(0)
