"""Medians of the records, as a Markdown table and as a chart."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare.limits import Shape, bounds
from compare.peers import PEERS
from compare.tasks import Task
from compare.watch import QUIET
from compare.workloads import FULL, SHORT, WORKLOADS

Record = Mapping[str, Any]


class Column(NamedTuple):
    """One figure of a workload."""

    workload: str
    figure: str
    title: str
    scale: float = 1.0
    most_is_best: bool = False


COLUMNS = (
    Column("W1", "output_tok_s", "W1 tok/s", most_is_best=True),
    Column("W2", "output_tok_s", "W2 tok/s", most_is_best=True),
    Column("W3", "ttft_p50_ms", "W3 TTFT ms"),
    Column("W3", "tpot_p50_ms", "W3 TPOT ms"),
    Column("W4-burst", "output_tok_s", "W4 at once tok/s", most_is_best=True),
    Column("W4-burst", "ttft_p50_ms", "W4 at once TTFT s", scale=0.001),
    Column("W4-poisson", "ttft_p50_ms", "W4 2/s TTFT ms"),
    Column("W4-poisson", "ttft_p99_ms", "W4 2/s TTFT p99 ms"),
    Column("W4-poisson", "tpot_p50_ms", "W4 2/s TPOT ms"),
)
LIMIT = "the machine's limit (not quantised)"
KEYS = ("peer", "model", "dtype", "workload", "round")
"""Of a record: those that say which one it is."""


class Cell(NamedTuple):
    """A figure over the rounds."""

    median: float
    least: float
    most: float
    noisy: bool
    """Whether it is of rounds in which others used the machine: quiet ones go before, if there are any."""


def settings_of(records: Iterable[Record]) -> list[tuple[str, str]]:
    """The models and types that were measured, in order."""
    return list(dict.fromkeys((record["model"], record["dtype"]) for record in records))


def peers_of(records: Iterable[Record]) -> list[str]:
    """The engines that were measured, in the order of `PEERS`."""
    seen = {record["peer"] for record in records}
    return [name for name in PEERS if name in seen]


def is_noisy(record: Record) -> bool:
    """Whether other processes used too much of the machine while the record was made."""
    return record["others_cores"] > QUIET


def summarise(records: Sequence[Record], figure: str) -> Cell | None:
    """Return the median of a figure; None if no record has it."""
    having = [record for record in records if figure in record]
    quiet = [record for record in having if not is_noisy(record)]
    values = [record[figure] for record in quiet or having]
    if not values:
        return None
    return Cell(statistics.median(values), min(values), max(values), noisy=not quiet)


def tables(document: Mapping[str, Any], *, spread: bool = False) -> str:
    """Return a Markdown table for each model and type; `spread`: with the least and most of the rounds."""
    records: list[Record] = document["records"]
    parts = []
    for model, dtype in settings_of(records):
        own = [record for record in records if (record["model"], record["dtype"]) == (model, dtype)]
        parts.append(
            f"{model} ({document['models'][model]['title']}), {dtype}:\n\n{_table(own, document, spread)}"
        )
    parts += [_machine(document), _versions(document)]
    if agreement := _agreement(records):
        parts.append(agreement)
    if any(is_noisy(record) for record in records):
        parts.append(
            f"\\* Measured while other processes used more than {QUIET} cores. "
            "Such rounds are left out where there are others."
        )
    for failure in document["failures"]:
        parts.append("Failed: " + " ".join(str(failure[key]) for key in KEYS) + ".")
    return "\n\n".join(parts) + "\n"


def _table(records: Sequence[Record], document: Mapping[str, Any], spread: bool) -> str:
    measured = {record["workload"] for record in records}
    columns = [column for column in COLUMNS if column.workload in measured]
    more = ["ready s", "server ready s", "memory GiB", "others' cores"]
    heads = ["", *(column.title for column in columns), *more]
    rows = [heads, ["---"] * len(heads)]
    for peer in peers_of(records):
        own = [record for record in records if record["peer"] == peer]
        cells = [
            summarise([record for record in own if record["workload"] == column.workload], column.figure)
            for column in columns
        ]
        row = [_shown(cell, column.scale, spread) for cell, column in zip(cells, columns)]
        for server in (False, True):
            starts = [record for record in own if _used_server(record) == server]
            row.append(_shown(summarise(starts, "startup_s"), 1, spread))
        row.append(f"{max(record['resident_mib'] for record in own) / 1024:.1f}")
        row.append(f"{max(record['others_cores'] for record in own):.2f}")
        rows.append([peer, *row])
    limit = limits_of(document, records[0]["model"], records[0]["dtype"])
    row = [
        number(limit[column.workload, column.figure] * column.scale)
        if (column.workload, column.figure) in limit
        else ""
        for column in columns
    ]
    rows.append([LIMIT, *row, *[""] * len(more)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def limits_of(document: Mapping[str, Any], model: str, dtype: str) -> dict[tuple[str, str], float]:
    """Return the roofline of each workload and figure that has one."""
    rates = document["machine"].get("limits")
    if rates is None:
        return {}
    shape = Shape(**document["models"][model]["shape"])
    size = SHORT if document["short"] else FULL
    found = {}
    for name in ("W1", "W2", "W3", "W4-burst"):
        requests = WORKLOADS[name].requests(0, size)
        figures = bounds(shape, requests, dtype, rates["read_gb_s"], rates[f"{dtype}_gflop_s"])
        found |= {(name, figure): value for figure, value in figures.items()}
    return found


def number(value: float) -> str:
    """Show three digits."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _used_server(record: Record) -> bool:
    return PEERS[record["peer"]].uses_server(WORKLOADS[record["workload"]])


