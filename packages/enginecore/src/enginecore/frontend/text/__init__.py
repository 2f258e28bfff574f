"""Text in and out of token ids: tokenisers, chat templates, streaming detokenisation, stop strings.

Imports no torch, and `tokenizers` and `jinja2` only when a tokenizer or a template is made.
"""
