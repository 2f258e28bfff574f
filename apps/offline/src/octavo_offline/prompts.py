"""Answers to the prompts of the command line."""

from typing import TYPE_CHECKING, TextIO

from enginecore import RequestOutput
from octavo_offline.config import DEFAULT_MAX_TOKENS, RunConfig, SamplingConfig
from octavo_offline.progress import show_progress
from octavo_offline.running import Job, run_jobs

if TYPE_CHECKING:
    from enginecore import LLMEngine, Prompt


def run_prompts(engine: "LLMEngine", run: RunConfig, sampling: SamplingConfig, out: TextIO) -> None:
    """Write the answer to each prompt to `out`, in order.

    Raises:
        RequestError: a prompt cannot be run as asked.
    """
    jobs = []
    for index, text in enumerate(run.prompt):
        prompt = _prepare(engine, run, text)
        most = _max_tokens(engine, sampling, prompt)
        jobs.append(Job(index, [prompt], [sampling.params(most, engine.frontend.sampling_defaults)]))
    finished: dict[int, RequestOutput] = {}
    with show_progress(len(jobs)) as progress:
        for result in run_jobs(engine, jobs, progress):
            if result.error is not None:
                raise result.error
            (finished[result.job.key],) = result.outputs
    _write([finished[index] for index in range(len(jobs))], out)


def _prepare(engine: "LLMEngine", run: RunConfig, text: str) -> "Prompt":
    if not run.chat:
        return engine.frontend.prepare_prompt(text)
    system = [] if run.system is None else [{"role": "system", "content": run.system}]
    return engine.frontend.prepare_chat([*system, {"role": "user", "content": text}])


def _max_tokens(engine: "LLMEngine", sampling: SamplingConfig, prompt: "Prompt") -> int:
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    room = engine.limits.max_model_len - len(prompt.token_ids)
    return max(1, min(DEFAULT_MAX_TOKENS, room))


def _write(outputs: list[RequestOutput], out: TextIO) -> None:
    """Write a lone answer as it is, and several under headings as `head` does for files."""
    answers = [(number, sample) for number, output in enumerate(outputs, 1) for sample in output.outputs]
    for index, (prompt, sample) in enumerate(answers):
        if len(answers) > 1:
            out.write("\n" if index else "")
            out.write(f"==> prompt {prompt}, answer {sample.index + 1} <==\n")
        out.write(sample.text + "\n")
