"""vLLM's side of `scheduler.py`: what a decode step costs in its own scheduler, called without an engine."""

import gc
import json
import logging
import os
import random
import statistics
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

VOCABULARY = 32000
STOP = 2


def decode_step_ms(rows: int, steps: int, *, prompt: int, block_size: int, batched_tokens: int) -> float:
    """The median milliseconds of `schedule` and `update_from_output` when each of `rows` decodes a token.

    The prompts are of `prompt` tokens and up to a block more. Prefix caching is on, and hashes as it does by
    default; statistics and asynchronous scheduling are off.
    """
    max_tokens = steps + rows // 8
    length = prompt + block_size + max_tokens
    scheduler = _scheduler(rows, length, block_size, batched_tokens)
    # As vLLM's engine does once it has started.
    gc.collect()
    gc.freeze()
    draw = random.Random(0)
    for request in _requests(rows, max_tokens, prompt, block_size, draw):
        scheduler.add_request(request)
    output_type = import_module("vllm.v1.outputs").ModelRunnerOutput
    taken: list[float] = []
    while len(taken) < steps:
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        ids = list(plan.num_scheduled_tokens)
        output = output_type(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[_sampled(scheduler.requests[name], draw) for name in ids],
        )
        sampled = time.perf_counter()
        scheduler.update_from_output(plan, output)
        if plan.total_num_scheduled_tokens == len(ids) == rows:
            taken.append(1e3 * (time.perf_counter() - sampled + planned - begin))
        else:
            assert not taken
    gc.unfreeze()
    return statistics.median(taken)


def _sampled(request: Any, draw: random.Random) -> list[int]:
    """A token, or none while the prompt is not yet in to its end."""
    whole = request.num_computed_tokens >= request.num_tokens
    return [draw.randrange(STOP + 1, VOCABULARY)] if whole else []


def _scheduler(rows: int, length: int, block_size: int, batched_tokens: int) -> Any:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = import_module("vllm.config")
    kv = import_module("vllm.v1.kv_cache_interface")
    torch = import_module("torch")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        model = config.ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length
        )
    cache = config.CacheConfig(block_size=block_size, enable_prefix_caching=True)
    vllm_config = config.VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=batched_tokens,
            max_model_len=length,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    cache.num_gpu_blocks = rows * (2 + length // block_size)
    layer = kv.FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return import_module("vllm.v1.core.sched.scheduler").Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=kv.KVCacheConfig(
            num_blocks=cache.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[kv.KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=import_module("vllm.v1.structured_output").StructuredOutputManager(
            vllm_config
        ),
        block_size=block_size,
        log_stats=False,
    )


def _requests(rows: int, max_tokens: int, prompt: int, block_size: int, draw: random.Random) -> list[Any]:
    utils = import_module("vllm.v1.core.kv_cache_utils")
    hash_function = import_module("vllm.utils.hashing").sha256
    utils.init_none_hash(hash_function)
    hasher = utils.get_request_block_hasher(block_size, hash_function)
    params = import_module("vllm").SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP])
    request = import_module("vllm.v1.request").Request
    return [
        request(
            request_id=str(row),
            prompt_token_ids=[draw.randrange(STOP + 1, VOCABULARY) for _ in range(prompt + row % block_size)],
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        for row in range(rows)
    ]


_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131072,
    "vocab_size": VOCABULARY,
}
"""No model runs, but vLLM wants to read one's configuration."""
