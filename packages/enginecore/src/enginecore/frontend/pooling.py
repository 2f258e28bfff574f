"""Embeddings in a front-end: what a model and a request ask for, and parts of vectors made into one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginecore.errors import ConfigError, ModelError, RequestError
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles, read_json
from enginecore.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from enginecore.pooling_params import Pooling, PoolingParams, pooling_of
from enginecore.sampling_params import RequestOutputKind, SamplingParams

POOLER_KEYS = ("pooling_type", "seq_pooling_type", "use_activation", "normalize", "dimensions")
"""What the option `pooler_config` may hold. `seq_pooling_type` and `normalize` are other names that vLLM has
or had for `pooling_type` and `use_activation`."""

_MODES = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
"""Poolings by the names that sentence-transformers has for them."""


class PoolingPlan(NamedTuple):
    """How one request's vector is made."""

    kind: Pooling
    normalise: bool
    dimensions: int | None
    """Numbers kept; None for all."""
    sampling: SamplingParams
    """Sampling parameters for the scheduler and the worker: one token, which nobody sees."""


@dataclass(frozen=True)
class Pooler:
    """A model's own way to make embeddings, and what the option `pooler_config` changes of it."""

    kind: Pooling | None = "last"
    normalise: bool = True
    dimensions: int | None = None
    obstacle: str | None = None
    """Why the model's own way cannot be followed: requests must then say which pooling they want."""
    matryoshka: bool = False
    """Whether the first numbers of a vector are a vector too."""
    sizes: tuple[int, ...] = ()
    """How many of them may be kept; any number if empty."""

    @classmethod
    def of(cls, files: ModelFiles, config: Mapping[str, Any] | None) -> "Pooler":
        """Read the files of sentence-transformers beside a model, where there are some, and `pooler_config`.

        Raises:
            ConfigError: `config` holds what is not known or not supported.
            ModelError: a file is not JSON.
        """
        kind, normalise, obstacle = _sentence_transformers(files)
        given = dict(config or {})
        unknown = sorted(set(given) - set(POOLER_KEYS))
        if unknown:
            raise ConfigError(f"pooler_config has no {unknown[0]!r}, only {', '.join(POOLER_KEYS)}")
        for name, other in (("pooling_type", "seq_pooling_type"), ("use_activation", "normalize")):
            value = given.pop(other, None)
            if value is not None and given.setdefault(name, value) != value:
                raise ConfigError(f"pooler_config: {other} is another name of {name}: give one of them")
        try:
            params = PoolingParams(**given)
        except ValueError as error:
            raise ConfigError(f"pooler_config: {error}") from error
        if params.pooling_type is not None:
            kind, obstacle = pooling_of(params.pooling_type), None
        if params.use_activation is not None:
            normalise = params.use_activation
        sizes = files.config.get("matryoshka_dimensions") or ()
        return cls(
            kind,
            normalise,
            params.dimensions,
            obstacle,
            bool(sizes) or bool(files.config.get("is_matryoshka")),
            tuple(sizes),
        )

    def plan(self, params: PoolingParams, limits: EngineLimits) -> PoolingPlan:
        """Return how a request is pooled.

        Raises:
            RequestError: not as `params` ask.
        """
        kind = self.kind if params.pooling_type is None else pooling_of(params.pooling_type)
        if kind is None:
            raise RequestError(f"{self.obstacle}: say which pooling_type is wanted", "pooling_type")
        dimensions = self.dimensions if params.dimensions is None else params.dimensions
        if dimensions == limits.hidden_size:
            dimensions = None  # clients name the whole vector's size too
        if dimensions is not None:
            self._check(dimensions, limits.hidden_size)
        if kind == "mean" and params.skip_reading_prefix_cache is False:
            raise RequestError(
                "skip_reading_prefix_cache must not be False with mean pooling, which needs all positions",
                "skip_reading_prefix_cache",
            )
        skip = kind == "mean" or bool(params.skip_reading_prefix_cache)
        normalise = self.normalise if params.use_activation is None else params.use_activation
        return PoolingPlan(kind, normalise, dimensions, _POOLED_AFRESH if skip else _POOLED)

    def _check(self, dimensions: int, hidden: int) -> None:
        if not self.matryoshka:
            raise RequestError(
                f"dimensions={dimensions}: this model's config names no matryoshka_dimensions, so its "
                f"vectors of {hidden} numbers must stay whole; leave dimensions out",
                "dimensions",
            )
        if not 1 <= dimensions <= hidden or (self.sizes and dimensions not in self.sizes):
            allowed = ", ".join(map(str, self.sizes)) if self.sizes else f"between 1 and {hidden}"
            raise RequestError(f"dimensions must be {allowed}, got {dimensions}", "dimensions")


def _pooled(skip: bool) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=skip,
    )


_POOLED, _POOLED_AFRESH = _pooled(False), _pooled(True)


