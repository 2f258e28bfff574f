"""Load any OpenAI-compatible server, and report its latencies, throughput and goodput.

    uv run python tools/bench/serve.py http://127.0.0.1:8000 --requests 200 --rate 4
    uv run python tools/bench/serve.py URL --arrivals burst --requests 64 --prompt 256 --output 16:128
    uv run python tools/bench/serve.py URL --arrivals trace --trace azure_conversation.csv --speed 2

Requests arrive by a Poisson process (`--rate` a second), all at once (`burst`), or at the times of a trace,
with its lengths: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines (timestamp
in ms, input_length, output_length, hash_ids, of which equal ones make equal prefixes). Prompts are words,
or token ids with `--ids`, of about or just as many tokens as asked for; answers are streamed.

TTFT is from sending a request to its first text, ITL between two pieces of text, TPOT the mean ITL of a
request over its tokens, E2E to the last byte. A request is good if it meets every `--goal`, such as `ttft=500
tpot=50` in milliseconds; goodput is good requests a second.
"""

import argparse
import asyncio
import csv
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

_WORDS = (
    *("river", "stone", "light", "window", "garden", "music", "paper"),
    *("silver", "morning", "forest", "letter", "bridge", "winter", "table"),
)
_FIGURES = ("ttft", "tpot", "itl", "e2e")
_SHARES = (50, 90, 99)
_PREFIX_TOKENS = 512
"""Tokens of a prefix block in Mooncake's traces."""


class Planned(NamedTuple):
    """A request to be sent."""

    at: float
    """Seconds after the start."""
    prompt_tokens: int
    output_tokens: int
    prefixes: Sequence[int] = ()
    """Numbers of its prefix blocks; equal numbers, equal tokens."""


@dataclass
class Answered:
    """Answer to a request; moments in seconds of `time.perf_counter`."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def figures(self) -> dict[str, float]:
        """Return TTFT, TPOT and E2E in milliseconds, as far as there are any."""
        if not self.pieces:
            return {}
        found = {"ttft": self.pieces[0] - self.sent, "e2e": self.ended - self.sent}
        if self.output_tokens > 1:
            found["tpot"] = (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)
        return {name: seconds * 1e3 for name, seconds in found.items()}


def plan(options: argparse.Namespace) -> list[Planned]:
    """Return the requests to send, by their times."""
    if options.arrivals == "trace":
        return read_trace(options.trace, options.requests, options.speed)
    rng = random.Random(options.seed)
    at, found = 0.0, []
    for _ in range(options.requests):
        if options.arrivals == "poisson":
            at += rng.expovariate(options.rate)
        found.append(Planned(at, rng.randint(*options.prompt), rng.randint(*options.output)))
    return found


def read_trace(path: Path, count: int, speed: float) -> list[Planned]:
    """Return the first `count` requests of a trace, played `speed` times as fast.

    Raises:
        ValueError: the file is of neither kind.
    """
    lines = path.read_text().splitlines()
    if lines and lines[0].startswith("{"):
        rows = [json.loads(line) for line in lines[:count]]
        found = [
            Planned(row["timestamp"] / 1e3, row["input_length"], row["output_length"], row["hash_ids"])
            for row in rows
        ]
    elif lines and lines[0].startswith("TIMESTAMP"):
        # Seven digits of a second, of which Python reads six.
        found = [
            Planned(
                datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for row in csv.DictReader(lines[: count + 1])
        ]
    else:
        raise ValueError(f"{path} is no trace: it begins with neither a JSON object nor TIMESTAMP")
    first = found[0].at
    return [planned._replace(at=(planned.at - first) / speed) for planned in found]


def make_prompt(planned: Planned, rng: random.Random, ids: bool) -> str | list[int]:
    """Return a prompt of as many words or ids as it has tokens."""
    blocks = [random.Random(number) for number in planned.prefixes]
    sources = [block for block in blocks for _ in range(_PREFIX_TOKENS)] + [rng] * planned.prompt_tokens
    drawn = sources[: planned.prompt_tokens]
    if ids:
        return [source.randrange(1000, 2000) for source in drawn]
    return " ".join(source.choice(_WORDS) for source in drawn)


async def run(options: argparse.Namespace, planned: Sequence[Planned]) -> list[Answered]:
    """Send every request at its time, and read all answers."""
    rng = random.Random(options.seed + 1)
    prompts = [make_prompt(each, rng, options.ids) for each in planned]
    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, limits=limits, timeout=options.timeout
    ) as client:
        model = options.model or await _first_model(client)
        start = time.perf_counter()

        async def one(each: Planned, prompt: str | list[int]) -> Answered:
            await asyncio.sleep(max(0.0, start + each.at - time.perf_counter()))
            return await ask(client, body_of(options, model, prompt, each.output_tokens), options.chat)

        return await asyncio.gather(*map(one, planned, prompts))


def body_of(options: argparse.Namespace, model: str, prompt: str | list[int], tokens: int) -> dict[str, Any]:
    """Return a request's body."""
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if options.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return body | json.loads(options.extra)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], chat: bool) -> Answered:
    """Send one request and read its stream; whatever goes wrong is its `error`."""
    answer = Answered(time.perf_counter())
    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return answer
            async for line in response.aiter_lines():
                _read_line(line, answer)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if answer.error is None and not answer.pieces:
        answer.error = "the answer has no text"
    return answer


