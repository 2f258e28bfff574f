"""For processes that a parent starts and speaks to through pipes."""

import os
import threading
from collections.abc import Callable
from typing import BinaryIO


def end_with_parent(clean: Callable[[], None] = lambda: None) -> None:
    """From now on, end this process when its standard input closes, after calling `clean`.

    It closes when every process that could write to it is gone, in whatever way that ended.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        clean()
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def private_stdout() -> BinaryIO:
    """Keep standard output for messages, and let everything else that prints go to standard error."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output
