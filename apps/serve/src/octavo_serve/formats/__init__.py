"""Formats of other APIs than chat completions: bodies to those of a chat, and answers from its deltas."""
