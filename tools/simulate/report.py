"""Reports of a replay: summary figures, a table, a plot."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import MARKDOWN
from rich.table import Table

from simulate.outcome import Outcome

_PERCENTILES = (50, 90, 99)


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean and percentiles of what is known of `values`, NaN if nothing is."""
    known = values[~np.isnan(values)]
    if known.size == 0:
        return {name: float("nan") for name in ("mean", "p50", "p90", "p99")}
    percentiles = np.percentile(known, _PERCENTILES)
    named = {f"p{percent}": float(value) for percent, value in zip(_PERCENTILES, percentiles)}
    return {"mean": float(known.mean()), **named}


def latencies(outcome: Outcome, which: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    """Spreads of TTFT, TPOT and E2E, in seconds, over some of the requests."""
    return {
        "ttft": spread(outcome.ttft[which]),
        "tpot": spread(outcome.tpot[which]),
        "e2e": spread(outcome.e2e[which]),
    }


def summary(outcome: Outcome, block_size: int) -> dict[str, Any]:
    """All figures of a replay: seconds, tokens, shares from 0 to 1.

    Throughput is over the time to the last token. `hit_rate` is cached tokens / prompt tokens, and
    `block_hit_rate` cached blocks / blocks that a cache could have had: whole ones, the last token aside.
    `kv_usage` is weighted by time; a rank without a step does not count.
    """
    done = outcome.completed
    prompts, outputs = outcome.prompts[done], outcome.outputs[done]
    seconds = float(np.nanmax(outcome.finished)) if done.any() else float("nan")
    classes = np.unique(outcome.priorities).tolist()
    return {
        "requests": int(done.sum()),
        "refused": outcome.refused,
        **latencies(outcome, done),
        "classes": {
            str(priority): latencies(outcome, done & (outcome.priorities == priority)) for priority in classes
        },
        "seconds": seconds,
        "requests_per_second": int(done.sum()) / seconds,
        "prompt_tokens_per_second": int(prompts.sum()) / seconds,
        "output_tokens_per_second": int(outputs.sum()) / seconds,
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
        "blocks_copied_out": outcome.copied_out,
        "blocks_copied_in": outcome.copied_in,
        "hit_rate": float(outcome.cached.sum() / max(prompts.sum(), 1)),
        "block_hit_rate": float(
            (outcome.cached // block_size).sum() / max(((prompts - 1) // block_size).sum(), 1)
        ),
        "kv_usage": {
            "mean": outcome.usage_seconds / outcome.busy_seconds if outcome.busy_seconds else float("nan"),
            "peak": outcome.peak_usage,
        },
    }


def table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column a run, one line a figure; printed, it is Markdown."""
    grid = Table("", *summaries, box=MARKDOWN)
    grid.columns[0].no_wrap = True
    for column in grid.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for label, show in _lines(next(iter(summaries.values()))["classes"]):
        grid.add_row(label, *(show(figures) for figures in summaries.values()))
    return grid


_Show = Callable[[Mapping[str, Any]], str]


def _lines(classes: Iterable[str]) -> Iterator[tuple[str, _Show]]:
    """The labels of the lines, and how each takes its cell from a summary."""
    for measure, scale, unit in (("ttft", 1, "s"), ("tpot", 1000, "ms"), ("e2e", 1, "s")):
        for name in ("mean", *(f"p{percent}" for percent in _PERCENTILES)):
            yield f"{measure.upper()} {name}, {unit}", _number((measure, name), scale)
    if len(list(classes)) > 1:
        for measure, name in (("ttft", "mean"), ("ttft", "p50"), ("ttft", "p99"), ("e2e", "mean")):
            for priority in classes:
                path = ("classes", priority, measure, name)
                yield f"{measure.upper()} {name} of class {priority}, s", _number(path)
    yield "requests a second", _number(("requests_per_second",))
    yield "prompt tokens a second", lambda figures: f"{figures['prompt_tokens_per_second']:,.0f}"
    yield "output tokens a second", lambda figures: f"{figures['output_tokens_per_second']:,.0f}"
    yield "until the last token, s", lambda figures: f"{figures['seconds']:,.0f}"
    for label, key in (
        ("requests completed", "requests"),
        ("requests refused", "refused"),
        ("preemptions", "preemptions"),
        ("blocks to the host", "blocks_copied_out"),
        ("blocks from the host", "blocks_copied_in"),
        ("steps", "steps"),
    ):
        yield label, lambda figures, key=key: f"{figures[key]:,}"
    yield "prefix hits, share of tokens", lambda figures: f"{figures['hit_rate']:.2%}"
    yield "prefix hits, share of blocks", lambda figures: f"{figures['block_hit_rate']:.2%}"
    yield "KV blocks held, mean", lambda figures: f"{figures['kv_usage']['mean']:.1%}"
    yield "KV blocks held, peak", lambda figures: f"{figures['kv_usage']['peak']:.1%}"


def _number(path: Sequence[str], scale: float = 1) -> _Show:
    """Shows what lies under `path` in a summary, times `scale`."""

    def show(figures: Mapping[str, Any]) -> str:
        value: Any = figures
        for key in path:
            value = value[key]
        return f"{scale * value:,.2f}"

    return show


def draw(outcomes: Mapping[str, Outcome], path: Path, title: str) -> None:
    """A PNG: how TTFT and TPOT are distributed, and requests waiting and KV blocks held over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (ttft, tpot), (waiting, usage) = figure.subplots(2, 2)
    for run, outcome in outcomes.items():
        _draw_shares(ttft, outcome.ttft, run)
        _draw_shares(tpot, 1000 * outcome.tpot, run)
        moments = np.array(outcome.series)
        waiting.plot(moments[:, 0], moments[:, 2], label=run)
        usage.plot(moments[:, 0], 100 * moments[:, 3], label=run)
    _label(ttft, "time to first token, s", "share of requests, %", log=True)
    _label(tpot, "time per output token, ms", "share of requests, %", log=True)
    _label(waiting, "time, s", "requests waiting")
    _label(usage, "time, s", "KV blocks held, %")
    figure.savefig(path, dpi=120)


def _draw_shares(axes: Any, values: NDArray[np.float64], run: str) -> None:
    known = np.sort(values[~np.isnan(values)])
    axes.plot(known, 100 * np.arange(1, known.size + 1) / max(known.size, 1), label=run)


def _label(axes: Any, x: str, y: str, *, log: bool = False) -> None:
    if log:
        axes.set_xscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend()