def _shown(cell: Cell | None, scale: float, spread: bool) -> str:
    if cell is None:
        return ""
    text = number(cell.median * scale)
    if spread and cell.least != cell.most:
        text += f" ({number(cell.least * scale)}–{number(cell.most * scale)})"
    return text + ("\\*" if cell.noisy else "")


def _machine(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    text = f"Machine: {machine['processor']}, {machine['threads']} threads"
    if rates := machine.get("limits"):
        text += (
            f"; it reads {rates['read_gb_s']:.1f} GB/s and multiplies matrices of 2048 × 2048 at "
            f"{rates['bf16_gflop_s']:.0f} GFLOP/s in bf16 and {rates['fp32_gflop_s']:.0f} in fp32"
        )
        if is_noisy(rates):
            text += " (measured while others used it)"
    return text + (". Shortened workloads." if document["short"] else ".")


def _versions(document: Mapping[str, Any]) -> str:
    found = [f"{PEERS[each['peer']].distribution} {each['version']}" for each in document["records"]]
    return "Versions: " + ", ".join(dict.fromkeys(found)) + "."


def _agreement(records: Sequence[Record]) -> str:
    """Say how many first tokens each engine has in common with transformers, where both ran in fp32."""
    lines = []
    for model in dict.fromkeys(record["model"] for record in records):
        answers = {
            record["peer"]: record["tokens"]
            for record in records
            if (record["model"], record["dtype"]) == (model, "fp32") and "tokens" in record
        }
        reference = answers.pop("transformers", None)
        if reference and answers:
            shown = ", ".join(f"{peer} {common_start(reference, tokens)}" for peer, tokens in answers.items())
            lines.append(
                f"First tokens equal to transformers' in fp32, of {len(reference)}, {model}: {shown}."
            )
    return "\n".join(lines)


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first elements are equal."""
    count = 0
    for left, right in zip(one, other):
        if left != right:
            break
        count += 1
    return count


def is_done(task: Task, records: Iterable[Record]) -> bool:
    """Whether there is a record of `task` that was made on a quiet machine."""
    wanted = [getattr(task, key) for key in KEYS]
    return any(not is_noisy(each) and [each[key] for key in KEYS] == wanted for each in records)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG: a row for each model and type; medians as bars, rounds as points, limits as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records: list[Record] = document["records"]
    measured = {record["workload"] for record in records}
    columns = [column for column in COLUMNS if column.workload in measured]
    settings, peers = settings_of(records), peers_of(records)
    size = (2 + 2.6 * len(columns), 1 + (0.8 + 0.32 * len(peers)) * len(settings))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(settings), len(columns), squeeze=False)
    for (model, dtype), line in zip(settings, grid):
        limit = limits_of(document, model, dtype)
        line[0].set_ylabel(f"{model} {dtype}")
        for column, axes in zip(columns, line):
            own = [
                record
                for record in records
                if (record["model"], record["dtype"], record["workload"]) == (model, dtype, column.workload)
            ]
            bound = limit.get((column.workload, column.figure))
            _draw_column(axes, own, column, peers, None if bound is None else bound * column.scale)
        for axes in line[1:]:
            axes.set_yticklabels([])
    figure.savefig(path, dpi=120)


def _draw_column(
    axes: Any, records: Sequence[Record], column: Column, peers: Sequence[str], bound: float | None
) -> None:
    for place, peer in enumerate(peers):
        own = [record for record in records if record["peer"] == peer and column.figure in record]
        cell = summarise(own, column.figure)
        if cell is None:
            continue
        colour = "tab:blue" if peer.startswith("octavo") else "tab:gray"
        axes.barh(place, cell.median * column.scale, color=colour, alpha=0.4 if cell.noisy else 0.8)
        axes.text(cell.median * column.scale, place, f" {number(cell.median * column.scale)}", va="center")
        axes.plot([record[column.figure] * column.scale for record in own], [place] * len(own), "k.", ms=3)
    if bound is not None:
        axes.axvline(bound, color="tab:red", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(peers)), peers)
    axes.set_ylim(len(peers) - 0.5, -0.5)
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.set_title(column.title + (" (more is better)" if column.most_is_best else ""), fontsize=9)
