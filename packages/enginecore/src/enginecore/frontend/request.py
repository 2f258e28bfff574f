"""One prompt to run: what every engine and the front-end take."""

from collections.abc import Sequence
from dataclasses import dataclass

from enginecore.frontend.parsing import Thinking
from enginecore.frontend.pooling import PoolingPlan
from enginecore.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids."""

    text: str | None
    """None when the caller gave token ids only."""
    token_ids: list[int]
    cache_salt: str | None = None
    """Shares cached prefixes only with prompts of the same salt."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its parameters; `params.n` samples of it are run, or it is pooled."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    """Lower runs first, under the priority policy."""
    bad_word_ids: Sequence[list[int]] | None = None
    """`params.bad_words` as `Frontend.bad_word_ids` gives them; None where nobody has asked it yet."""
    shown_tokens: Sequence[str] = ()
    """Special tokens that the text shows even where `params.skip_special_tokens` leaves the others out."""
    pooling: PoolingPlan | None = None
    """How its prompt becomes a vector, for which `params` are the plan's; None to generate."""

    counted: bool = True
    """False for a step of a beam search, which metrics count as one request."""
    grammar: str | None = None
    """`params.structured_outputs` as `Frontend.grammar` gives it; None where nobody has asked it yet."""
    thinking: Thinking | None = None
    """Reasoning after which the output has the form of `params.structured_outputs`."""

    @classmethod
    def to_pool(cls, request_id: str, prompt: Prompt, plan: PoolingPlan, priority: int = 0) -> "Request":
        """Return a request for a vector in the place of text; `Frontend.pooling_plan` makes plans."""
        return cls(request_id, prompt, plan.sampling, priority, pooling=plan)
