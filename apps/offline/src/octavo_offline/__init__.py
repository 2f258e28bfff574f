"""Batch runs of Octavo from the command line."""
