"""The sampler and the settings it reads; it knows nothing of steps or of the runner."""
