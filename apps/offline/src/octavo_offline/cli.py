"""`octavo-offline`: run prompts, or a batch file, through a model and leave."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from enginecore import EngineConfig, __version__
from enginecore.errors import ConfigError
from enginecore.options import OptionParser, run_command
from octavo_offline.config import RunConfig, SamplingConfig, check_run

if TYPE_CHECKING:
    from enginecore import LLMEngine

PROGRAM = "octavo-offline"


def main() -> int:
    """Run what the command line asks for; return 0, or 2 when it cannot be run as asked."""
    return run_command(PROGRAM, _run)


def _run() -> int:
    parser = OptionParser(
        PROGRAM,
        "Run prompts, or a file of requests in OpenAI's batch format, through a model.",
        __version__,
        {"run": RunConfig, "sampling": SamplingConfig, "engine": EngineConfig},
    )
    run, sampling, engine_config = parser.read()
    check_run(run, sampling)
    with ExitStack() as stack:
        # Opened before the model loads: a file that is not there is known at once.
        files = None if run.input is None else _open_files(stack, run.input, run.output or "-")
        from enginecore import LLMEngine

        engine = LLMEngine(engine_config)
        stack.callback(engine.shutdown)
        if files is None:
            from octavo_offline.prompts import run_prompts

            run_prompts(engine, run, sampling, sys.stdout)
        else:
            _run_batch(engine, run, *files)
    return 0


def _run_batch(engine: "LLMEngine", run: RunConfig, source: BinaryIO, out: BinaryIO) -> None:
    from octavo_offline.batch import run_batch

    names = run.served_model_name or (engine.config.model,)
    counts = run_batch(engine, names, source, out, _count_requests(source))
    print(f"{PROGRAM}: {counts.answered} answered, {counts.failed} failed", file=sys.stderr)


def _open_files(stack: ExitStack, source: str, target: str) -> tuple[BinaryIO, BinaryIO]:
    into = Path(target).expanduser()
    try:
        if source == "-":
            reader = sys.stdin.buffer
        else:
            reader = stack.enter_context(Path(source).expanduser().open("rb"))
            if into.exists() and into.samefile(source):
                raise ConfigError(f"input and output are the same file: {target}")
        writer = sys.stdout.buffer if target == "-" else stack.enter_context(into.open("wb"))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return reader, writer


def _count_requests(source: BinaryIO) -> int | None:
    """Return the number of requests in a file; None for a stream, which can be read only once."""
    if not source.seekable():
        return None
    count = sum(1 for line in source if line.strip())
    source.seek(0)
    return count
