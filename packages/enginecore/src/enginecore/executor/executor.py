"""What the core needs of whatever runs its steps."""

from typing import Protocol

from enginecore.runner.step import StepInput, StepOutput


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    num_blocks: int
    host_blocks: int
    """Blocks of host memory that steps can swap to."""
    window: int | None
    """The sliding window that all layers have; None where some layer attends to everything."""
    max_model_len: int
    vocab_size: int
    depth: int
    """Steps worth having under way at once: 1 when `submit` does the work itself."""

    def submit(self, step: StepInput) -> None:
        """Start a step."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step under way and return its results."""
        ...

    def shutdown(self) -> None:
        """Give up devices and processes."""
        ...
