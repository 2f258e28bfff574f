"""A chat's deltas as blocks one after the other: reasoning, text, tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from enginecore.frontend.openai import Delta


@dataclass(slots=True)
class Block:
    """A part of an answer."""

    kind: Literal["text", "reasoning", "call"]
    index: int
    """Its place in the answer."""
    text: str = ""
    """So far; the JSON text of a call's arguments."""
    call_id: str = ""
    name: str = ""
    """Of a call."""


class Opened(NamedTuple):
    """A block begins."""

    block: Block


class Grew(NamedTuple):
    """A block has more text."""

    block: Block
    piece: str


class Closed(NamedTuple):
    """A block has ended."""

    block: Block


Change = Opened | Grew | Closed


class Blocks:
    """Puts the deltas of one sample together."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, deltas: Iterable[Delta]) -> list[Change]:
        """Take deltas; return what they change."""
        changes: list[Change] = []
        for delta in deltas:
            if delta.get("reasoning_content"):
                self._grow("reasoning", delta["reasoning_content"], changes)
            if delta.get("content"):
                self._grow("text", delta["content"], changes)
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                if "name" in function:
                    self._begin(Block("call", 0, call_id=piece["id"], name=function["name"]), changes)
                if function.get("arguments"):
                    self._grow("call", function["arguments"], changes)
        return changes

    def finish(self) -> list[Change]:
        """Close the last block."""
        changes: list[Change] = []
        self._close(changes)
        return changes

    def _grow(self, kind: Literal["text", "reasoning", "call"], piece: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Block(kind, 0), changes)
        assert self._open is not None
        self._open.text += piece
        changes.append(Grew(self._open, piece))

    def _begin(self, block: Block, changes: list[Change]) -> None:
        self._close(changes)
        block.index = len(self.blocks)
        self.blocks.append(block)
        self._open = block
        changes.append(Opened(block))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Closed(self._open))
            self._open = None
