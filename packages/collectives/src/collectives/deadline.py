"""A timeout for calls that block in C code and have none, or one that does not always work."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_within(seconds: float, what: str, function: Callable[[], Result]) -> Result:
    """Return `function()`, or raise what it raises, or TimeoutError after `seconds`.

    It runs on a daemon thread. After a timeout that thread goes on waiting: the process can end, but the
    objects that `function` uses must not be used again.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again below, on the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"{what} did not end within {seconds:g} s")
    return results[0]
