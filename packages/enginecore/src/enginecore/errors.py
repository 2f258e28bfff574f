"""Errors a caller may meet. Each message is one line that says what is wrong and what would be right."""


class OctavoError(Exception):
    """Base of the errors below."""


class ConfigError(OctavoError, ValueError):
    """An option is unknown, out of range, or contradicts another."""


class ModelError(OctavoError, ValueError):
    """A checkpoint is missing, broken, or of a kind that is not supported."""


class RequestError(OctavoError, ValueError):
    """A request cannot be run as asked; `param` names the field at fault when one is.

    `code` is OpenAI's name of the kind of fault, where clients look for one.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt and output are longer than the model's context.

    Clients of OpenAI's API tell this error from others by its code, by the message's first sentence, as
    litellm does, or by "prompt is too long" in it, as langchain does.
    """

    START = "This model's maximum context length is"
    CODE = "context_length_exceeded"

    def __init__(self, limit: int, excess: str, param: str = "prompt") -> None:
        """`limit` is in tokens; `excess` says in numbers what is too long."""
        message = f"{self.START} {limit} tokens. However, your prompt is too long: {excess}."
        super().__init__(message, param, self.CODE)


class NoTokenError(RequestError):
    """A request's grammar, allowed ids and bad words leave no token to choose."""

    START = "no token could be chosen: "

    def __init__(self, reason: str, param: str | None = None) -> None:
        super().__init__(self.START + reason, param)


class RequestAbortedError(OctavoError):
    """The request was aborted by somebody else than the reader of its outputs."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine has ended; no request can be run any more."""


class ForkError(OctavoError, RuntimeError):
    """The engine belongs to another process, of which this one is a fork."""


class WorkerDied(EngineDeadError):
    """A worker has ended, and the engine with it; the message names rank, process and how it ended."""

    def __init__(self, message: str, *, rank: int, pid: int, details: str = "") -> None:
        """`details` is the worker's traceback, or the last lines that it wrote to its standard error."""
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.details = details
