"""OpenAI's completion and chat formats: request bodies in, answers out. Plain dicts, no web framework."""
