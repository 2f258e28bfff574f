"""Make the virtual environments of other engines, and the models, with uv."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from compare.peers import ENVIRONMENTS, Environment
from compare.watch import PACKAGES


def make_environments(folder: Path, names: Iterable[str], wheels: Path | None) -> list[str]:
    """Make those that are missing; return the names of those that could not be made.

    `wheels` is a folder with torch's wheels for CPUs; without it uv takes them from where PyTorch puts them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        try:
            _make(folder / name, ENVIRONMENTS[name], wheels)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    return failed


def make_models(folder: Path, models: Sequence[str], *, openvino: bool) -> None:
    """Write the models in the formats of all engines; those that are there stay."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    _module(folder / "transformers", "compare.models", folder, models)
    if openvino:
        _module(folder / "openvino", "compare.engines.openvino", folder, models)


def _make(place: Path, environment: Environment, wheels: Path | None) -> None:
    done = place / "octavo-setup"
    wanted = "\n".join(environment.requirements)
    if done.exists() and done.read_text() == wanted:
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    _uv(["venv", "--quiet", "--clear", "--python", version, str(place)], place.parent)
    install = ["pip", "install", "--python", str(place / "bin/python")]
    options = ["--find-links", str(wheels)] if wheels else ["--torch-backend", "cpu"]
    if environment.build_requirements:
        _uv([*install, *environment.build_requirements], place.parent)
        options = ["--no-deps", "--no-build-isolation"]
    if environment.excludes:
        (place / "excludes.txt").write_text("\n".join(environment.excludes))
        options += ["--excludes", str(place / "excludes.txt")]
    path = f"{place / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    variables = {"PATH": path, **environment.build_variables}
    _uv([*install, *options, *environment.requirements], place.parent, variables)
    done.write_text(wanted)


def _uv(arguments: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
    # In a folder outside the checkout: uv would apply the constraints of this workspace.
    subprocess.run(["uv", *arguments], check=True, cwd=folder, env={**os.environ, **(variables or {})})


def _module(environment: Path, module: str, folder: Path, models: Sequence[str]) -> None:
    python = environment / "bin/python"
    variables = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    subprocess.run([python, "-P", "-m", module, folder, *models], check=True, env=variables)