def _read_line(line: str, answer: Answered) -> None:
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    now = time.perf_counter()
    event = json.loads(line[5:])
    if "error" in event:
        answer.error = str(event["error"])
    usage = event.get("usage") or {}
    answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
    answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            answer.pieces.append(now)


async def _first_model(client: httpx.AsyncClient) -> str:
    response = await client.get("/v1/models")
    response.raise_for_status()
    return response.json()["data"][0]["id"]


def summary(answers: Sequence[Answered], goals: dict[str, float]) -> dict[str, Any]:
    """Return what is to be reported of all answers; times in milliseconds."""
    good = [answer for answer in answers if answer.error is None]
    if not good:
        errors = {answer.error for answer in answers}
        return {"requests": len(answers), "failed": len(answers), "errors": sorted(map(str, errors))[:5]}
    seconds = max(answer.ended for answer in good) - min(answer.sent for answer in answers)
    figures = [answer.figures() for answer in good]
    spans = {name: [each[name] for each in figures if name in each] for name in _FIGURES if name != "itl"}
    spans["itl"] = [
        (later - sooner) * 1e3 for answer in good for sooner, later in zip(answer.pieces, answer.pieces[1:])
    ]
    met = sum(all(each.get(name, 0.0) <= most for name, most in goals.items()) for each in figures)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": sorted({str(answer.error) for answer in answers if answer.error})[:5],
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "output_tokens": sum(answer.output_tokens for answer in good),
        "output_tokens_per_s": sum(answer.output_tokens for answer in good) / seconds,
        "goals": goals,
        "goodput_per_s": met / seconds if goals else None,
        **{f"{name}_ms": _percentiles(spans[name]) for name in _FIGURES},
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {f"p{share}": float(np.percentile(values, share)) for share in _SHARES}
    return {"mean": float(np.mean(values)), **found}


def table(report: dict[str, Any]) -> str:
    """Return the report as text."""
    lines = [f"{report['requests']} requests, {report['failed']} failed"]
    lines += [f"  {error}" for error in report["errors"]]
    if "seconds" in report:
        lines.append(
            f"{report['seconds']:.1f} s, {report['requests_per_s']:.2f} requests/s, "
            f"{report['output_tokens_per_s']:.1f} output tokens/s "
            f"({report['prompt_tokens']} prompt and {report['output_tokens']} output tokens)"
        )
        if report["goals"]:
            goals = ", ".join(f"{name} ≤ {most:g} ms" for name, most in report["goals"].items())
            lines.append(f"goodput {report['goodput_per_s']:.2f} requests/s ({goals})")
        lines.append(f"{'ms':6}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99")))
        for name in _FIGURES:
            spread = report[f"{name}_ms"]
            if spread is not None:
                lines.append(f"{name.upper():6}" + "".join(f"{value:10.1f}" for value in spread.values()))
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    shape = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    made.add_argument("url", help="such as http://127.0.0.1:8000")
    made.add_argument("--model", help="default: the first that the server lists")
    made.add_argument("--key", help="API key")
    made.add_argument("--chat", action="store_true", help="chat completions in place of completions")
    made.add_argument("--arrivals", choices=("poisson", "burst", "trace"), default="poisson")
    made.add_argument("--requests", type=_positive(int), default=100, help="at most, of a trace")
    made.add_argument("--rate", type=_positive(float), default=1.0, help="requests a second, of poisson")
    made.add_argument("--trace", type=Path, help="file of the trace")
    made.add_argument("--speed", type=_positive(float), default=1.0, help="of the trace; 2: twice as fast")
    made.add_argument("--prompt", type=_range, default=(128, 128), metavar="N[:M]", help="tokens")
    made.add_argument("--output", type=_range, default=(64, 64), metavar="N[:M]", help="most tokens")
    made.add_argument("--ids", action="store_true", help="prompts of token ids 1000 to 1999")
    made.add_argument("--extra", default="{}", metavar="JSON", help='more of the body: {"ignore_eos": true}')
    made.add_argument("--goal", nargs="*", type=_goal, default=[], metavar="FIGURE=MS", help="for goodput")
    made.add_argument("--timeout", type=_positive(float), default=600.0, help="seconds without a byte")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, metavar="FILE", help="where to write the report")
    return made


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return read


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text} is no range of 1 or more")
    return low, high


def _goal(text: str) -> tuple[str, float]:
    name, _, most = text.partition("=")
    if name not in ("ttft", "tpot", "e2e"):
        raise argparse.ArgumentTypeError(f"{name} is none of ttft, tpot, e2e")
    return name, float(most)


def main() -> int:
    options = parser().parse_args()
    if (options.arrivals == "trace") != (options.trace is not None):
        parser().error("--arrivals trace and --trace go together")
    if options.ids and options.chat:
        parser().error("--ids: a chat's messages are text")
    report = summary(asyncio.run(run(options, plan(options))), dict(options.goal))
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
