"""Control groups of this process: the folders in which the kernel states limits of memory and processor time.

A limit holds for a group and all below it, so the smallest on the way from the process's own group to the
root is the one that counts. In a container that way ends at the container's own group.
"""

from pathlib import Path

ROOT = Path("/")


def groups(controller: str, root: Path = ROOT) -> list[Path]:
    """Return the folders of this process's groups for `controller`, from its own to the root.

    Both versions of control groups are looked at. `root` is where proc and sys are mounted.
    """
    mounted = root / "sys/fs/cgroup"
    found: list[Path] = []
    for base, path in _memberships(controller, root, mounted):
        parts = [part for part in path.split("/") if part]
        # A process of another name space is said to be at "/..": then only the root can be seen.
        if ".." in parts:
            parts = []
        found += [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return [folder for folder in found if folder.is_dir()]


def read_number(path: Path) -> int | None:
    """Return the number that a file of a group holds; None where there is no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.removeprefix("-").isdecimal() else None


def _memberships(controller: str, root: Path, mounted: Path) -> list[tuple[Path, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [(mounted, "/")]
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [(mounted, path), (mounted / "unified", path)]
        elif controller in controllers.split(","):
            found.append((mounted / controller, path))
    return found
