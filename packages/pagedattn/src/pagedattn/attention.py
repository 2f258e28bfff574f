"""Storing keys and values in a paged cache, and attention over it."""

from __future__ import annotations

import torch

from pagedattn.backends import ScoreOptions, backend_name, load_backend
from pagedattn.batch import AttentionBatch
from pagedattn.layout import CACHE_DTYPE_NAMES, CACHE_DTYPES, FP8

# Scores divided by less would leave float32.
SMALLEST_CAP = 1e-30


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Store new tokens' keys and values in one layer's cache, in place.

    `key` and `value` are `[tokens, kv_heads, head_dim]` of the cache's dtype, `cache` is
    `[num_blocks, 2, kv_heads, block_size, head_dim]`, `slots` int64 `[tokens]` (block · block_size +
    offset; -1 stores nothing). No slot may occur twice.

    A float8_e4m3fn cache takes float32, float16 or bfloat16 and stores x / scale, rounded, and cut to
    ±448; `kv_scales` float32 `[2, kv_heads]` holds the keys' and the values' scale of each head, and None
    means 1. Raises ValueError when shapes, dtypes or devices do not fit together.
    """
    _check_cache(cache)
    expected = (slots.shape[0], cache.shape[2], cache.shape[4])
    if key.shape != expected or value.shape != expected:
        raise ValueError(
            f"key and value must be [tokens, kv_heads, head_dim] = {expected}, "
            f"not {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key.dtype != value.dtype or not _dtypes_fit(key.dtype, cache.dtype):
        raise ValueError(f"key is {key.dtype}, value {value.dtype}, the cache {cache.dtype}")
    _check_scales(kv_scales, cache)
    if slots.dtype != torch.int64:
        raise ValueError(f"slots must be torch.int64, not {slots.dtype}")
    _check_device(cache.device, key=key, value=value, slots=slots)
    if expected[0]:
        load_backend(backend_name(cache.device, backend)).write_kv(key, value, cache, slots, kv_scales)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their sequences' cached keys and values.

    `query` is `[tokens, q_heads, head_dim]` and `cache` `[num_blocks, 2, kv_heads, block_size,
    head_dim]`, of one dtype, but that a float8_e4m3fn cache goes with any query; `q_heads` is a
    multiple of `kv_heads`, and query head h reads KV head `h // (q_heads // kv_heads)`. The keys and values
    of all new tokens must have been written: a sequence may read what another one's new tokens wrote.
    Returns `[tokens, q_heads, head_dim]`, in `out` when given.

    The score of query position p against key position j ≤ p is `scale` · q·k, then

    - `soft_cap` c: c · tanh(score / c);
    - `alibi_slopes` `[q_heads]`: + slope · (j - p);
    - `window` w: only the w newest positions, p - w < j ≤ p, count; older blocks are not read;
    - `sinks` `[q_heads]`: a logit a head, below inf, that joins the softmax's denominator and has no value.

    `kv_scales` are those that `write_kv` was given for a float8_e4m3fn cache.

    `backend` overrides OCTAVO_ATTENTION_BACKEND, which overrides the device's default. Raises
    ValueError when shapes, dtypes or devices do not fit together or the back end's name is unknown,
    BackendUnavailable when it cannot run here.
    """
    _check_cache(cache)
    _check_query(query, cache, batch)
    _check_options(query, window, soft_cap, alibi_slopes, sinks)
    _check_scales(kv_scales, cache)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    elif out.shape != query.shape or out.dtype != query.dtype or out.device != query.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"query {tuple(query.shape)} {query.dtype} on {query.device}"
        )
    if 0 in out.stride() and out.numel() > 1 and _overlaps(out):
        raise ValueError(f"out has elements that share memory: strides {out.stride()}")
    if query.shape[0]:
        options = ScoreOptions(scale, window, soft_cap, alibi_slopes, sinks, kv_scales)
        load_backend(backend_name(cache.device, backend)).attend(query, cache, batch, options, out)
    return out


def _check_cache(cache: torch.Tensor) -> None:
    if cache.ndim != 5 or cache.shape[1] != 2 or not cache.is_contiguous():
        raise ValueError(
            "cache must be one layer's contiguous [num_blocks, 2, kv_heads, block_size, head_dim], "
            f"not {tuple(cache.shape)} with strides {cache.stride()}"
        )
    if cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"a KV cache holds {CACHE_DTYPE_NAMES}, not {cache.dtype}")


def _check_query(query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch) -> None:
    kv_heads, block_size, head_dim = cache.shape[2:]
    if query.ndim != 3 or query.shape[0] != batch.num_tokens or query.shape[2] != head_dim:
        raise ValueError(
            f"query must be [tokens, q_heads, head_dim] = [{batch.num_tokens}, …, {head_dim}], "
            f"not {list(query.shape)}"
        )
    if query.shape[1] == 0 or query.shape[1] % kv_heads:
        raise ValueError(f"{query.shape[1]} query heads do not divide among {kv_heads} KV heads")
    if not _dtypes_fit(query.dtype, cache.dtype):
        raise ValueError(f"query is {query.dtype}, the cache {cache.dtype}")
    _check_device(cache.device, query=query, batch=batch.lengths)
    if batch.max_length > batch.block_table.shape[1] * block_size:
        raise ValueError(
            f"max_length {batch.max_length} does not fit {batch.block_table.shape[1]} "
            f"block_table columns of {block_size} tokens"
        )


def _check_options(
    query: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be a whole number of at least 1 or None, not {window}")
    if soft_cap is not None and not SMALLEST_CAP <= soft_cap < float("inf"):
        raise ValueError(f"soft_cap must be finite and at least {SMALLEST_CAP} or None, not {soft_cap}")
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            if per_head.shape != query.shape[1:2]:
                raise ValueError(f"{name} must be [{query.shape[1]}], not {list(per_head.shape)}")
            _check_device(query.device, **{name: per_head})


def _dtypes_fit(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    if cache_dtype == FP8:
        return dtype in CACHE_DTYPES and dtype != FP8
    return dtype == cache_dtype


def _check_scales(kv_scales: torch.Tensor | None, cache: torch.Tensor) -> None:
    if kv_scales is None:
        return
    if cache.dtype != FP8:
        raise ValueError(f"kv_scales belong to a float8_e4m3fn cache, not to {cache.dtype}")
    if kv_scales.shape != (2, cache.shape[2]) or kv_scales.dtype != torch.float32:
        raise ValueError(
            f"kv_scales must be float32 [2, {cache.shape[2]}], not {kv_scales.dtype} {list(kv_scales.shape)}"
        )
    _check_device(cache.device, kv_scales=kv_scales)


def _check_device(device: torch.device, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the cache on {device}")


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
