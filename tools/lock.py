"""Keep the committed uv.lock free of index addresses, and the working tree's filled in.

    python3 tools/lock.py setup       once in a clone: git's filters, and the addresses in uv.lock
    python3 tools/lock.py strip  < full.lock > committed.lock    git's clean filter
    python3 tools/lock.py fill   < committed.lock > full.lock    git's smudge filter
    python3 tools/lock.py check       CI: the committed lock is host-free and current

A lock as uv writes it names the registry and the host of every file. The committed form names
`https://index.invalid` instead and widens `requires-python` a little, so that uv on a fresh clone sees the
lock as out of date, keeps every pinned version, and fills in the addresses of whatever index it uses.

Git takes a file for changed if its size is not the one that git wrote, whatever the clean filter makes of
it. So git itself has to write the form that uv would: `fill` has uv do it, and hands the lock on as it is
where uv is missing or has no index.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

INDEX = "https://index.invalid"
_REGISTRY = re.compile(r'registry = "[^"]*"')
_URL = re.compile(r'url = "(?:[^"]*/)?([^"/]+)"')
_REQUIRES = re.compile(r'^requires-python = "(>=[0-9.]+)[^"]*"$', re.MULTILINE)
_ROOT = Path(__file__).resolve().parent.parent
_HOST = re.compile(r'https?://([^/"\s]+)')


def strip(lock: str) -> str:
    """Return `lock` with every address replaced; stripping twice changes nothing."""
    lock = _REGISTRY.sub(f'registry = "{INDEX}/simple"', lock)
    lock = _URL.sub(rf'url = "{INDEX}/\1"', lock)
    return _REQUIRES.sub(r'requires-python = "\1"', lock, count=1)


def hosts(lock: str) -> set[str]:
    """Return the hosts that `lock` names, other than the placeholder."""
    return {host for host in _HOST.findall(lock) if host != "index.invalid"}


def fill(lock: str, root: Path) -> str:
    """Return `lock` with the addresses of uv's index for the projects of the checkout `root`.

    It is `lock` unchanged where uv cannot tell them, or would change more than addresses.
    """
    if shutil.which("uv") is None:
        return lock
    filled = _locked(lock, root)
    return filled if filled is not None and strip(filled) == lock else lock


def _locked(lock: str, root: Path) -> str | None:
    """Return what `uv lock` makes of `lock` in a copy of the projects in `root`; None if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        for project in sorted([root / "pyproject.toml", *root.glob("*/*/pyproject.toml")]):
            copy = Path(scratch) / project.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(project.read_text())
        (Path(scratch) / "uv.lock").write_text(lock)
        done = subprocess.run(["uv", "lock", "--quiet"], cwd=scratch, check=False)
        return (Path(scratch) / "uv.lock").read_text() if done.returncode == 0 else None


def setup() -> None:
    """Configure git's filters of this clone, and let the working tree's uv.lock be what they make of it."""
    filters = {
        "clean": "python3 tools/lock.py strip",
        # A checkout of a commit from before `fill` gets the lock as it is.
        "smudge": "python3 tools/lock.py fill || cat",
        "required": "true",
    }
    for key, value in filters.items():
        _git("config", f"filter.hostfree-lock.{key}", value)
    path = _ROOT / "uv.lock"
    lock = path.read_text()
    staged = _git("show", ":uv.lock")
    if strip(lock) == staged:
        path.write_text(fill(staged, _ROOT))
        _git("add", "uv.lock")  # the same content; git learns the size


def check() -> list[str]:
    """Return what is wrong with the lock in HEAD; nothing when it is host-free and up to date."""
    committed = _git("show", "HEAD:uv.lock")
    faults = [f"uv.lock in HEAD names the host {host}" for host in sorted(hosts(committed))]
    current = _locked(committed, _ROOT)
    if current is None:
        faults.append("uv lock fails with the uv.lock in HEAD")
    elif strip(current) != committed:
        faults.append("uv.lock in HEAD is not what `uv lock` gives: run `uv lock` and commit the result")
    return faults


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> int:
    match sys.argv[1:]:
        case ["strip"]:
            sys.stdout.write(strip(sys.stdin.read()))
            return 0
        case ["fill"]:
            sys.stdout.write(fill(sys.stdin.read(), _ROOT))
            return 0
        case ["setup"]:
            setup()
            return 0
        case ["check"]:
            faults = check()
            print("\n".join(faults) or "uv.lock: host-free and up to date")
            return 1 if faults else 0
    print("usage: lock.py setup | strip | fill | check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