class PooledVector:
    """One request's vector while its prompt runs."""

    def __init__(self, plan: PoolingPlan, num_prompt: int) -> None:
        self._plan = plan
        self._num_prompt = num_prompt
        self._sum: NDArray[np.float64] | None = None
        self._done = 0
        """Positions whose hidden states are in the sum."""

    def add(self, start: int, count: int, part: NDArray[np.float32]) -> None:
        """Take the part of `count` positions from `start` on; a prompt that begins anew drops the others."""
        if self._plan.kind == "last" or start == 0:
            self._sum, self._done = part.astype(np.float64), start + count
        elif self._sum is None or start != self._done:
            raise ValueError(f"positions from {start} on were pooled, after the first {self._done}")
        else:
            self._sum += part
            self._done += count

    def result(self) -> NDArray[np.float32]:
        """Return the vector, float32 [hidden or dimensions], with NaN where hidden states had some.

        Raises:
            ValueError: positions are missing.
        """
        if self._sum is None or self._done != self._num_prompt:
            raise ValueError(f"{self._done} of {self._num_prompt} positions were pooled")
        vector = self._sum / self._num_prompt if self._plan.kind == "mean" else self._sum
        # Cut first: what is kept has length 1.
        vector = vector[: self._plan.dimensions]
        if self._plan.normalise:
            vector = vector / max(float(np.linalg.norm(vector)), _SMALLEST_NORM)
        return vector.astype(np.float32)


_SMALLEST_NORM = 1e-12
"""As torch.nn.functional.normalize has it."""


def embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    """Return the embedding of a pooled request that has finished.

    Raises:
        RequestError: it could not be run.
    """
    if output.embedding is None:
        said = [str(sample.stop_reason) for sample in output.outputs if sample.finish_reason == "error"]
        raise RequestError(said[0] if said else "the request was aborted")
    vector = EmbeddingOutput(output.embedding.tolist())
    return EmbeddingRequestOutput(
        output.request_id, vector, output.prompt_token_ids, output.num_cached_tokens or 0
    )


def score_outputs(
    first: Sequence[RequestOutput], second: Sequence[RequestOutput], pairs: Sequence[tuple[int, int]]
) -> list[ScoringRequestOutput]:
    """Return the scores of pairs of pooled requests that have finished; `pairs` are as `pair` gives them.

    Raises:
        RequestError: one could not be run.
    """
    vectors = [[embedding_output(output) for output in outputs] for outputs in (first, second)]
    scores = []
    for i, j in pairs:
        one, other = vectors[0][i], vectors[1][j]
        score = cosine(np.array(one.outputs.embedding), np.array(other.outputs.embedding))
        scores.append(
            ScoringRequestOutput(
                f"{one.request_id}-{other.request_id}",
                ScoringOutput(score),
                one.prompt_token_ids + other.prompt_token_ids,
                one.num_cached_tokens + other.num_cached_tokens,
            )
        )
    return scores


def cosine(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Return the cosine of two vectors; 0 where one is zero."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    length = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / max(length, _SMALLEST_NORM)


def pair(num_first: int, num_second: int, names: tuple[str, str]) -> list[tuple[int, int]]:
    """Return which of two lists of texts are compared: 1 with 1, 1 with each of N, or N with N in order.

    `names` are what the caller calls the lists. Raises RequestError for other numbers of texts.
    """
    for count, name in zip((num_first, num_second), names):
        if count == 0:
            raise RequestError(f"{name} is empty: give at least one text", name)
    if num_first not in (1, num_second):
        raise RequestError(
            f"{names[0]} has {num_first} texts and {names[1]} has {num_second}: "
            "give 1 and 1, 1 and N, or N and N",
            names[0],
        )
    return [(0 if num_first == 1 else index, index) for index in range(num_second)]


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def _sentence_transformers(files: ModelFiles) -> tuple[Pooling | None, bool, str | None]:
    """Return a model's pooling, whether it normalises, and what of its files cannot be followed."""
    path = files.path / "modules.json"
    if files.is_gguf or not path.is_file():
        return "last", True, None
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a list of sentence-transformers' modules: {error}") from error
    kinds = [module.type.rpartition(".")[2] for module in modules]
    other = next((kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")), None)
    if other is not None:
        return None, False, f"{files.name}: its modules.json has a module {other}, which is not supported"
    normalise = "Normalize" in kinds
    if "Pooling" not in kinds:
        return "last", normalise, None
    settings = read_json(files.path / modules[kinds.index("Pooling")].path / "config.json") or {}
    modes = [name.removeprefix("pooling_mode_") for name, value in settings.items() if value is True]
    modes = [mode for mode in modes if f"pooling_mode_{mode}" in settings]
    if isinstance(settings.get("pooling_mode"), str):
        modes = [settings["pooling_mode"]]
    if len(modes) == 1 and modes[0] in _MODES:
        return pooling_of(_MODES[modes[0]]), normalise, None
    said = " and ".join(modes) or "nothing"
    return None, normalise, f"{files.name}: its pooling is {said}, and last and mean are supported"
