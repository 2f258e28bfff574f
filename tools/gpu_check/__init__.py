"""Checks and measurements of the GPU kernels and of the engine on them."""
