"""What another project's resolver makes of the packages, whichever torch it takes. Asks the package index."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST_MINOR = 10

pytestmark = pytest.mark.slow


def resolved(folder: Path, package: str, *others: str) -> dict[str, set[str]]:
    """Versions by name in the lock, for all platforms, of a project that needs `package` and `others`."""
    needed = ", ".join(f'"{name}"' for name in (package, *others))
    (folder / "pyproject.toml").write_text(
        f"""
[project]
name = "another"
version = "1"
requires-python = ">=3.11"
dependencies = [{needed}]

[tool.uv.sources]
{package} = {{ path = "{ROOT / "packages" / package}" }}
"""
    )
    (folder / "uv.lock").unlink(missing_ok=True)
    done = subprocess.run(["uv", "lock"], cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    versions: dict[str, set[str]] = {}
    lock = (folder / "uv.lock").read_text()
    for name, version in re.findall(r'^name = "(.+)"\nversion = "(.+)"$', lock, re.MULTILINE):
        versions.setdefault(name, set()).add(version)
    return versions


def nccl_packages(versions: dict[str, set[str]]) -> list[str]:
    return [name for name in versions if name.startswith("nvidia-nccl")]


@pytest.mark.parametrize("package", ["collectives", "enginecore"])
def test_no_torch_gets_a_second_nccl(package, tmp_path):
    newest = resolved(tmp_path, package)
    (version,) = newest["torch"]
    assert len(nccl_packages(newest)) == 1
    newest_minor = int(version.split(".")[1])
    assert newest_minor > OLDEST_MINOR
    for minor in range(OLDEST_MINOR, newest_minor):
        versions = resolved(tmp_path, package, f"torch==2.{minor}.*")
        assert len(nccl_packages(versions)) == 1, f"torch 2.{minor}"


@pytest.mark.parametrize("package", ["kvblocks", "batchsched"])
def test_the_bookkeeping_needs_numpy_alone(package, tmp_path):
    assert set(resolved(tmp_path, package)) == {"another", package, "numpy"}
