"""OpenAI-compatible HTTP server for Octavo."""
