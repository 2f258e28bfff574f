"""A folder for Unix sockets that no other user can enter."""

import os
import tempfile
from pathlib import Path

from enginecore.errors import ConfigError

_LONGEST_PARENT = 70
"""Bytes. A socket's path has at most 107 on Linux and 103 on macOS, of which the folder's own name and the
socket's take 16 each."""
_SHORT = ("/tmp", "/dev/shm")


def private_folder() -> Path:
    """Make a folder of mode 0700 whose path leaves room for a socket's name of up to 16 bytes.

    It lies where temporary files go (TMPDIR), or in /tmp or /dev/shm if that path is too long for a socket.

    Raises:
        ConfigError: none of these can be written to.
    """
    usual = tempfile.gettempdir()
    parents = [usual, *_SHORT] if len(os.fsencode(usual)) <= _LONGEST_PARENT else [*_SHORT]
    for parent in parents:
        try:
            return Path(tempfile.mkdtemp(prefix="octavo-", dir=parent))
        except OSError as error:
            failed = error
    raise ConfigError(f"no folder for sockets can be made in {', '.join(parents)}: {failed}")
