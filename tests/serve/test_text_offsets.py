"""`logprobs.text_offset` of completions with stop strings: streamed and whole answers say the same."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Step, say
from test_streams import chunks, stream

from enginecore import CompletionOutput, Prompt, RequestOutput
from enginecore.frontend import openai
from enginecore.frontend.text.stop import StopMatcher
from enginecore.outputs import Logprob
from octavo_serve.chunks import EVENT, CompletionChunks

pytestmark = pytest.mark.anyio

ROUTE = "/v1/completions"


def stopped(pieces: Sequence[str], stops: Sequence[str]) -> list[Step]:
    """The steps of tokens with these texts, as the engine shows them: without the stop string's."""
    matcher, steps = StopMatcher(stops), []
    for piece in pieces:
        text, stop = matcher.push(piece)
        if stop is not None:
            return [*steps, Step(text, [VOCABULARY.token(piece)], "stop", stop)]
        steps.append(Step(text, [VOCABULARY.token(piece)]))
    return [*steps, Step(matcher.flush(), [VOCABULARY.token("")], "stop")]


class Words:
    """A vocabulary that gives each text that it is asked for a token; the empty one is special."""

    def __init__(self) -> None:
        self._texts = [""]
        self.special_ids = frozenset({0})

    def token(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self._texts[token] for token in ids)

    def token_text(self, token: int, /) -> str:
        return self._texts[token]

    def token_bytes(self, token: int, /) -> bytes:
        return self._texts[token].encode()


VOCABULARY = Words()


async def answers(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer's choice, and the choices of the stream's chunks."""
    whole = (await client.post(ROUTE, json=body)).json()["choices"][0]
    streamed = chunks(await stream(client, ROUTE, {**body, "stream": True}))
    return whole, [chunk["choices"][0] for chunk in streamed]


def joined(choices: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][name]]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    ("steps", "offsets"),
    [
        (
            [Step("a"), Step("b"), Step("", [83]), Step("", [84]), Step("", [80], "stop", "STP")],
            [0, 1, 2, 2, 2],
        ),
        ([Step("a"), Step("", [83]), Step("", [84]), Step("STx", [120]), *say("y")], [0, 1, 2, 3, 4, 5]),
        ([Step("a"), Step("", [83]), Step("", [84]), Step("ST", [257], "stop")], [0, 1, 2, 3]),
        ([Step("a"), Step("", [83]), Step("", [84], "abort")], [0, 1, 1]),
    ],
    ids=["cut", "almost", "ended", "aborted"],
)
async def test_what_a_stop_string_cuts_off_stands_at_the_end(client, engine, steps, offsets, echo):
    engine.script = lambda prompt, params: steps
    body = {"prompt": "hi", "stop": "STP", "logprobs": 0, "echo": echo, "return_token_ids": True}
    whole, streamed = await answers(client, body)
    expected = [0, 1, *(2 + offset for offset in offsets)] if echo else offsets
    assert whole["logprobs"]["text_offset"] == expected
    assert joined(streamed, "text_offset") == expected
    assert joined(streamed, "tokens") == whole["logprobs"]["tokens"]
    assert joined(streamed, "token_logprobs") == whole["logprobs"]["token_logprobs"]
    assert [token for choice in streamed for token in choice.get("token_ids", [])] == whole["token_ids"]
    assert "".join(choice["text"] for choice in streamed) == whole["text"]


async def test_usage_counts_tokens_that_are_held_back(client, engine):
    engine.script = lambda prompt, params: [
        Step("a"),
        Step("", [83]),
        Step("", [84]),
        Step("STx", [120]),
        Step("", [257], "stop"),
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hi", "stop": "STP", "logprobs": 0, "stream": True, "stream_options": options}
    found = chunks(await stream(client, ROUTE, body))
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 4, 5, 5]
    tokens = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in found[:3]]
    assert tokens == [["a"], ["S"], ["T", "x"]]


async def test_an_abort_shows_the_tokens_that_were_held_back(engine):
    head, body = openai.Head("cmpl-1", 1, "m"), openai.CompletionBody(prompt="hi", stop="STP", logprobs=0)
    prompt = Prompt("hi", [104, 105])
    made = CompletionChunks(head, body, [prompt], engine.frontend.tokenizer, EVENT)
    for token, text in ((97, "a"), (83, ""), (84, "")):
        sample = CompletionOutput(0, text, [token], logprobs=[{token: Logprob(-0.5)}])
        made.encode(0, RequestOutput("r", "hi", prompt.token_ids, [sample], False))
    (last,) = chunks(b"".join([*made.abort(), made.closing]).decode())
    (choice,) = last["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (["T"], [1])


pieces = st.lists(st.text("ab\N{HOT PEPPER}", min_size=1, max_size=3), min_size=1, max_size=8)
stops = st.lists(st.text("ab\N{HOT PEPPER}", min_size=1, max_size=4), min_size=1, max_size=2)


@given(pieces, stops, st.integers(1, 3))
def test_any_stop_string(pieces, stops, at_once):
    """Whatever is cut off, and however many tokens an output of a slow reader's stream holds."""
    steps = stopped(pieces, stops)
    rows = [{step.tokens[0]: Logprob(-0.5)} for step in steps]
    head, prompt = openai.Head("cmpl-1", 1, "m"), Prompt("p", [VOCABULARY.token("p")])
    body = openai.CompletionBody(prompt="p", stop=stops, logprobs=0, return_token_ids=True)
    ids = [token for step in steps for token in step.tokens]
    text, reason = "".join(step.text for step in steps), steps[-1].finish_reason
    sample = CompletionOutput(0, text, ids, logprobs=rows, finish_reason=reason)
    output = RequestOutput("r", "p", prompt.token_ids, [sample], True)
    (whole,) = openai.completion_answer(head, body, [output], VOCABULARY)["choices"]
    made = CompletionChunks(head, body, [prompt], VOCABULARY, EVENT)
    events = []
    for place in range(0, len(steps), at_once):
        part = steps[place : place + at_once]
        said = "".join(step.text for step in part)
        new = ids[place : place + at_once]
        sample = CompletionOutput(
            0, said, new, logprobs=rows[place : place + at_once], finish_reason=part[-1].finish_reason
        )
        events += made.encode(0, RequestOutput("r", "p", prompt.token_ids, [sample], True))
    streamed = [chunk["choices"][0] for chunk in chunks(b"".join([*events, made.closing]).decode())]
    shape = whole["logprobs"]
    assert joined(streamed, "text_offset") == shape["text_offset"]
    assert joined(streamed, "tokens") == shape["tokens"]
    for token, offset in zip(shape["tokens"], shape["text_offset"], strict=True):
        assert token.startswith(text[offset : offset + len(token)])
        assert offset <= len(text)
