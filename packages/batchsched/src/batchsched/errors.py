"""Why a request is not taken, and what a caller can get wrong between `plan` and `commit`."""


class RequestRefused(ValueError):
    """The request is not taken. The message says what was asked and what would be right."""


class PromptTooLong(RequestRefused):
    """The prompt leaves no position for a token to generate: it is not shorter than `max_model_len`."""

    def __init__(self, length: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {length} tokens and the model's context {max_model_len}: "
            f"a prompt of at most {max_model_len - 1} leaves room for a token"
        )
        self.length = length
        self.max_model_len = max_model_len


class NeverFits(RequestRefused):
    """The request needs more blocks than there are, even if it ran alone."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(
            f"the prompt and the tokens asked for need {needed} KV blocks and there are {capacity}: "
            "shorten the prompt, lower max_tokens, or give the cache more memory"
        )
        self.needed = needed
        self.capacity = capacity


class DuplicateHandle(RequestRefused):
    """A request with this handle is waiting or running."""

    def __init__(self, handle: int) -> None:
        super().__init__(f"a request with handle {handle} is waiting or running: choose another handle")
        self.handle = handle


class StepMismatch(ValueError):
    """A result does not belong to the oldest step in flight."""
