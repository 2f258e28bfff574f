"""The operations around attention against float64, sampling against the torch back end."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from gpu_check.case import FP8, compare
from pagedattn import (
    KVLayout,
    allocate,
    apply_token_bitmask,
    copy_blocks,
    gelu_and_mul,
    grouped_matmul,
    rms_norm,
    rotary,
    silu_and_mul,
    top_k_top_p_sample,
    write_kv,
)

TRITON = "triton"
# float32 sums of thousands of products; elsewhere one rounding to the type, which the interpreter cuts off.
ROUNDING = {torch.float32: 5e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Rounding may move a draw whose best two tokens are that close.
DRAWS_APART = 0.005
SETTINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 5.0, "top_p": 0.999},
]


def check_cache(interpret: bool) -> dict[str, Any]:
    """Storing keys and values, and copying blocks on the device, to the host and back."""
    torch.manual_seed(0)
    device = torch.device("cpu" if interpret else "cuda")
    checks = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, FP8):
        name = str(dtype).removeprefix("torch.")
        checks[f"write_kv {name}"] = _check_write(dtype, device)
        checks[f"copy_blocks {name}"] = _check_copies(dtype, device, device)
    checks["copy_blocks in a chain"] = _check_chain(device)
    if not interpret:
        host = torch.device("cpu")
        checks["copy_blocks to the host"] = _check_copies(torch.bfloat16, device, host)
        checks["copy_blocks from the host"] = _check_copies(torch.bfloat16, host, device)
    return {"checks": checks}


def check_ops(interpret: bool) -> dict[str, Any]:
    """Norms, rotation, gated activations and grouped products against float64."""
    torch.manual_seed(0)
    device = torch.device("cpu" if interpret else "cuda")
    size = 96 if interpret else 4096
    checks = {}
    for dtype in ROUNDING:
        name = str(dtype).removeprefix("torch.")
        checks |= {f"{part} {name}": check for part, check in _check_norm(dtype, size, device).items()}
        checks |= {f"{part} {name}": check for part, check in _check_rotary(dtype, device).items()}
        checks |= {f"{part} {name}": check for part, check in _check_gated(dtype, size, device).items()}
        if not (interpret and dtype == torch.bfloat16):  # which the interpreter multiplies wrongly
            checks |= {f"{part} {name}": check for part, check in _check_grouped(dtype, size, device).items()}
    return {"checks": checks}


def check_sampling(interpret: bool) -> dict[str, Any]:
    """Draws of the Triton back end beside those of the torch back end on the CPU."""
    torch.manual_seed(0)
    device = torch.device("cpu" if interpret else "cuda")
    vocabularies = (1, 333) if interpret else (1, 333, 32_000, 151_936)
    checks = {}
    for vocab in vocabularies:
        rows = 21 if interpret else 700
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{vocab} logits {str(dtype).removeprefix('torch.')}"
            checks[name] = _check_draws(torch.randn(rows, vocab).mul(2.5).to(dtype), device)
    broken = torch.full((7, 300), -torch.inf)
    broken[:, 7] = torch.nan
    checks["no numbers"] = _check_draws(broken, device)
    for dtype in ROUNDING:
        name = str(dtype).removeprefix("torch.")
        checks[f"bitmask {name}"] = _check_bitmask(vocabularies[-1], dtype, device)
    return {"checks": checks}


def _check_bitmask(vocab: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    logits = torch.randn(9, vocab).to(dtype)
    words = torch.randint(-(2**31), 2**31, (6, -(-vocab // 32))).to(torch.int32)
    rows = torch.randperm(9)[:6]
    masked = logits.to(device, copy=True)
    apply_token_bitmask(masked, words.to(device), rows.to(device), backend=TRITON)
    apply_token_bitmask(logits, words, rows, backend="torch")
    wrong = float((masked.cpu() != logits).double().mean())
    return {"passed": wrong == 0, "difference": wrong, "tolerance": 0.0}


def _check_write(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    given = torch.float16 if dtype == FP8 else dtype
    fused = torch.randn(50, 5, 80, device=device).to(given)
    key, value = fused[:, :2], fused[:, 3:]
    slots = torch.randperm(16 * 9)[:50]
    slots[::7] = -1
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]], device=device) if dtype == FP8 else None
    cache = allocate(KVLayout(1, 2, 80, 16, dtype), 9, device)[0]
    write_kv(key, value, cache, slots.to(device), kv_scales=scales, backend=TRITON)
    expected = torch.zeros(cache.shape, dtype=torch.float64, device=device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pair = torch.stack((key[token], value[token])).double()
            expected[slot // 16, :, :, slot % 16] = pair if scales is None else pair / scales[..., None]
    if dtype == FP8:
        expected = expected.float().to(FP8).double()
    # Of float8 a quotient may be rounded to either of two neighbours.
    return compare(cache.to(given), expected, tolerance=0.07 if dtype == FP8 else 0.0)


def _check_copies(dtype: torch.dtype, here: torch.device, there: torch.device) -> dict[str, Any]:
    layout = KVLayout(3, 2, 24, 16, dtype)
    source, target = allocate(layout, 7, here), allocate(layout, 5, there)
    source.copy_(torch.randn(source.shape).to(dtype))
    pairs = [(6, 0), (2, 4), (2, 1)]
    copy_blocks(source, target, torch.tensor(pairs), backend=TRITON)
    expected = torch.zeros(target.shape, dtype=torch.float64)
    for origin, place in pairs:
        expected[:, place] = source[:, origin].cpu().double()
    return compare(target.cpu().float(), expected, tolerance=0.0)


def _check_chain(device: torch.device) -> dict[str, Any]:
    cache = torch.randn(2, 4, 2, 2, 16, 8, device=device)
    expected = cache[:, [2, 0, 1, 3]].clone()
    copy_blocks(cache, cache, torch.tensor([[0, 1], [1, 2], [2, 0]]), backend=TRITON)
    return compare(cache, expected, tolerance=0.0)


def _check_norm(dtype: torch.dtype, size: int, device: torch.device) -> dict[str, Any]:
    x, residual = torch.randn(2, 33, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    normed, total = rms_norm(x, weight, 1e-6, residual, backend=TRITON)
    heads = torch.randn(5, 9, 96, device=device).to(dtype)[:, 2:7, :64]
    return {
        "norm": _rounded(rms_norm(x, weight, 1e-6, backend=TRITON), _norm(x) * weight.double()),
        "norm and residual": _rounded(normed, _norm(total) * weight.double()),
        "residual": _rounded(total, x.double() + residual.double()),
        "norm of heads": _rounded(
            rms_norm(heads, torch.ones_like(weight[:64]), 1e-6, backend=TRITON), _norm(heads)
        ),
    }


def _rounded(result: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    return compare(result, expected, tolerance=ROUNDING[result.dtype])


def _norm(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _check_rotary(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    fused = torch.randn(9, 12, 80, device=device).to(dtype)
    query, key = fused[:, :8], fused[:, 8:10]
    angles = torch.rand(20, 32, device=device, dtype=torch.float64) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    positions = torch.randperm(20, device=device)[:9]
    checks = {}
    for name, interleaved in (("rotary", False), ("rotary interleaved", True)):
        results = rotary(query, key, positions, cos_sin, interleaved, backend=TRITON)
        for result, x in zip(results, (query, key)):
            pairs = x[..., :64].double().unflatten(-1, (32, 2) if interleaved else (2, 32))
            numbers = pairs if interleaved else pairs.mT
            turned = torch.view_as_complex(numbers.contiguous()) * torch.polar(
                torch.ones_like(angles), angles
            )[positions].unsqueeze(1)
            parts = torch.view_as_real(turned)
            turned = (parts if interleaved else parts.mT).flatten(-2)
            expected = torch.cat((turned, x[..., 64:].double()), dim=-1)
            checks[f"{name} {'query' if x is query else 'key'}"] = _rounded(result, expected)
    return checks


def _check_gated(dtype: torch.dtype, size: int, device: torch.device) -> dict[str, Any]:
    x = torch.randn(33, 2 * size, device=device).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    erf = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
    return {
        "silu": _rounded(silu_and_mul(x, backend=TRITON), F.silu(gate) * up),
        "gelu": _rounded(gelu_and_mul(x, backend=TRITON), F.gelu(gate, approximate="tanh") * up),
        "gelu by erf": _rounded(gelu_and_mul(x, "none", backend=TRITON), erf * up),
    }


def _check_grouped(dtype: torch.dtype, size: int, device: torch.device) -> dict[str, Any]:
    checks = {}
    for rows in (8, 40) if size < 1000 else (8, 300, 4000):
        experts, depth, width = 6, size // 2 + 5 * (rows == 40), size // 2
        starts = torch.randint(rows + 1, (experts + 1,)).sort().values
        starts[0], starts[-1] = 0, rows
        x = torch.randn(rows, depth, device=device).to(dtype)
        weight = (torch.randn(experts, width, depth, device=device) / depth**0.5).to(dtype)
        result = grouped_matmul(x, weight, starts.to(device), backend=TRITON)
        expected = torch.cat(
            [
                x[start:stop].double() @ weight[expert].double().T
                for expert, (start, stop) in enumerate(pairwise(starts.tolist()))
            ]
        )
        checks[f"grouped {rows} rows"] = _rounded(result, expected)
    return checks


def _check_draws(logits: torch.Tensor, device: torch.device) -> dict[str, Any]:
    rows = len(logits)

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([SETTINGS[i % len(SETTINGS)].get(name, default) for i in range(rows)]).to(dtype)

    columns = {
        "temperature": column("temperature", 1.0, torch.float32),
        "top_k": column("top_k", 0, torch.int32),
        "top_p": column("top_p", 1.0, torch.float32),
        "min_p": column("min_p", 0.0, torch.float32),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,)),
        "positions": torch.randint(0, 2**40, (rows,)),
    }
    expected = top_k_top_p_sample(logits, **columns, backend="torch")
    on_device = {name: values.to(device) for name, values in columns.items()}
    tokens = top_k_top_p_sample(logits.to(device), **on_device, backend=TRITON).cpu()
    apart = float((tokens != expected).double().mean())
    return {"passed": apart <= DRAWS_APART, "difference": apart, "tolerance": DRAWS_APART}
