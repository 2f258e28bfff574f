"""The status as a table for people."""

from collections.abc import Sequence

from enginecore.data_parallel.messages import RankStatus, Status

_HEADINGS = "rank", "state", "restarts", "waiting", "running", "KV cache", "tokens", "step", "steps", "wave"


def table(status: Status) -> str:
    """Return the status in lines: the coordinator, the waves, and a line a rank."""
    lines = [
        f"up for {status.uptime:,.0f} s, {status.messages:,} messages, {status.snapshots:,} snapshots",
        f"front-ends: {len(status.frontends)}",
    ]
    waves = status.waves
    if waves is not None:
        state = "one runs" if waves.running else "idle"
        lines.append(
            f"waves: {waves.ended:,} of {waves.steps:,} steps ended, {state}; "
            f"group restarts: {waves.group}; empty steps: {waves.empty:,}"
        )
    if not status.ranks:
        return "\n".join([*lines, "no ranks"])
    return "\n".join([*lines, "", *_aligned([_HEADINGS, *map(_row, status.ranks)])])


def _row(rank: RankStatus) -> Sequence[str]:
    used = 1 - rank.free_blocks / rank.num_blocks if rank.num_blocks else 0
    return (
        str(rank.rank),
        "ready" if rank.ready else "loading",
        str(rank.incarnation),
        f"{rank.waiting:,}",
        f"{rank.running:,}",
        f"{used:.1%}",
        f"{rank.tokens:,}",
        f"{1000 * rank.step_seconds:.1f} ms",
        f"{rank.steps:,}",
        "-" if rank.wave is None else str(rank.wave),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
