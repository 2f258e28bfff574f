"""Sampling: parameters (without torch) and the sampler (with it)."""
