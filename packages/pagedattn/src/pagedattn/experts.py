"""Mixtures of experts: the choice of experts, products with their weights, and the sum of their results."""

from __future__ import annotations

import torch

from pagedattn.backends import Groups, Routing, backend_of
from pagedattn.linear import pack_linear
from pagedattn.packed import PackedExperts, pack_stacked, stack_experts
from pagedattn.quantized import Quantization

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pack_experts(
    weight: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    quantization: Quantization | None = None,
    group_size: int | None = None,
    backend: str | None = None,
) -> PackedExperts:
    """Lay weights `[experts, outputs, inputs]` out, once, for `grouped_linear`; stored as `dtype`.

    The dtype is by default the weight's own; it rounds where it is narrower. `quantization` and `group_size`
    store each expert's weight as `pack_linear` would.

    Raises ValueError when the weight has not three dimensions, a dtype is not float32, float16 or bfloat16,
    or what `pack_linear` raises it for.
    """
    if weight.ndim != 3:
        raise ValueError(f"weight must be [experts, outputs, inputs], not {list(weight.shape)}")
    for given in (weight.dtype, weight.dtype if dtype is None else dtype):
        if given not in _DTYPES:
            raise ValueError(f"weights of experts are float32, float16 or bfloat16, not {given}")
    if quantization is not None or group_size is not None:
        if not len(weight):
            raise ValueError("there are no experts to quantise")
        packed = (
            pack_linear(expert, dtype, quantization=quantization, group_size=group_size, backend=backend)
            for expert in weight
        )
        return stack_experts(packed, len(weight))
    dtype = weight.dtype if dtype is None else dtype
    return pack_stacked(weight.detach(), dtype, backend_of(weight.device, backend).linear_panel(dtype, None))


def top_k_softmax(logits: torch.Tensor, k: int, *, normalise: bool, backend: str | None = None) -> Routing:
    """Choose the k experts of the highest softmax probability for each token of `logits` `[tokens, experts]`.

    Probabilities are computed in float32. With `normalise` a token's k weights are divided by their sum. Of
    equal logits those of lower experts go first on the `cpu` back end; a NaN is chosen last, and makes the
    weights of its token NaN.

    Raises ValueError when `logits` has not two dimensions or no floating-point dtype, or k is not between 1
    and the number of experts.
    """
    if logits.ndim != 2 or not logits.dtype.is_floating_point:
        raise ValueError(f"logits must be numbers [tokens, experts], not {logits.dtype} {list(logits.shape)}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be between 1 and the {logits.shape[1]} experts, not {k}")
    return backend_of(logits.device, backend).top_k_softmax(logits, k, normalise)


def group_by_expert(
    experts: torch.Tensor,
    num_experts: int,
    *,
    loads: torch.Tensor | None = None,
    backend: str | None = None,
) -> Groups:
    """Sort the rows that tokens become where each goes to k `experts`, int32 `[tokens, k]`, by expert.

    Experts must be in `[0, num_experts)`, which is not checked. `loads`, int64 `[num_experts]`, is increased
    by the rows of each expert, in place.

    Raises ValueError when shapes, dtypes or devices do not fit together.
    """
    if experts.ndim != 2 or experts.dtype != torch.int32 or num_experts < 1:
        raise ValueError(
            f"experts must be int32 [tokens, k] of at least one, "
            f"not {experts.dtype} {list(experts.shape)} of {num_experts}"
        )
    if loads is not None and (
        loads.shape != (num_experts,)
        or loads.dtype != torch.int64
        or loads.device != experts.device
        or not loads.is_contiguous()
    ):
        raise ValueError(
            f"loads must be contiguous int64 [{num_experts}] on {experts.device}, "
            f"not {loads.dtype} {list(loads.shape)} on {loads.device}"
        )
    return backend_of(experts.device, backend).group_by_expert(experts, num_experts, loads)


def grouped_linear(
    x: torch.Tensor,
    weight: PackedExperts,
    starts: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply each expert's rows by its weight: x[index] · weightᵀ, summed in float32 and rounded once.

    `starts` int32 `[experts + 1]` rises from 0 to the number of rows: rows `starts[e]:starts[e + 1]` are for
    expert e, and there may be none. `x` is `[rows, inputs]`, or has the rows that `index`, int32 `[rows]`,
    picks, which is not checked. Returns `[rows, outputs]` of x's dtype, or writes `out` of that shape and
    dtype, which must not overlap `x`, and returns it. On the `cpu` back end each row's result has the bits
    that `linear` gives it with its expert's weight, whatever rows are beside it.

    Raises ValueError when shapes, dtypes or devices do not fit together.
    """
    if x.ndim != 2 or x.shape[1] != weight.inputs or x.dtype not in _DTYPES:
        raise ValueError(
            f"x must be [rows, {weight.inputs}] of float32, float16 or bfloat16, "
            f"not {x.dtype} {list(x.shape)}"
        )
    if starts.shape != (weight.count + 1,) or starts.dtype != torch.int32:
        raise ValueError(
            f"starts must be int32 [{weight.count + 1}] for {weight.count} experts, "
            f"not {starts.dtype} {list(starts.shape)}"
        )
    if index is not None and (index.ndim != 1 or index.dtype != torch.int32):
        raise ValueError(f"index must be int32 [rows], not {index.dtype} {list(index.shape)}")
    if len({x.device, weight.device, starts.device, x.device if index is None else index.device}) > 1:
        raise ValueError(f"x is on {x.device}, weight on {weight.device}, starts on {starts.device}")
    _check_out(out, (len(x if index is None else index), weight.outputs), x)
    return backend_of(x.device, backend).grouped_linear(x, weight, starts, index, out)


def weighted_sum(
    results: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the sum of weights[t, i] · results[places[t, i]] over i for each token t, `[tokens, width]`.

    `results` is `[rows, width]`; `places`, int32 `[tokens, k]`, must be rows of it, which is not checked;
    `weights` is float32 `[tokens, k]`. The sum is in float32 and in the order of k, and rounded once to the
    dtype of `results`. `out`, of that shape and dtype, is written and returned if it is given.

    Raises ValueError when shapes, dtypes or devices do not fit together.
    """
    if results.ndim != 2 or not results.dtype.is_floating_point:
        raise ValueError(f"results must be numbers [rows, width], not {results.dtype} {list(results.shape)}")
    if places.ndim != 2 or places.dtype != torch.int32:
        raise ValueError(f"places must be int32 [tokens, k], not {places.dtype} {list(places.shape)}")
    if weights.shape != places.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights must be float32 {list(places.shape)}, not {weights.dtype} {list(weights.shape)}"
        )
    if not results.device == places.device == weights.device:
        raise ValueError(
            f"results are on {results.device}, places on {places.device}, weights on {weights.device}"
        )
    _check_out(out, (len(places), results.shape[1]), results)
    return backend_of(results.device, backend).weighted_sum(results, places, weights, out)


def _check_out(out: torch.Tensor | None, shape: tuple[int, int], like: torch.Tensor) -> None:
    if out is not None and (out.shape != shape or out.dtype != like.dtype or out.device != like.device):
        raise ValueError(
            f"out must be {list(shape)} {like.dtype} on {like.device}, "
            f"not {list(out.shape)} {out.dtype} on {out.device}"
        )
