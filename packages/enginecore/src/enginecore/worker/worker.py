"""One device: load the model, size its cache, run steps."""

import ctypes
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collectives import Communicators, LocalCommunicator
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.executor.step import StepInput
from enginecore.grammars import GrammarError, Grammars, all_eos_ids
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.models.families import decoder_spec
from enginecore.worker.models.parallel import ModelParallel, expert_placements
from enginecore.worker.models.spec import DecoderSpec
from enginecore.worker.models.stages import split_layers
from enginecore.worker.runner.kv_sizing import (
    CacheSize,
    CacheSizing,
    cpu_bytes,
    cuda_bytes,
    host_memory,
)
from enginecore.worker.runner.program import StepLimits, graph_bytes, layer_program
from enginecore.worker.runner.runner import PendingOutput, Runner
from enginecore.worker.sampling.guides import Guides
from enginecore.worker.sampling.processors import Registered, make_processors
from enginecore.worker.sampling.sampler import sample_with_everything
from enginecore.worker.weights.loading import empty_decoder, load_decoder, storage_dtype
from enginecore.worker.weights.packing import check_quantization, packed_bytes
from pagedattn import AttentionBatch, KVLayout, Quantization, allocate, backend_name

logger = logging.getLogger(__name__)

_MOST_MASK_THREADS = 8
"""Most threads that make masks of grammars."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""The most that glibc accepts (malloc.h, DEFAULT_MMAP_THRESHOLD_MAX)."""


ALONE = Communicators(*[LocalCommunicator()] * 4)
"""The communicators of the only rank."""


