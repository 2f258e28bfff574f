"""A byte tokenizer: a token's id is its byte, no two bytes ever join, so every other character is split."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, EOT, PAD = 256, 257, 258, 259
ROLES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def backend() -> Tokenizer:
    """Return it; ids 256 to 259 are <bos>, <eos>, <eot>, <pad>. Nothing is put around a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<eot>", "<pad>"])
    return tokenizer


def save(path: Path, **settings: Any) -> None:
    """Write it to the folder `path`, with `settings` (such as chat_template) in tokenizer_config.json."""
    backend().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({**ROLES, **settings}))
