"""A request walks through the forms that docs/architecture.md draws, from the HTTP body to its row."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchsched
import byte_tokenizer
from batchsched.waiting import Entry
from checkpoints import Oracle, llama_config, save_random
from cores import start_core
from enginecore import Prompt, Request, RequestOutput
from enginecore.codec import Decoder, Encoder
from enginecore.config import make_config
from enginecore.executor.messages import decode_step, encode_step
from enginecore.frontend import openai
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request_state import RequestState
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.messages import AddRequest, CoreMessage, FrontendMessage, Outputs
from enginecore.model_files import locate
from kvblocks import Prefix

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


def drawn() -> list[str]:
    """The numbered forms of the document's table."""
    return re.findall(r"^\| \d \| ([^|]+) \|", DOCUMENT.read_text(), re.MULTILINE)


def cross(message: Any, kind: Any) -> Any:
    """What the other process gets."""
    return Decoder(kind).decode(Encoder().encode(message))


def test_from_the_body_to_a_row_and_back(model):
    config = make_config({"model": str(model), "dtype": "float32", "device": "cpu"})
    files = locate(str(model))
    frontend = Frontend(config, files, load_tokenizer(files))
    core = start_core(model)
    frontend.limits = core.limits
    steps = []
    submit = core._executor.submit
    core._executor.submit = lambda step: (steps.append(step), submit(decode_step(encode_step(step))))[1]
    forms: list[Any] = []

    raw = b'{"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": true, "priority": 0}'
    body = openai.read_completion(openai.decode(raw), config.max_logprobs)
    forms.append(body)
    params = openai.completion_params(body, frontend.sampling_defaults)
    request = Request("r", frontend.prepare_prompt(body.prompt), params, body.priority or 0)
    forms.append(request)
    assert request.prompt == Prompt("abc", [97, 98, 99])
    state, [message] = frontend.add(request)
    forms.append(state)
    forms.append(message)

    core.add(0, cross(message, FrontendMessage))
    [entry] = core._scheduler._waiting._heap[0][-1:]
    forms += [entry.request, entry, entry.prefix]
    tokens: list[int] = []
    while core.has_work:
        outputs = cross(core.step()[0], CoreMessage)
        assert isinstance(outputs, Outputs)
        tokens += outputs.tokens.tolist()
        frontend.process(outputs)
    [admitted] = steps[0].plan.admitted
    forms.append(admitted)

    kinds = (
        openai.CompletionBody,
        Request,
        RequestState,
        AddRequest,
        batchsched.Request,
        Entry,
        Prefix,
        batchsched.AdmittedRow,
    )
    assert [type(form) for form in forms] == list(kinds)
    names = drawn()
    assert len(names) == len(kinds)
    for name, kind in zip(names, kinds, strict=True):
        assert kind.__name__ in re.split(r"[`. ]", name), name

    # The row: its tokens are in the scheduler's column and in the worker's buffer.
    everything = [97, 98, 99, *tokens]
    assert tokens == Oracle(model).greedy([97, 98, 99], 5)[0]
    np.testing.assert_array_equal(core._scheduler._rows.tokens[admitted.row, :8], everything)
    buffers = core._executor._worker._runner._buffers
    assert buffers.tokens[admitted.row, :8].tolist() == everything
    assert [step.plan.admitted for step in steps[1:]] == [[]] * 4
    output = state.output()
    assert isinstance(output, RequestOutput)
    assert output.outputs[0].token_ids == tokens
    head = openai.Head("cmpl-r", 0, "m")
    answer = openai.completion_answer(head, body, [output], frontend.require_tokenizer())
    assert answer["choices"][0]["text"] == output.outputs[0].text
    assert answer["usage"]["completion_tokens"] == 5
