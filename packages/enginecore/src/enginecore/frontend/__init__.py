"""Runs in the caller's or HTTP process: validation, text, output processing, OpenAI's format. No torch."""
