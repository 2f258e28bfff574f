"""Coordinator of the ranks and servers that share the requests of one model."""
