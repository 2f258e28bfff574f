"""The cost model of a device: seconds per step, as a sum of a few terms."""

from dataclasses import dataclass

import numpy as np

from batchsched import StepPlan

# Shares of the peak figures below that serving reaches. Assumptions, in line with what published kernels and
# engines report: large matrix products at 55 % of peak, streaming reads at 80 % of the bandwidth.
_COMPUTE_SHARE = 0.55
_BANDWIDTH_SHARE = 0.80
# Of a device's memory: what the KV cache may have together with the weights, and what activations take.
_MEMORY_SHARE = 0.90
_ACTIVATIONS = 2e9
# Launching kernels, sampling, and the scheduler itself, a step.
_HOST_SECONDS = 1e-3
# A token that decodes costs the arithmetic of any other, but much of it hides behind reading the weights.
_DECODE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Chip:
    """An accelerator by its data sheet: dense bf16 FLOP/s, memory, bytes/s to it and to the host's."""

    flops: float
    memory: float
    bandwidth: float
    host_bandwidth: float


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder in bf16 by its model card."""

    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds a step: the sum of its parts, each in proportion to a number that the plan gives.

        overhead + prefill × prefill tokens + decode × decoding rows + context × tokens of context read
                 + attention × (query, key) pairs of prefill + swap × KV tokens moved to or from the host

    A row that runs one token decodes, a row that runs more prefills. A step does not get cheaper because
    compute and memory traffic overlap, nor dearer because kernels are small: the model is for comparing
    policies under the same load, not for forecasting a machine.

    kv_tokens: tokens for which there is KV memory.
    """

    overhead: float
    prefill: float
    decode: float
    context: float
    attention: float
    swap: float
    kv_tokens: int

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds the device takes for the plan."""
        rows, tokens = plan.rows.size, plan.num_tokens
        read = int(plan.starts.sum()) + tokens
        if tokens == rows:
            return self.overhead + rows * self.decode + read * self.context
        chunks = plan.counts > 1
        counts = plan.counts[chunks].astype(np.int64)
        prefill = int(counts.sum())
        pairs = int((counts * plan.starts[chunks] + counts * (counts + 1) // 2).sum())
        return (
            self.overhead
            + prefill * self.prefill
            + (tokens - prefill) * self.decode
            + read * self.context
            + pairs * self.attention
        )

    def stretch(self, rows: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` steps of `rows` decoding rows, over `context` tokens in the first."""
        read = steps * context + rows * (steps * (steps - 1) // 2)
        return steps * (self.overhead + rows * self.decode) + read * self.context

    def steps_within(self, seconds: float, rows: int, context: int, longest: int) -> int:
        """Return how many such steps end within `seconds`, `longest` at most."""
        first = self.stretch(rows, context, 1)
        steps = longest if longest * first <= seconds else int(seconds / first)
        while steps > 1 and self.stretch(rows, context, steps) > seconds:
            steps -= 1
        return steps

    @classmethod
    def of(cls, chip: Chip, model: Model, chips: int = 1) -> "Device":
        """`chips` devices that share a model by tensor parallelism, as one; 85 % as good as their sum."""
        scale = 1 if chips == 1 else 0.85 * chips
        flops = chip.flops * _COMPUTE_SHARE * scale
        bandwidth = chip.bandwidth * _BANDWIDTH_SHARE * scale
        weights = 2 * model.parameters
        heads_width = 4 * model.hidden  # a product and a sum, for scores and for values
        room = chips * (chip.memory * _MEMORY_SHARE - _ACTIVATIONS) - weights
        return cls(
            overhead=_HOST_SECONDS + weights / bandwidth,
            prefill=2 * model.parameters / flops,
            decode=_DECODE_SHARE * 2 * model.parameters / flops,
            context=model.kv_bytes / bandwidth,
            attention=heads_width * model.layers / flops,
            swap=model.kv_bytes / (chip.host_bandwidth * _BANDWIDTH_SHARE * chips),
            kv_tokens=int(room / model.kv_bytes),
        )


# From NVIDIA's data sheets, dense and in one direction (PCIe 5.0 × 16, PCIe 4.0 × 16, NVLink-C2C), and Meta's
# Llama 3 model cards.
_H100 = Chip(flops=989e12, memory=80e9, bandwidth=3.35e12, host_bandwidth=64e9)
_A100 = Chip(flops=312e12, memory=80e9, bandwidth=2.04e12, host_bandwidth=32e9)
_GH200 = Chip(flops=989e12, memory=96e9, bandwidth=4.0e12, host_bandwidth=450e9)
_LLAMA_8B = Model(parameters=8.03e9, layers=32, hidden=4096, kv_heads=8, head_dim=128)
_LLAMA_70B = Model(parameters=70.6e9, layers=80, hidden=8192, kv_heads=8, head_dim=128)

DEVICES = {
    "h100-8b": Device.of(_H100, _LLAMA_8B),
    "gh200-8b": Device.of(_GH200, _LLAMA_8B),
    "a100-8b": Device.of(_A100, _LLAMA_8B),
    "h100-70b-tp4": Device.of(_H100, _LLAMA_70B, chips=4),
    # Steps take no time: what is left is the order of arrival.
    "instant": Device(0, 0, 0, 0, 0, 0, kv_tokens=400_000),
}
