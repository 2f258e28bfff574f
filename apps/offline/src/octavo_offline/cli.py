"""`octavo-offline`: run prompts, a conversation or a batch file through a model and leave."""

import os
import secrets
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginecore import EngineConfig, __version__
from enginecore.errors import ConfigError, OctavoError
from enginecore.options import OptionParser, run_command
from octavo_offline.answer_file import STANDARD_OUTPUT, AnswerFile, Earlier, OutputError, read_earlier
from octavo_offline.config import RunConfig, SamplingConfig, check_run
from octavo_offline.progress import show_loading

if TYPE_CHECKING:
    from enginecore import Engine
    from octavo_offline.batch import Counts

PROGRAM = "octavo-offline"


def main() -> int:
    """Run what the command line asks for.

    Returns:
        0; 1 with --strict when a request failed; 2 when it cannot be run as asked or not be written;
        130 after Ctrl-C.
    """
    return run_command(PROGRAM, _run)


def _run() -> int:
    parser = OptionParser(
        PROGRAM,
        "Run prompts, a conversation, or a file of requests in OpenAI's batch format, through a model.",
        __version__,
        {"run": RunConfig, "sampling": SamplingConfig, "engine": EngineConfig},
    )
    run, sampling, engine_config = parser.read()
    check_run(run, sampling)
    if run.input is not None:
        return _run_batch(run, engine_config)
    if "seed" not in parser.given:
        engine_config = replace(engine_config, seed=secrets.randbits(32))
    try:
        _run_text(run, sampling, engine_config)
    except OutputError:
        _discard_standard_output()
        raise
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            print()
        raise
    return 0


def _run_text(run: RunConfig, sampling: SamplingConfig, engine_config: EngineConfig) -> None:
    from octavo_offline.conversation import Conversation, converse
    from octavo_offline.prompts import read_prompts, run_prompts

    prompts = read_prompts(run.prompt)
    with ExitStack() as stack:
        engine = _load(stack, engine_config)
        if prompts:
            run_prompts(engine, prompts, run, sampling, sys.stdout, sys.stderr)
        else:
            conversation = Conversation(engine, sampling, run.system, sys.stdout, sys.stderr)
            converse(conversation, interactive=sys.stdin.isatty() and sys.stdout.isatty())


def _load(stack: ExitStack, config: EngineConfig) -> "Engine":
    with show_loading(config.model) as on_loaded:
        from enginecore import make_engine

        engine = make_engine(config, on_loaded=on_loaded)
    stack.callback(engine.shutdown)
    return engine


def _run_batch(run: RunConfig, config: EngineConfig) -> int:
    from octavo_offline.batch_input import count_requests, open_requests, unanswered

    assert run.input is not None
    target = run.output or STANDARD_OUTPUT
    with ExitStack() as stack:
        # All that is wrong with the files is known before the model loads.
        source = open_requests(stack, run.input)
        earlier = _check_target(run, target)
        out = stack.enter_context(AnswerFile(target, earlier.size))
        start = source.tell()
        total = count_requests(source, run.input)
        left = sum(1 for _ in unanswered(source, earlier))
        source.seek(start)
        if run.resume:
            print(f"{PROGRAM}: {total - left} of {total} requests are answered", file=sys.stderr)
        from octavo_offline.batch import Counts, run_batch

        counts = Counts(failed_before=earlier.failed)
        if left or not run.resume:
            engine = _load(stack, config)
            names = run.served_model_name or (config.model,)
            try:
                run_batch(engine, names, unanswered(source, earlier), out, counts, left)
            except OutputError as error:
                raise OutputError(f"{error}; {counts.written} answers were written before") from error
            except (KeyboardInterrupt, OctavoError):
                _report(counts, f", {left - counts.written} not run{_hint(target)}")
                raise
        out.finish()
    _report(counts)
    return 1 if run.strict and counts.failed + counts.failed_before else 0


def _check_target(run: RunConfig, target: str) -> Earlier:
    """Return the answers to be kept.

    Raises:
        ConfigError: answers would be overwritten, or requests.
    """
    path = Path(target).expanduser()
    if target == STANDARD_OUTPUT or not path.is_file():
        return Earlier()
    if run.input != STANDARD_OUTPUT and path.samefile(Path(str(run.input)).expanduser()):
        raise ConfigError(f"input and output are the same file: {target}")
    if run.overwrite or path.stat().st_size == 0:
        return Earlier()
    if not run.resume:
        raise ConfigError(
            f"{target} holds answers already: --resume keeps them and answers what is left, "
            "--overwrite replaces them"
        )
    try:
        return read_earlier(path)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from error


def _hint(target: str) -> str:
    return "" if target == STANDARD_OUTPUT else "; --resume goes on from here"


def _report(counts: "Counts", more: str = "") -> None:
    for failure in counts.failures:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
    untold = counts.failed - len(counts.failures)
    if untold:
        print(f"{PROGRAM}: and {untold} more failed", file=sys.stderr)
    before = f" ({counts.failed_before} before)" if counts.failed_before else ""
    print(f"{PROGRAM}: {counts.answered} answered, {counts.failed} failed{before}{more}", file=sys.stderr)


def _discard_standard_output() -> None:
    """Point standard output at nothing, so that what is still buffered does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
