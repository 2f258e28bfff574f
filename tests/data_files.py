"""Paths of the files in `tests/data`, which its README describes."""

from pathlib import Path

DATA = Path(__file__).parent / "data"

STORIES = DATA / "demo-stories"
"""A trained Llama of 869,504 parameters in bfloat16, with its byte-level tokenizer and chat template."""

AZURE_CONVERSATION = DATA / "traces" / "azure_conversation.csv"
AZURE_CODE = DATA / "traces" / "azure_code.csv"
MOONCAKE_CONVERSATION = DATA / "traces" / "mooncake_conversation.jsonl"

TLS = DATA / "tls"
"""A certificate for localhost and its key."""

JSON_SCHEMA_SUITE = DATA / "json-schema-suite" / "draft2020-12.json"
"""Schemas of JSON-Schema-Test-Suite by file, with values and whether each is valid."""
