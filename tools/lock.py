"""Keep the committed uv.lock free of index addresses.

    python tools/lock.py strip  < full.lock > committed.lock    git's clean filter
    python tools/lock.py check        CI: the committed lock is host-free and current

A lock as uv writes it names the registry and the host of every file. The committed form names
`https://index.invalid` instead and widens `requires-python` a little, so that uv on a fresh clone sees the
lock as out of date, keeps every pinned version, and fills in the addresses of whatever index it uses.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

INDEX = "https://index.invalid"
_REGISTRY = re.compile(r'registry = "[^"]*"')
_URL = re.compile(r'url = "(?:[^"]*/)?([^"/]+)"')
_REQUIRES = re.compile(r'^requires-python = "(>=[0-9.]+)[^"]*"$', re.MULTILINE)
_HOST = re.compile(r'https?://([^/"\s]+)')


def strip(lock: str) -> str:
    """Return `lock` with every address replaced; stripping twice changes nothing."""
    lock = _REGISTRY.sub(f'registry = "{INDEX}/simple"', lock)
    lock = _URL.sub(rf'url = "{INDEX}/\1"', lock)
    return _REQUIRES.sub(r'requires-python = "\1"', lock, count=1)


def hosts(lock: str) -> set[str]:
    """Return the hosts that `lock` names, other than the placeholder."""
    return {host for host in _HOST.findall(lock) if host != "index.invalid"}


def check() -> list[str]:
    """Return what is wrong with the lock in HEAD; nothing when it is host-free and up to date."""
    root = Path(__file__).resolve().parent.parent
    committed = subprocess.run(
        ["git", "show", "HEAD:uv.lock"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    faults = [f"uv.lock in HEAD names the host {host}" for host in sorted(hosts(committed))]
    with tempfile.TemporaryDirectory() as scratch:
        for project in sorted(root.glob("**/pyproject.toml")):
            if ".venv" in project.parts:
                continue
            copy = Path(scratch) / project.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(project.read_text())
        (Path(scratch) / "uv.lock").write_text(committed)
        subprocess.run(["uv", "lock", "--quiet"], cwd=scratch, check=True)
        if strip((Path(scratch) / "uv.lock").read_text()) != committed:
            faults.append("uv.lock in HEAD is not what `uv lock` gives: run `uv lock` and commit the result")
    return faults


def main() -> int:
    match sys.argv[1:]:
        case ["strip"]:
            sys.stdout.write(strip(sys.stdin.read()))
            return 0
        case ["check"]:
            faults = check()
            print("\n".join(faults) or "uv.lock: host-free and up to date")
            return 1 if faults else 0
    print("usage: lock.py strip | check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
