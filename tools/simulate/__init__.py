"""Replays request traces through the real scheduler and allocator, on a device that is a formula."""
