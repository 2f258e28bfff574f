"""What the pyproject.toml of each package and app states, and that its README says how to install it."""

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("*/*/pyproject.toml"))
PROJECTS = {
    project["name"]: (folder, project)
    for folder in FOLDERS
    for project in [tomllib.loads((folder / "pyproject.toml").read_text())["project"]]
}


def test_all_are_found():
    libraries = {"kvblocks", "batchsched", "pagedattn", "collectives"}
    assert set(PROJECTS) == {*libraries, "enginecore", "octavo-coordinator", "octavo-offline", "octavo-serve"}


@pytest.mark.parametrize("name", PROJECTS)
def test_siblings_are_needed_in_their_own_version(name):
    _, project = PROJECTS[name]
    needed = [Requirement(line) for line in project["dependencies"]]
    siblings = {line.name: str(line.specifier) for line in needed if line.name in PROJECTS}
    assert siblings == {sibling: f"=={PROJECTS[sibling][1]['version']}" for sibling in siblings}
    assert bool(siblings) == (name in {"enginecore", "octavo-coordinator", "octavo-offline", "octavo-serve"})


@pytest.mark.parametrize("name", PROJECTS)
def test_all_that_is_needed_is_imported(name):
    folder, project = PROJECTS[name]
    imported = {"httptools", "websockets"} if name == "octavo-serve" else set()  # uvicorn imports them
    for path in folder.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    owners = packages_distributions()
    found = {canonicalize_name(owner) for module in imported for owner in (module, *owners.get(module, ()))}
    assert {canonicalize_name(Requirement(line).name) for line in project["dependencies"]} <= found


@pytest.mark.parametrize("name", PROJECTS)
def test_no_package_asks_for_nccl_unless_told_to(name):
    _, project = PROJECTS[name]
    assert not [line for line in project["dependencies"] if line.startswith("nvidia")]


@pytest.mark.parametrize("name", PROJECTS)
def test_the_licence_is_the_repositorys(name):
    folder, project = PROJECTS[name]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert project["license-files"] == ["LICENSE"]
    assert project["authors"] == [{"name": "Octavo contributors"}]
    assert "urls" not in project and project["classifiers"]


@pytest.mark.parametrize("name", PROJECTS)
def test_the_readme_says_how_to_install_it_alone(name):
    folder, _ = PROJECTS[name]
    text = (folder / "README.md").read_text()
    section = re.search(r"^## Install\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    inside = folder.relative_to(ROOT).as_posix()
    for way in (f"path/to/octavo/{inside}", f"#subdirectory={inside}", f"--find-links dist {name}"):
        assert way in section[1]
