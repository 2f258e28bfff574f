"""Time a token under several settings of compute threads, on a quiet machine and beside busy programs.

    uv run python tools/bench/threads.py [--model demo] [--rounds 8] [--beside 1] [--spins 100 1000 10000]

Each setting has a process of its own with the model loaded; they take turns, quiet and busy, and a process
sleeps while others are measured. A machine's speed changes with time, so compare settings by the ratios
within a round: printed are each setting's median time a token, and the median over rounds of its ratio to
`spin`, the runtime's own way (a thread a core, which spins for milliseconds).
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_BUSY = "while True: pass"
_SERVE = """
import sys, time
from enginecore import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=512, max_num_seqs=4)
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    params = SamplingParams(temperature=0, max_tokens=int(line), ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [3 + (7 * i + number) % 300 for i in range(8)]}
    start = time.perf_counter()
    llm.generate([prompt], params)
    print(time.perf_counter() - start, flush=True)
"""


def settings(spins: Iterable[int], threads: int) -> dict[str, dict[str, str]]:
    """Return the variables of each setting, by its name."""
    return {
        "spin": {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "300000"},
        "passive": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"},
        "one thread": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        "octavo": {},
        **{
            f"spin {count}": {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(count)}
            for count in spins
        },
    }


class Model:
    """A process with the model loaded under one setting."""

    def __init__(self, model: str, variables: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, model],
            env=inherited | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def milliseconds(self, tokens: int) -> float:
        """Return the time a token of one request."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        return 1000 * float(self._answer()) / tokens

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the model's process has ended")
        return line


@contextmanager
def busy(count: int) -> Generator[None]:
    """Keep `count` other programs running."""
    started = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    time.sleep(0.1)
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the times of each setting, one a round, quiet and busy."""
    chosen = settings(options.spins, options.threads)
    times: dict[str, dict[str, list[float]]] = {
        name: {name: [] for name in chosen} for name in ("quiet", "busy")
    }
    with ExitStack() as stack:
        models = {}
        for name, variables in chosen.items():
            models[name] = Model(options.model, variables)
            stack.callback(models[name].close)
        for model in models.values():
            model.milliseconds(options.tokens)
        for number in range(options.rounds):
            order = list(chosen)[number % len(chosen) :] + list(chosen)[: number % len(chosen)]
            for kind, others in (("quiet", 0), ("busy", options.beside)):
                with busy(others):
                    for name in order:
                        times[kind][name].append(models[name].milliseconds(options.tokens))
    return times


def report(times: dict[str, dict[str, list[float]]]) -> None:
    """Print a line for each setting."""
    print(f"{'':12}{'quiet ms':>10}{'to spin':>9}{'busy ms':>10}{'to spin':>9}{'to best':>9}")
    best = min(statistics.median(rounds) for rounds in times["busy"].values())
    for name in times["quiet"]:
        line = f"{name:12}"
        for kind in ("quiet", "busy"):
            rounds = times[kind][name]
            ratios = [own / spun for own, spun in zip(rounds, times[kind]["spin"], strict=True)]
            line += f"{statistics.median(rounds):10.1f}{statistics.median(ratios):9.2f}"
        print(line + f"{statistics.median(times['busy'][name]) / best:9.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each request")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--beside", type=int, default=1, help="other programs while busy")
    parser.add_argument("--spins", type=int, nargs="*", default=[100, 1000, 10000])
    report(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
