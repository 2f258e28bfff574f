"""The command line of the simulator."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from batchsched import Fcfs, Limits, Policy, Preemption, Priority, Recompute, ShortestFirst, Swap, TimeSlice
from enginecore.core.policies import load_policy
from enginecore.errors import ConfigError
from simulate import report, traces
from simulate.cluster import Cluster
from simulate.device import DEVICES
from simulate.outcome import Outcome
from simulate.rank import Setup

POLICIES = ("fcfs", "priority", "time-slice", "shortest-first")
PREEMPTIONS: dict[str, Callable[[], Preemption]] = {"recompute": Recompute, "swap": Swap}

_DESCRIPTION = """\
Replay a trace of requests through the scheduler and the block allocator, on a device that is a formula.

Every step is planned, and every KV block is given out, by the same code as in the engine. Only the time that
a step takes is made up: see simulate/device.py for the formula and what its numbers assume. Several policies
are replayed one after the other and compared."""


def policy_factory(name: str, options: argparse.Namespace) -> Callable[[], Policy]:
    """Return the factory of the policy of that name."""
    match name:
        case "fcfs":
            return Fcfs
        case "priority":
            return lambda: Priority(options.priority_ageing)
        case "time-slice":
            return lambda: TimeSlice(options.quantum)
        case "shortest-first":
            return lambda: ShortestFirst(options.work_ageing)
    return lambda: load_policy(name)


def _policy(text: str) -> str:
    if text in POLICIES:
        return text
    try:
        load_policy(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(
            f"{error} (policies: {', '.join(POLICIES)}, or module:Class)"
        ) from error
    return text


def parser() -> argparse.ArgumentParser:
    """The options, with their defaults."""
    root = argparse.ArgumentParser(
        "simulate.py", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    traffic = root.add_argument_group("traffic")
    source = traffic.add_mutually_exclusive_group(required=True)
    source.add_argument("name", nargs="?", choices=traces.FILES, help="a public trace")
    source.add_argument("--trace", type=Path, metavar="PATH", help="any file in one of the two formats")
    traffic.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="folder of the whole public traces (default: the excerpts in tests/data/traces)",
    )
    traffic.add_argument("--rate", type=_positive_float, default=1.0, help="times as many requests a second")
    traffic.add_argument("--duration", type=_positive_float, metavar="S", help="the first S seconds only")
    traffic.add_argument("--max-output", type=_positive, metavar="N", help="cut outputs to N tokens")
    traffic.add_argument(
        "--whole-blocks",
        action="store_true",
        help="fill prompts up to whole 512-token blocks and one token, as Mooncake counts them",
    )
    traffic.add_argument("--classes", type=_positive, default=1, help="priorities, dealt out in turn")
    machine = root.add_argument_group("machine")
    machine.add_argument("--device", choices=DEVICES, default="h100-8b")
    machine.add_argument("--ranks", type=_ranks, default=1, help="data-parallel ranks, 1 to 64")
    machine.add_argument("--affinity", action="store_true", help="route by cached prefixes too")
    machine.add_argument(
        "--report-interval",
        type=_interval,
        default=0.05,
        metavar="S",
        help="between reports of loads",
    )
    machine.add_argument("--block-size", type=_positive, help="tokens; 512 with hash ids, else 16")
    machine.add_argument(
        "--blocks", type=_blocks, metavar="N", help="KV blocks a rank, or 'unlimited'; else the device's"
    )
    machine.add_argument("--host-blocks", type=_natural, default=0, metavar="N", help="host tier, a rank")
    machine.add_argument("--no-prefix-caching", action="store_true")
    scheduling = root.add_argument_group("scheduling")
    scheduling.add_argument(
        "--policy",
        nargs="+",
        type=_policy,
        default=["fcfs"],
        metavar="POLICY",
        help=f"one run each: {', '.join(POLICIES)}, or module:Class",
    )
    scheduling.add_argument("--preemption", choices=PREEMPTIONS, default="recompute")
    scheduling.add_argument("--max-num-seqs", type=_positive, default=256)
    scheduling.add_argument("--max-num-batched-tokens", type=_positive, default=2048, help="a step's budget")
    scheduling.add_argument("--long-prefill-token-threshold", type=_natural, default=0)
    scheduling.add_argument("--quantum", type=_positive, default=128, help="time-slice: tokens a turn")
    scheduling.add_argument("--priority-ageing", type=_positive_float, default=60.0, help="seconds a level")
    scheduling.add_argument("--work-ageing", type=_positive_float, default=100.0, help="tokens a second")
    output = root.add_argument_group("output")
    output.add_argument("--png", type=Path, metavar="PATH", help="draw the runs (needs matplotlib)")
    output.add_argument("--json", type=Path, metavar="PATH", help="write all figures")
    return root


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _interval(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a positive number")
    return value


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 64")
    return value


def _blocks(text: str) -> int:
    return 0 if text == "unlimited" else _positive(text)


def load_trace(options: argparse.Namespace) -> traces.Trace:
    """Load the trace that the options name. Raises ValueError or OSError."""
    trace = traces.load(options.trace or traces.path_of(options.name, options.folder))
    if options.duration:
        trace = trace.first(options.duration)
    if options.max_output:
        trace = trace.cut(options.max_output)
    if options.whole_blocks:
        trace = trace.in_whole_blocks()
    return trace.faster(options.rate)


def setup(options: argparse.Namespace, trace: traces.Trace, policy: str) -> Setup:
    """Return the setup of every rank."""
    block_size = options.block_size or (16 if trace.hash_ids is None else traces.HASH_BLOCK)
    device = DEVICES[options.device]
    num_blocks = options.blocks
    if num_blocks is None:
        num_blocks = device.kv_tokens // block_size
    elif num_blocks == 0:
        # Enough for every token there will be, none shared.
        num_blocks = int((-(-(trace.prompts + trace.outputs) // block_size)).sum())
    return Setup(
        device=device,
        limits=Limits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=trace.longest,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        policy=policy_factory(policy, options),
        preemption=PREEMPTIONS[options.preemption],
        host_blocks=options.host_blocks,
        prefix_caching=not options.no_prefix_caching,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    command = parser()
    options = command.parse_args(arguments)
    if options.affinity and options.no_prefix_caching:
        command.error("--affinity follows cached prefixes, and --no-prefix-caching leaves none")
    if options.preemption == "swap" and not options.host_blocks:
        command.error("--preemption swap needs somewhere to swap to: give --host-blocks")
    try:
        trace = load_trace(options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    title = f"{trace.name}, {len(trace):,} requests at {options.rate:g}×, {options.ranks} × {options.device}"
    outcomes: dict[str, Outcome] = {}
    summaries = {}
    for policy in options.policy:
        began = time.perf_counter()
        ranks = setup(options, trace, policy)
        cluster = Cluster(
            trace,
            ranks,
            ranks=options.ranks,
            affinity=options.affinity,
            report_interval=options.report_interval,
            classes=options.classes,
        )
        outcomes[policy] = cluster.replay()
        summaries[policy] = report.summary(outcomes[policy], ranks.block_size)
        print(f"{policy}: simulated in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    # As wide as the table is, so that what is piped into a file is not cut.
    Console(width=200).print(title, report.table(summaries), sep="\n", highlight=False)
    if options.json:
        options.json.write_text(json.dumps({"trace": title, "runs": summaries}, indent=2) + "\n")
    if options.png:
        report.draw(outcomes, options.png, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
