# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""float8_e4m3fn codes in registers, from and to wider types.

A code is sign, four bits of exponent with a bias of 7, three of fraction; 0x7f and 0xff are NaN and there is
no infinity (Micikevicius et al., https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def widen_fp8(codes, HARDWARE: tl.constexpr):
    """uint8 codes as float16, exactly.

    sm_89 and newer convert two codes an instruction (HARDWARE). Elsewhere the exponent and fraction bits
    are moved to where float16 has its own, whose bias is 8 greater, subnormals included.
    """
    if HARDWARE:
        wide = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = codes.to(tl.uint16)
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        moved = tl.where((bits & 0x7F) == 0x7F, 0x7E00, moved).to(tl.uint16)
        wide = moved.to(tl.float16, bitcast=True) * 256.0
    return wide


@triton.jit
def round_to_fp8(x):
    """float32 as uint8 codes: cut to ±448, rounded to nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    cut = tl.minimum(tl.abs(x), FP8_MAX)
    cut_bits = cut.to(tl.uint32, bitcast=True)
    # Adding just under half a step carries into the kept bits where rounding goes up.
    normal = ((cut_bits + 0x7FFFF + ((cut_bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Beside 2^14 a float32's last bit is worth 2^-9, the step of subnormals.
    subnormal = (cut + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(cut < 0.015625, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)
