"""The command line of the GPU check."""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Module and function of each part, imported after TRITON_INTERPRET is settled.
PARTS = {
    "attention": ("attention", "check_attention"),
    "cache": ("ops", "check_cache"),
    "ops": ("ops", "check_ops"),
    "sampling": ("ops", "check_sampling"),
    "graph": ("graph", "check_graph"),
    "program": ("program", "check_program"),
    "engine": ("engine", "check_engine"),
    "decode": ("measure", "measure_decode"),
    "prefill": ("measure", "measure_prefill"),
    "ops_speed": ("measure", "measure_ops"),
}
ON_A_DEVICE_ONLY = ("graph", "decode", "prefill", "ops_speed")

_DESCRIPTION = """\
Check every Triton kernel and the engine on a GPU, and measure them, in less than five minutes.

The parts attention, cache, ops and sampling hold each kernel to plain float64 arithmetic (sampling to the
torch back end); graph captures a decode step in a CUDA graph and replays it; program compares and times
decode steps of the demo model with its CUDA graphs and without; engine asks that model a question; decode,
prefill and ops_speed measure, beside what the device copies and multiplies at most. The report is one JSON
document. The exit status is 1 if any check failed."""


def parser() -> argparse.ArgumentParser:
    """The options, with their defaults."""
    root = argparse.ArgumentParser(
        "gpu_check.py", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--output", type=Path, help="file to write the report to; by default stdout")
    root.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    root.add_argument(
        "--interpret",
        action="store_true",
        help="no GPU: tiny shapes in Triton's interpreter, the engine on the CPU, and nothing measured",
    )
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write the report; the exit status."""
    options = parser().parse_args(arguments)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not options.interpret and not torch.cuda.is_available():
        parser().error("torch sees no CUDA device; --interpret checks the kernels without one")
    report: dict[str, Any] = {
        "interpreted": options.interpret,
        "device": _describe_device(options.interpret),
        "versions": {name: version(name) for name in ("torch", "triton", "pagedattn", "enginecore")}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "parts": {name: _run(name, options.interpret) for name in options.parts},
    }
    report["passed"] = all(part["passed"] for part in report["parts"].values())
    text = json.dumps(report, indent=2)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")
    return 0 if report["passed"] else 1


def _run(name: str, interpret: bool) -> dict[str, Any]:
    """One part's entry in the report. What it raises is recorded, and the next part runs."""
    if interpret and name in ON_A_DEVICE_ONLY:
        return {"passed": True, "skipped": "needs a GPU"}
    module, function = PARTS[name]
    began = time.perf_counter()
    try:
        found = getattr(import_module(f"gpu_check.{module}"), function)(interpret)
        found = {"passed": all(check["passed"] for check in found.get("checks", {}).values())} | found
    except Exception:
        found = {"passed": False, "error": traceback.format_exc()}
    seconds = round(time.perf_counter() - began, 1)
    print(f"{name}: {'passed' if found['passed'] else 'FAILED'} in {seconds} s", file=sys.stderr, flush=True)
    return found | {"seconds": seconds}


def _describe_device(interpret: bool) -> dict[str, Any]:
    import torch

    if interpret:
        return {"name": "Triton's interpreter"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


if __name__ == "__main__":
    sys.exit(main())
