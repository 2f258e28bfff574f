"""Rotary frequencies and their tables."""

import math

import torch

from enginecore.models.spec import RopeSpec


def cos_sin_table(spec: RopeSpec, positions: int) -> torch.Tensor:
    """Return float32 [positions, spec.dim]: cosines in the first half, sines in the second."""
    frequencies = inverse_frequencies(spec)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    scale = attention_scale(spec)
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Return float32 [spec.dim / 2]: radians a position, after scaling."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    frequencies = 1.0 / (spec.theta**exponents)
    settings = spec.parameters
    match spec.kind:
        case "linear":
            return frequencies / settings["factor"]
        case "factors":
            return frequencies / torch.tensor(settings["factors"], dtype=torch.float32)
        case "llama3":
            return _llama3(frequencies, spec)
        case "yarn":
            return _yarn(frequencies, spec)
    return frequencies


def attention_scale(spec: RopeSpec) -> float:
    """Return the factor on cosines and sines with which YaRN sharpens attention; 1 for other kinds."""
    if spec.kind != "yarn":
        return 1.0
    settings = spec.parameters
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor = settings["factor"]
    mscale, all_dims = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and all_dims:
        return _mscale(factor, mscale) / _mscale(factor, all_dims)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend between (Llama 3.1)."""
    settings = spec.parameters
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = settings["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / settings["factor"]


def _yarn(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Interpolate channels that turn slowly, keep those that turn fast (Peng et al., YaRN)."""
    settings = spec.parameters
    length = settings["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return spec.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = channel(settings.get("beta_fast") or 32)
    high = channel(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low or 0.001
    interpolate = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return interpolate * (frequencies / settings["factor"]) + (1 - interpolate) * frequencies
