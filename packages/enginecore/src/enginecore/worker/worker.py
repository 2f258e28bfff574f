"""One device: load the model, size its cache, run steps."""

import ctypes
import logging
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collectives import Communicator, Communicators, LocalCommunicator
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.executor.step import StepInput
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.models.families import decoder_spec
from enginecore.worker.models.parallel import ModelParallel, expert_placements
from enginecore.worker.models.spec import DecoderSpec
from enginecore.worker.models.stages import split_layers
from enginecore.worker.runner.kv_sizing import CacheSize, cache_reason, cache_size, cpu_bytes, cuda_bytes
from enginecore.worker.runner.program import layer_program
from enginecore.worker.runner.runner import PendingOutput, Runner
from enginecore.worker.sampling.sampler import sample_with_everything
from enginecore.worker.weights.loading import empty_decoder, load_decoder, storage_dtype
from enginecore.worker.weights.packing import check_quantization, packed_bytes
from pagedattn import AttentionBatch, KVLayout, allocate, backend_name

logger = logging.getLogger(__name__)

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
        progress: Callable[[str], None] = lambda _: None,
        on_loaded: Callable[[int, int], object] | None = None,
    ) -> None:
        """Load the model; all ranks of `comms` do so together, and agree on the size of their caches.

        `local_size` ranks share this host's memory. `device` is the one that `config` names if None.
        `progress` is told what is done, in a few words; `on_loaded` how many tensors are loaded, of how many.
        """
        self.device = device or pick_device(config.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        spec = decoder_spec(files.config)
        self.dtype = pick_dtype(config.dtype, files, self.device)
        limit = config.max_model_len or spec.max_position
        self.is_output = comms.tp.rank == 0 and comms.pp.rank == comms.pp.size - 1
        """Whether this rank, of all, has the results of steps."""
        # With whole experts each rank counts tokens of its own, with slices every rank of tp the same ones.
        self._counts_loads = config.enable_expert_parallel or comms.tp.rank == 0
        experts = _expert_parallel(config, spec, comms)
        shape: dict[str, Any] = {
            "layers": split_layers(spec, comms.pp.size)[comms.pp.rank],
            "dtype": self.dtype,
            "max_positions": min(limit, spec.max_position),
        }
        planned = empty_decoder(
            files, ModelParallel(comms.tp, **experts), device=torch.device("meta"), **shape
        )
        check_quantization(planned, self.device, config.quantization)
        cached = self.dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn
        layout = KVLayout(len(planned.layers), planned.kv_heads, spec.head_dim, config.block_size, cached)

        def agree(available: int) -> CacheSize:
            own = cache_size(config, layout, spec.max_position, available)
            return agreed_size(own, config, layout, spec.max_position, comms.world, self.device)

        # On a CPU all is known before the weights are read, and what cannot be is refused at once.
        on_cpu = self.device.type == "cpu"
        weights = packed_bytes(planned, config.quantization)
        available = cpu_bytes(config, local_size, weights) if on_cpu else 0
        size = agree(available) if on_cpu else None
        self._model = load_decoder(
            files,
            comms.tp,
            **experts,
            **shape,
            device=self.device,
            quantization=config.quantization,
            on_loaded=on_loaded,
        )
        progress("weights loaded")
        comms.world.barrier()  # so that what others still load does not count as free
        if size is None:
            peak = _peak_bytes(self._model, config, layout, self.dtype, self.device)
            available = cuda_bytes(config, self.device, peak)
            size = agree(available)
        self.limits = EngineLimits(
            max_model_len=size.max_model_len,
            vocab_size=spec.vocab_size,
            num_blocks=size.num_blocks,
            block_size=config.block_size,
            host_blocks=size.host_blocks,
            window=_common_window(spec.windows),
            device=self.device.type,
            dynamic_length=spec.dynamic_length,
            dtype=str(self.dtype).removeprefix("torch."),
            lockstep=config.shares_experts,
        )
        cache = allocate(layout, size.num_blocks, self.device)
        program = None
        if not config.enforce_eager:
            program = layer_program(self._model, cache, self.dtype, config.max_num_batched_tokens)
        self._model.reset_expert_loads()  # what was run to measure memory and to record does not count
        self._runner = Runner(
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
        )
        reason = cache_reason(config, layout, spec.max_position, available, self.device.type)
        self._log_start(files, layout, size, reason, config.quantization)
        progress(f"KV cache of {size.num_blocks} blocks allocated")

    def _log_start(
        self, files: ModelFiles, layout: KVLayout, size: CacheSize, reason: str, quantization: str | None
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


def agreed_size(
    own: CacheSize,
    config: EngineConfig,
    layout: KVLayout,
    model_limit: int,
    world: Communicator,
    device: torch.device,
) -> CacheSize:
    """Return the size that every rank's memory has room for: block ids mean the same on all of them."""
    fewest = torch.tensor([own.num_blocks, own.host_blocks], dtype=torch.int64, device=device)
    num_blocks, host_blocks = world.all_reduce(fewest, "min").tolist()
    size = cache_size(config, layout, model_limit, num_blocks * layout.bytes_per_block)
    return replace(size, host_blocks=host_blocks)


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
def _peak_bytes(
    model: Decoder, config: EngineConfig, layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> int:
    """Run one full step on a single spare block and return the most memory that was in use."""
    count = config.max_num_batched_tokens
    cache = allocate(layout, 1, device)
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
        rows = min(count, config.max_num_seqs)
        sample_with_everything(model.logits(hidden[:rows]), config.max_logprobs)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
