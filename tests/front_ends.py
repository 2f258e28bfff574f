"""A front-end of a model with 320 ids, and a core that says what a script says."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from enginecore.config import EngineConfig
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import AddRequest, EngineLimits, Outputs, PositionLogprobs
from enginecore.model_files import ModelFiles
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams

EOS, EOT = 257, 258
DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)
KINDS = [DELTA, CUMULATIVE, FINAL_ONLY]


def front(tokenizer: Tokenizer | None, files: ModelFiles | None = None, **options: Any) -> Frontend:
    """Return a front-end of a model with 320 ids and room for 64 tokens."""
    files = files or ModelFiles("m", Path("m"), {"eos_token_id": EOS})
    frontend = Frontend(EngineConfig(model="m", **options), files, tokenizer)
    frontend.limits = EngineLimits(max_model_len=64, vocab_size=320, num_blocks=8, block_size=16)
    return frontend


def step(*rows: tuple[int, int, int], **more: Any) -> Outputs:
    """Return a step's message from (number, token, finish code) rows."""
    numbers, tokens, codes = zip(*rows) if rows else ((), (), ())
    return Outputs(
        numbers=np.array(numbers, np.int64),
        tokens=np.array(tokens, np.int32),
        finished=np.array(codes, np.int8),
        **more,
    )


class Received(NamedTuple):
    outputs: list[RequestOutput]
    stopped: list[int]


def add(
    frontend: Frontend, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
) -> list[AddRequest]:
    """Return what a core is sent for a request."""
    return frontend.add(Request(request_id, prompt, params, priority)).messages


def receive(frontend: Frontend, outputs: Outputs) -> Received:
    """Return what callers get of a step, as an engine that is stepped by hand gives it to them."""
    processed = frontend.process(outputs)
    return Received([state.output() for state in processed.changed if state.has_output], processed.stopped)


def core(frontend: Frontend, request: AddRequest, script: Sequence[int]) -> Iterator[Received]:
    """Say the script as an engine core would: a token a step, up to a stop id, max_tokens, or an abort."""
    for count, token in enumerate(script, 1):
        code = 0
        if token in request.sampling.stop_ids and count > request.sampling.params.min_tokens:
            code = 1
        elif count == request.max_tokens:
            code = 2
        received = receive(frontend, step((request.number, token, code)))
        yield received
        if code or request.number in received.stopped:
            return


def run(
    frontend: Frontend, script: Sequence[int], params: SamplingParams
) -> tuple[list[str], list[RequestOutput]]:
    """Return the texts shown, one an output, and the outputs."""
    [request] = add(frontend, "r", Prompt("qqq", [113] * 3), params)
    outputs = [output for received in core(frontend, request, script) for output in received.outputs]
    assert frontend.unfinished == 0
    assert outputs[-1].finished
    return [output.outputs[0].text for output in outputs], outputs


def ids(text: str) -> list[int]:
    return list(text.encode())


def greedy(kind: RequestOutputKind = CUMULATIVE, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0, "max_tokens": 40, "output_kind": kind, **fields}
    return SamplingParams(**fields)


def logprobs_of(
    number: int, rows: list[list[tuple[int, float]]], ranks: list[int]
) -> tuple[int, PositionLogprobs]:
    """Return an entry of a step's message: (token, log probability) pairs and a rank for each position."""
    return number, PositionLogprobs(
        np.array([[token for token, _ in row] for row in rows], np.int32),
        np.array([[value for _, value in row] for row in rows], np.float32),
        np.array(ranks, np.int32),
    )