class Worker:
    """One rank's part of a model on its device, ready to run steps.

    Raises:
        ModelError: the checkpoint cannot be loaded, or not be cut for the ranks.
        ConfigError: the device is not there, or the cache does not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        comms: Communicators = ALONE,
        *,
        device: torch.device | None = None,
        local_size: int = 1,
        on_phase: Callable[[str], object] = lambda phase: None,
        on_loaded: Callable[[int, int], object] | None = None,
    ) -> None:
        """Load the model; all ranks of `comms` do so together, and agree on the size of their caches.

        `local_size` ranks share this host's memory. `device` is the one that `config` names if None.
        `on_phase` is told, in a few words, which part of that begins; `on_loaded` how many tensors are
        loaded, of how many.
        """
        self.device = device or pick_device(config.device)
        on_cpu = self.device.type == "cpu"
        if on_cpu:
            keep_freed_memory()
        self.dtype = pick_dtype(config.dtype, files, self.device)
        self.is_output = comms.tp.rank == 0 and comms.pp.rank == comms.pp.size - 1
        """Whether this rank, of all, has the results of steps."""
        # With whole experts each rank counts tokens of its own, with slices every rank of tp the same ones.
        self._counts_loads = config.enable_expert_parallel or comms.tp.rank == 0
        part = _Part(config, files, comms, self.dtype)
        check_quantization(part.planned, self.device, config.quantization)
        processors = make_processors(config, part.spec.vocab_size, self.device) if self.is_output else []
        sizing = CacheSizing(config, part.layout, part.spec.max_position, comms.world, self.device)
        # On a CPU all is known before the weights are read, and what cannot be is refused at once.
        if on_cpu:
            weights = packed_bytes(part.planned, config.quantization)
            memory = host_memory(part.planned, config, self.dtype, weights, local_size)
            logger.info("memory: %s", memory)
            size = sizing.agree(cpu_bytes(config, memory))
        on_phase("preparing kernels")
        backend_name(self.device)  # compiles those of a CPU, if they are not there yet
        on_phase("reading weights")
        self._model = part.load(files, self.device, config.quantization, on_loaded, on_phase)
        if comms.world.size > 1:
            on_phase("waiting for the other ranks")
        comms.world.barrier()  # so that what others still load does not count as free
        if not on_cpu:
            on_phase("measuring memory")
            limits = _step_limits(config, part.max_positions, self.device)
            needed = self._measured_bytes(config, part.layout, limits)
            size = sizing.agree(cuda_bytes(config, self.device, needed))
        self.limits = _engine_limits(config, part.spec, size, self.device, self.dtype)
        on_phase(f"allocating a KV cache of {size.num_blocks} blocks")
        self._runner = self._make_runner(config, comms, part.layout, size, processors, files, on_phase)
        self._log_start(files, part.layout, size, sizing.reason, config.quantization)

    def _make_runner(
        self,
        config: EngineConfig,
        comms: Communicators,
        layout: KVLayout,
        size: CacheSize,
        processors: list[Registered],
        files: ModelFiles,
        on_phase: Callable[[str], object],
    ) -> Runner:
        cache = allocate(layout, size.num_blocks, self.device)
        program = None
        if not config.enforce_eager:
            on_phase("recording the layers")
            limits = _step_limits(config, size.max_model_len, self.device)
            program = layer_program(self._model, cache, self.dtype, limits)
        return Runner(
            self._model,
            cache,
            allocate(layout, size.host_blocks, "cpu") if size.host_blocks else None,
            comms.tp,
            comms.pp,
            comms.ep,
            dtype=self.dtype,
            max_rows=config.max_num_seqs,
            max_len=size.max_model_len + 1,
            program=program,
            processors=processors,
            guides=self._make_guides(config, files) if self.is_output else None,
        )

    def _make_guides(self, config: EngineConfig, files: ModelFiles) -> Guides:
        vocab_size = self.limits.vocab_size

        def load() -> Grammars:
            # Once a grammar comes: few models are ever asked for one.
            from enginecore.frontend.text.loading import load_tokenizer

            tokenizer = load_tokenizer(files, config.tokenizer)
            if tokenizer is None:
                raise GrammarError("this model has no tokenizer")
            return Grammars(tokenizer, vocab_size, all_eos_ids(tokenizer, files))

        return Guides(config.max_num_seqs, load, threads=min(_MOST_MASK_THREADS, torch.get_num_threads()))

    def _measured_bytes(self, config: EngineConfig, layout: KVLayout, limits: StepLimits) -> int:
        """Return how many bytes of the device model, a full step and the graphs of decode steps take."""
        spare = allocate(layout, 1, self.device)
        peak = _peak_bytes(self._model, config, spare, self.dtype)
        self._model.reset_expert_loads()  # what was run to measure memory does not count
        if config.enforce_eager:
            return peak
        return peak + graph_bytes(self._model, spare, self.dtype, limits)

    def _log_start(
        self,
        files: ModelFiles,
        layout: KVLayout,
        size: CacheSize,
        reason: str,
        quantization: str | None,
    ) -> None:
        logger.info(
            "%s on %s in %s%s, %s kernels, threads: %d",
            files.name,
            self.device,
            self.limits.dtype,
            f", weights in {quantization}" if quantization else "",
            backend_name(self.device),
            torch.get_num_threads(),
        )
        logger.info(
            "KV cache: %d tokens in %d blocks of %d in %s; %s; the longest request has %d tokens",
            size.num_blocks * layout.block_size,
            size.num_blocks,
            layout.block_size,
            str(layout.dtype).removeprefix("torch."),
            reason,
            size.max_model_len,
        )

    def run(self, step: StepInput) -> PendingOutput:
        """Start a step; see `Runner.run`."""
        return self._runner.run(step)

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens this rank has sent to each expert, those that no other rank counts.

        int64 [layers with experts, experts], since the start; None for a model without experts.
        """
        experts = self._model.spec.experts
        if experts is None:
            return None
        layers = sorted(experts.layers)
        loads = np.zeros((len(layers), experts.count), np.int64)
        own = self._model.expert_loads()
        if own is not None and self._counts_loads:
            loads[[index for index, layer in enumerate(layers) if layer in self._model.held]] = own.cpu()
        return loads


class _Part:
    """One rank's part of a model before it is loaded: its layers, and its share of each.

    Raises:
        ModelError: the model cannot be cut for the ranks.
        ConfigError: there is no such placement of experts.
    """

    def __init__(
        self, config: EngineConfig, files: ModelFiles, comms: Communicators, dtype: torch.dtype
    ) -> None:
        self.spec = spec = decoder_spec(files.config)
        self.max_positions = min(config.max_model_len or spec.max_position, spec.max_position)
        self._tp = comms.tp
        self._experts = _expert_parallel(config, spec, comms)
        self._shape: dict[str, Any] = {
            "layers": split_layers(spec, comms.pp.size)[comms.pp.rank],
            "dtype": dtype,
            "max_positions": self.max_positions,
        }
        self.planned = empty_decoder(
            files, ModelParallel(comms.tp, **self._experts), device=torch.device("meta"), **self._shape
        )
        """The modules without their weights."""
        cached = dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn
        self.layout = KVLayout(
            len(self.planned.layers), self.planned.kv_heads, spec.head_dim, config.block_size, cached
        )

    def load(
        self,
        files: ModelFiles,
        device: torch.device,
        quantization: Quantization | None,
        on_loaded: Callable[[int, int], object] | None,
        on_phase: Callable[[str], object],
    ) -> Decoder:
        """Return the modules with their weights; see `load_decoder`."""
        return load_decoder(
            files,
            self._tp,
            **self._experts,
            **self._shape,
            device=device,
            quantization=quantization,
            on_loaded=on_loaded,
            on_phase=on_phase,
        )


