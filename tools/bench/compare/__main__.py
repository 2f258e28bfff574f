"""The command line of the comparison."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compare import environments, limits, report
from compare.limits import Shape
from compare.peers import DTYPES, ENVIRONMENTS, MODELS, PEERS, choose
from compare.tasks import Task, checkpoint_folder, plan
from compare.watch import QUIET, Usage, make_record, python_of, wait_until_quiet
from compare.workloads import WORKLOADS

_DESCRIPTION = f"""\
Measure Octavo beside other engines on this machine: the same random weights, requests and number of threads.

  setup   make environments and models in a folder (2 GB for M1, 7 GB for M2, 5 GB of packages; llama.cpp is
          compiled, for some 15 minutes)
  run     measure: in each round the engines take turns at each workload; every record has a process of its
          own. Records are written as they are made; the same command goes on where it was stopped, and
          measures again what was measured while other programs used more than {QUIET} cores.
  report  print the table, and draw the chart

Engines: {", ".join(PEERS)}
Models: {", ".join(f"{name} ({title})" for name, title in MODELS.items())}
Workloads: {", ".join(f"{each.name} ({each.title})" for each in WORKLOADS.values())}
llama.cpp runs all of them through its server; openvino and transformers have none that takes token ids."""


def parser() -> argparse.ArgumentParser:
    """The options, with their defaults."""
    root = argparse.ArgumentParser(
        "compare.py", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = root.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="make environments and models")
    setup.add_argument("folder", type=Path, help="outside this checkout")
    setup.add_argument("environments", nargs="*", metavar="ENGINE", help=f"default: {' '.join(ENVIRONMENTS)}")
    setup.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    setup.add_argument(
        "--wheels",
        type=Path,
        help="folder with torch's wheel for CPUs, where PyTorch's index is out of reach",
    )
    run = commands.add_parser("run", help="measure")
    run.add_argument("folder", type=Path)
    run.add_argument("--json", type=Path, required=True, help="file for the records")
    run.add_argument("--peers", nargs="+", default=list(PEERS), metavar="ENGINE")
    run.add_argument("--models", nargs="+", default=["M1"], metavar="MODEL")
    run.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="WORKLOAD")
    run.add_argument("--dtype", nargs="+", default=["bf16"], metavar="TYPE", help=" or ".join(DTYPES))
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run.add_argument("--short", action="store_true", help="8 requests in place of 64, outputs of 16 at most")
    run.add_argument(
        "--quiet", type=float, default=60, metavar="S", help="wait so long for other programs to be quiet"
    )
    run.add_argument("--limit", type=float, default=900, metavar="S", help="give up a record after so long")
    shown = commands.add_parser("report", help="print the table, draw the chart")
    shown.add_argument("json", type=Path)
    shown.add_argument("--png", type=Path, help="file for the chart")
    shown.add_argument("--spread", action="store_true", help="show the least and the most of the rounds too")
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    options = parser().parse_args(arguments)
    try:
        return {"setup": _setup, "run": _run, "report": _report}[options.command](options)
    except (OSError, ValueError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _setup(options: argparse.Namespace) -> int:
    names = choose(options.environments or ENVIRONMENTS, ENVIRONMENTS, "environment")
    models = choose(options.models, MODELS, "model")
    folder = options.folder.resolve()
    # The models are written in transformers' environment.
    names = list(dict.fromkeys(["transformers", *names]))
    failed = environments.make_environments(folder, names, options.wheels)
    if "transformers" not in failed:
        openvino = "openvino" in names and "openvino" not in failed
        environments.make_models(folder, models, openvino=openvino)
    if failed:
        print(f"not installed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(options: argparse.Namespace) -> int:
    folder = options.folder.resolve()
    peers = choose(options.peers, PEERS, "engine")
    tasks = plan(
        peers,
        choose(options.models, MODELS, "model"),
        choose(options.dtype, DTYPES, "type"),
        choose(options.workloads, WORKLOADS, "workload"),
        options.rounds,
        threads=options.threads,
        folder=str(folder),
        short=options.short,
    )
    _check_set_up(folder, tasks)
    document = _document(options, folder, tasks)
    log = options.json.with_suffix(".log")
    failures = 0
    for place, task in enumerate(tasks, 1):
        if report.is_done(task, document["records"]):
            continue
        named = {key: getattr(task, key) for key in report.KEYS}
        label = f"{place}/{len(tasks)} {' '.join(map(str, named.values()))}"
        # A record of a noisy time, or a failure, is made again.
        for kind in ("records", "failures"):
            document[kind] = [each for each in document[kind] if not named.items() <= each.items()]
        start = time.monotonic()
        try:
            figures = make_record(task, log=log, limit=options.limit, quiet=options.quiet)
        except RuntimeError as error:
            failures += 1
            print(f"{label}: {error}", flush=True)
            document["failures"].append({**named, "error": str(error)})
        else:
            if PEERS[task.peer].environment is None:
                figures["version"] += _commit()
            document["records"].append({**named, **figures})
            shown = {key: value for key, value in figures.items() if isinstance(value, float)}
            text = " ".join(f"{key}={report.number(value)}" for key, value in shown.items())
            print(f"{label} ({time.monotonic() - start:.0f} s): {text}", flush=True)
        _write(document, options.json)
    if document["records"]:
        print("\n" + report.tables(document))
    return 1 if failures else 0


def _report(options: argparse.Namespace) -> int:
    document = json.loads(options.json.read_text())
    print(report.tables(document, spread=options.spread), end="")
    if options.png:
        report.draw(document, options.png)
    return 0


def _check_set_up(folder: Path, tasks: Sequence[Task]) -> None:
    """Refuse to begin if an environment or a model is missing.

    Raises:
        ValueError: one is.
    """
    missing = {PEERS[task.peer].environment for task in tasks if not Path(python_of(task)).exists()}
    models = {task.model for task in tasks if not task.checkpoint.exists()}
    if missing or models:
        names = ", ".join(sorted(filter(None, missing)) + sorted(models))
        raise ValueError(f"{folder} has no {names}: make them with `compare.py setup`")


def _document(options: argparse.Namespace, folder: Path, tasks: Sequence[Task]) -> dict[str, Any]:
    """Read what was measured before, or begin; the machine's limits are measured first.

    Raises:
        ValueError: the file has records of other settings.
    """
    document: dict[str, Any]
    if options.json.exists():
        document = json.loads(options.json.read_text())
        found = (document["machine"]["threads"], document["short"])
        if found != (options.threads, options.short):
            raise ValueError(f"{options.json} was measured with other --threads or --short")
    else:
        machine = {"processor": _processor(), "threads": options.threads}
        document = {"machine": machine, "short": options.short, "models": {}, "records": [], "failures": []}
    if shutil.which("cc"):
        _measure_limits(document["machine"], options.quiet)
    for model in dict.fromkeys(task.model for task in tasks):
        config = json.loads((checkpoint_folder(folder, model) / "config.json").read_text())
        document["models"][model] = {"title": MODELS[model], "shape": asdict(Shape.of(config))}
    return document


def _measure_limits(machine: dict[str, Any], quiet: float) -> None:
    """Measure what the machine can do, unless that was done on a quiet machine; keep the best of each."""
    found = machine.get("limits", {})
    if found.get("others_cores", QUIET + 1) <= QUIET:
        return
    wait_until_quiet(quiet)
    before = Usage.now()
    rates = limits.measure(machine["threads"])
    machine["limits"] = {name: max(rate, found.get(name, 0.0)) for name, rate in rates.items()}
    machine["limits"]["others_cores"] = Usage.now().others_since(before)


def _write(document: dict[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1))
    partial.rename(path)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    """The commit of this checkout, as the local part of a version; empty where there is none."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True)
    return f"+{found.stdout.strip()}" if found.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
