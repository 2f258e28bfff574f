"""Answers to the prompts of the command line."""

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TextIO

from enginecore import Request
from enginecore.errors import ConfigError
from octavo_offline.config import RunConfig, SamplingConfig
from octavo_offline.progress import NoProgress, show_progress
from octavo_offline.streaming import Answer, AnswerPrinter, Limited, limit_answer, stream

if TYPE_CHECKING:
    from enginecore import Engine, Prompt

STANDARD_INPUT = "-"


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """Return the prompts, with the text of standard input, without its last line end, in place of -.

    Raises:
        ConfigError: that text is not UTF-8.
    """
    return [_standard_input() if prompt == STANDARD_INPUT else prompt for prompt in prompts]


def run_prompts(
    engine: "Engine",
    prompts: Sequence[str],
    run: RunConfig,
    sampling: SamplingConfig,
    out: TextIO,
    notes: TextIO,
) -> None:
    """Write the answer to each prompt to `out`, in order and as it comes; `notes` tells what was cut off.

    Raises:
        RequestError: a prompt cannot be run as asked.
        OutputError: `out` cannot be written.
    """
    prepared = [_prepare(engine, run, text) for text in prompts]
    limits = [limit_answer(engine, sampling, prompt, chat=run.chat) for prompt in prepared]
    printer = AnswerPrinter(_answers(limits, sampling.n), out, notes)
    requests = [
        Request(str(index), prompt, limited.params, 0)
        for index, (prompt, limited) in enumerate(zip(prepared, limits, strict=True))
    ]
    shown = NoProgress() if out.isatty() else show_progress(len(requests))
    with shown as progress, closing(stream(engine, requests)) as outputs:
        for output in outputs:
            progress.stepped(engine.stats().generation_tokens)
            if output.finished:
                progress.ended()
            for sample in output.outputs:
                printer.push(int(output.request_id) * sampling.n + sample.index, sample)


def _prepare(engine: "Engine", run: RunConfig, text: str) -> "Prompt":
    if not run.chat:
        return engine.frontend.prepare_prompt(text)
    system = [] if run.system is None else [{"role": "system", "content": run.system}]
    return engine.frontend.prepare_chat([*system, {"role": "user", "content": text}])


def _answers(limits: Sequence[Limited], samples: int) -> list[Answer]:
    """Return a lone answer without a heading, and several with those that `head` gives files."""
    if len(limits) * samples == 1:
        return [Answer("", limits[0].ending)]
    found = []
    for number, limited in enumerate(limits, 1):
        for sample in range(1, samples + 1):
            name = f"prompt {number}, answer {sample}"
            before = "\n" if found else ""
            found.append(Answer(f"{before}==> {name} <==\n", f"{name} {limited.ending}"))
    return found


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error}") from error