def _engine_limits(
    config: EngineConfig, spec: DecoderSpec, size: CacheSize, device: torch.device, dtype: torch.dtype
) -> EngineLimits:
    return EngineLimits(
        max_model_len=size.max_model_len,
        vocab_size=spec.vocab_size,
        num_blocks=size.num_blocks,
        block_size=config.block_size,
        host_blocks=size.host_blocks,
        window=_common_window(spec.windows),
        device=device.type,
        dynamic_length=spec.dynamic_length,
        dtype=str(dtype).removeprefix("torch."),
        lockstep=config.shares_experts,
        hidden_size=spec.hidden_size,
    )


def _step_limits(config: EngineConfig, max_length: int, device: torch.device) -> StepLimits:
    # A draft is a sequence of its own.
    return StepLimits(config.max_num_batched_tokens, config.max_sampled(device.type), max_length)


def _expert_parallel(config: EngineConfig, spec: DecoderSpec, comms: Communicators) -> dict[str, Any]:
    if not config.enable_expert_parallel:
        return {}
    return {"ep": comms.ep, "placements": expert_placements(spec, comms.ep.size, config.expert_placement)}


def _common_window(windows: tuple[int | None, ...]) -> int | None:
    """The sliding window that all layers have; None where some layer attends to everything."""
    return windows[0] if len(set(windows)) == 1 else None


def keep_freed_memory() -> None:
    """Let glibc's malloc keep large blocks that are freed, for the next step to use.

    By default each activation of a megabyte or more is mapped and unmapped again in every layer, and the page
    faults cost more than the arithmetic. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device that `name` (auto, cpu, cuda, cuda:N) stands for, for one of the ranks of a host.

    Raises:
        ConfigError: there is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    index = torch.device(name).index if name.startswith("cuda:") else local_rank
    device = torch.device("cuda", index)
    if device.index >= count:
        raise ConfigError(f"device={name}, rank {local_rank} of this host: it has {count} CUDA devices")
    return device


def pick_dtype(name: str, files: ModelFiles, device: torch.device) -> torch.dtype:
    """Return the type to compute in: the one named, or for "auto" the checkpoint's where it is fast.

    On a CPU, half-precision checkpoints run in bfloat16 where the hardware multiplies it and in float32 where
    it does not, and quantised ones in float32: what quantising left of their accuracy is not rounded again.
    """
    if name != "auto":
        return getattr(torch, name)
    stored = None if files.is_gguf else storage_dtype(files)
    if stored == torch.float32 or (stored is None and (device.type == "cpu" or not files.is_gguf)):
        return torch.float32
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32
    if stored == torch.float16 or not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


def _cpu_multiplies_bfloat16() -> bool:
    if platform.machine() in ("arm64", "aarch64"):
        return "bf16" in _cpu_flags()
    return bool({"avx512_bf16", "amx_bf16"} & _cpu_flags())


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


@torch.inference_mode()
def _peak_bytes(model: Decoder, config: EngineConfig, cache: torch.Tensor, dtype: torch.dtype) -> int:
    """Run one full step on a single spare block, `cache`, and return the most memory that was in use."""
    count, device = config.max_num_batched_tokens, cache.device
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    inputs = zeros if model.first else torch.zeros(count, model.spec.hidden_size, dtype=dtype, device=device)
    batch = AttentionBatch(
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=device),
        lengths=torch.ones(count, dtype=torch.int32, device=device),
        block_table=torch.zeros(count, 1, dtype=torch.int32, device=device),
        slots=torch.full((count,), -1, dtype=torch.int64, device=device),
        max_query=1,
        max_length=1,
        num_decodes=count,
    )
    torch.cuda.reset_peak_memory_stats(device)
    hidden = model(inputs, zeros, cache, batch)
    if model.last:
        # As many rows as are sampled, or as a piece of a prompt's log probabilities has.
        rows = min(count, config.max_sampled(device.type))
        sample_with_everything(model.logits(hidden[:rows]), config.max_logprobs)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
