"""An engine that repeats its prompts: what the offline runs need of `LLMEngine`, and a record of its use.

Each step gives every request one token, the next of its prompt, after which an EOS token ends it.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from enginecore.config import EngineConfig
from enginecore.errors import RequestError
from enginecore.frontend.parsing import Parsers
from enginecore.frontend.request import Prompt, Request
from enginecore.messages import EngineLimits, EngineStats
from enginecore.outputs import CompletionOutput, Logprob, RequestOutput
from enginecore.sampling_params import RequestOutputKind

EOS = 257


class ByteTokenizer:
    special_ids = frozenset({256, 257})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode()

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


class ByteFrontend:
    tokenizer = ByteTokenizer()
    parsers = Parsers()
    sampling_defaults: ClassVar[dict[str, Any]] = {}

    def prepare_prompt(
        self,
        prompt: str | list[int],
        add_special_tokens: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(prompt, list(prompt.encode()), cache_salt)
        return Prompt(None, prompt, cache_salt)

    def prepare_chat(
        self, messages: list[dict[str, Any]], /, *, cache_salt: str | None = None, **options: Any
    ) -> Prompt:
        return self.prepare_prompt(
            "|".join(f"{message['role']}:{message['content']}" for message in messages),
            cache_salt=cache_salt,
        )


class _Running:
    def __init__(self, request: Request) -> None:
        self.id = request.request_id
        self.prompt = prompt = request.prompt
        self.params = params = request.params
        limit = 10**6 if params.max_tokens is None else params.max_tokens
        answer = [*prompt.token_ids, EOS][:limit]
        self.left = answer.copy()
        self.tokens: list[int] = []

    @property
    def has_output(self) -> bool:
        return not self.left or self.params.output_kind is RequestOutputKind.DELTA

    def output(self) -> RequestOutput:
        text = ByteTokenizer().decode(self.tokens)
        finish_reason = None
        if not self.left:
            finish_reason = "stop" if self.tokens[-1] == EOS else "length"
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [{token: Logprob(-0.5, 1, None)} for token in self.tokens]
        samples = [
            CompletionOutput(
                index,
                text,
                self.tokens,
                logprobs=logprobs,
                finish_reason=finish_reason,
            )
            for index in range(self.params.n)
        ]
        if self.params.output_kind is RequestOutputKind.DELTA:
            self.tokens = []
        return RequestOutput(
            self.id, self.prompt.text, self.prompt.token_ids, samples, finish_reason is not None, 0
        )


class SteppingEngine:
    def __init__(self, max_num_seqs: int = 4) -> None:
        self.config = EngineConfig(model="models/tiny", max_num_seqs=max_num_seqs)
        self.frontend = ByteFrontend()
        self.limits = EngineLimits(max_model_len=64, vocab_size=320, num_blocks=64, block_size=16)
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.most_at_once = 0
        self.failing: set[str] = set()
        """Texts of prompts that the core gives up."""
        self.after_step: Callable[[], None] | None = None
        self._running: dict[str, _Running] = {}
        self._generated = 0

    def add(self, request: Request) -> None:
        prompt = request.prompt
        if not prompt.token_ids:
            raise RequestError("the prompt is empty", "prompt")
        if len(prompt.token_ids) >= 64:
            raise RequestError(f"the prompt has {len(prompt.token_ids)} tokens of at most 63", "prompt")
        self.requests.append(request)
        self._running[request.request_id] = _Running(request)
        self.most_at_once = max(self.most_at_once, len(self._running))

    def step(self) -> list[RequestOutput]:
        outputs = []
        for request in list(self._running.values()):
            if request.prompt.text in self.failing:
                del self._running[request.id]
                given_up = CompletionOutput(0, finish_reason="error", stop_reason="it never fits")
                outputs.append(RequestOutput(request.id, request.prompt.text, [], [given_up], True))
                continue
            request.tokens.append(request.left.pop(0))
            self._generated += request.params.n
            if not request.left:
                del self._running[request.id]
            if request.has_output:
                outputs.append(request.output())
        if self.after_step is not None:
            self.after_step()
        return outputs

    def abort_request(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(generation_tokens=self._generated)
