"""Executors: they run the core's steps on workers, in this process or in others."""
