"""Traces of recorded traffic: arrival times, prompt and output lengths, and shared prefixes."""

import csv
import json
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HASH_BLOCK = 512
"""Tokens that one of Mooncake's `hash_ids` stands for; the last of a prompt may stand for fewer."""

FILES = {
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "mooncake-conversation": "mooncake_conversation_trace.jsonl",
    "mooncake-synthetic": "mooncake_synthetic_trace.jsonl",
}
"""File names of the whole traces."""

EXCERPTS = {
    "azure-conv": "azure_conversation.csv",
    "azure-code": "azure_code.csv",
    "mooncake-conversation": "mooncake_conversation.jsonl",
}
"""File names in tests/data/traces of the first 100 or 200 requests of a trace."""

_EXCERPTS_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "traces"

_NUM_IDS = 2**31 - 1


@dataclass(frozen=True)
class Trace:
    """Requests in the order they came; arrays of one element a request.

    arrivals: seconds since the first, float64.
    prompts, outputs: tokens, int64, at least 1 each.
    hash_ids: one array of ids a request, one id for every 512 prompt tokens and one for the rest. Equal ids
        stand for equal tokens after an equal prefix. None if the trace does not say what its prompts share.
    """

    name: str
    arrivals: NDArray[np.float64]
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    hash_ids: list[NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.arrivals.size

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return int((self.prompts + self.outputs).max())

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Token ids of a prompt, int32 [n]: the same on every run.

        Each hash id yields 512 ids of its own, so prompts share exactly what the trace says they share.
        Without hash ids every prompt begins with an id of its own, so that no two share a block.
        """
        size = int(self.prompts[index])
        if self.hash_ids is None:
            first = index * ((_NUM_IDS - int(self.prompts.max())) // len(self))
            return np.arange(first, first + size, dtype=np.int32)
        starts = self.hash_ids[index] * HASH_BLOCK
        ids = (starts[:, None] + np.arange(HASH_BLOCK)).astype(np.int32).ravel()
        if size <= ids.size:
            return ids[:size]
        # The token that `in_whole_blocks` adds.
        return np.append(ids, np.int32(_NUM_IDS))

    def first(self, seconds: float) -> "Trace":
        """The requests of the first `seconds`."""
        count = int(np.searchsorted(self.arrivals, seconds, side="right"))
        return replace(
            self,
            arrivals=self.arrivals[:count],
            prompts=self.prompts[:count],
            outputs=self.outputs[:count],
            hash_ids=self.hash_ids and self.hash_ids[:count],
        )

    def faster(self, rate: float) -> "Trace":
        """The same requests in `1 / rate` of the time."""
        return replace(self, arrivals=self.arrivals / rate)

    def cut(self, max_output: int) -> "Trace":
        """The same requests, none of which generates more than `max_output` tokens."""
        return replace(self, outputs=np.minimum(self.outputs, max_output))

    def in_whole_blocks(self) -> "Trace":
        """The same requests with prompts filled up to whole 512-token blocks, and one token more.

        A cache holds full blocks only, and never all of a prompt. Filled up, the last block of a prompt can
        be shared too; Mooncake's figures count it so.
        """
        if self.hash_ids is None:
            raise ValueError(f"{self.name} has no hash ids, so it has no 512-token blocks to fill up")
        blocks = np.array([ids.size for ids in self.hash_ids])
        return replace(self, prompts=blocks * HASH_BLOCK + 1)


def path_of(name: str, folder: Path | None) -> Path:
    """Return the file of the trace `name`: the whole one in `folder`, or without a folder its excerpt.

    Raises FileNotFoundError, saying where the whole traces come from, if there is none.
    """
    if folder is None and name in EXCERPTS:
        return _EXCERPTS_FOLDER / EXCERPTS[name]
    path = None if folder is None else folder / FILES[name]
    if path is None or not path.exists():
        missing = f"{name} has no excerpt in the repository" if path is None else f"{path} is not there"
        raise FileNotFoundError(
            f"{missing}: tools/simulate.md says where the whole traces come from; --folder names their folder"
        )
    return path


def load(path: Path) -> Trace:
    """Read a trace: Azure's CSV or Mooncake's JSON lines, by the file's ending.

    Raises ValueError if it is neither, is empty, or is not in the order of arrival.
    """
    match path.suffix:
        case ".csv":
            trace = _azure(path)
        case ".jsonl":
            trace = _mooncake(path)
        case _:
            raise ValueError(f"{path} is neither Azure's .csv nor Mooncake's .jsonl")
    if any(later < earlier for earlier, later in pairwise(trace.arrivals.tolist())):
        raise ValueError(f"the requests in {path} are not in the order of their arrival")
    if min(trace.prompts.min(), trace.outputs.min()) < 1:
        raise ValueError(f"a request in {path} has an empty prompt or output")
    return trace


def _azure(path: Path) -> Trace:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no requests")
    # Seven decimals of a second, of which Python takes six.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return Trace(
        path.stem,
        np.array([(time - times[0]).total_seconds() for time in times]),
        np.array([int(row["ContextTokens"]) for row in rows]),
        np.array([int(row["GeneratedTokens"]) for row in rows]),
    )


def _mooncake(path: Path) -> Trace:
    """Fields timestamp (ms), input_length, output_length, hash_ids."""
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    if not rows:
        raise ValueError(f"{path} holds no requests")
    for number, row in enumerate(rows, 1):
        blocks = -(-row["input_length"] // HASH_BLOCK)
        if len(row["hash_ids"]) != blocks:
            raise ValueError(
                f"line {number} of {path} has {len(row['hash_ids'])} hash ids, and {row['input_length']} "
                f"tokens are {blocks} blocks of {HASH_BLOCK}"
            )
    return Trace(
        path.stem,
        np.array([row["timestamp"] - rows[0]["timestamp"] for row in rows]) / 1000,
        np.array([row["input_length"] for row in rows]),
        np.array([row["output_length"] for row in rows]),
        [np.array(row["hash_ids"]) for row in rows],
    )
