"""Rank grids, communicators, and layers and experts that are spread over ranks.

Names are imported when they are first used, so that processes that use only the grid, the placement of
experts or the ring load no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.communicator import Communicator, LocalCommunicator, ReduceOp
    from collectives.experts import Compute, ExpertDispatcher
    from collectives.gloo import GlooCommunicator
    from collectives.grid import Axis, Coordinates, Grid
    from collectives.layers import (
        ColumnParallelLinear,
        Matmul,
        ParallelLayer,
        ParallelLinear,
        RowParallelLinear,
    )
    from collectives.nccl import NcclCommunicator, NcclError
    from collectives.placement import ExpertPlacement, load_placements, save_placements
    from collectives.rendezvous import Backend, Communicators, RendezvousError, connect, make_communicators
    from collectives.ring import PeerDied, RingBroadcast, RingClosed, RingError, RingReader, RingTimeout
    from collectives.sharding import AttentionShard, Shard, attention_shards, padded_shard, shard
    from collectives.shared_group import RankLost
    from collectives.shared_memory import SharedMemoryCommunicator
    from collectives.vocabulary import ParallelLMHead, VocabParallelEmbedding

_NAMES = {
    "communicator": ("Communicator", "LocalCommunicator", "ReduceOp"),
    "experts": ("Compute", "ExpertDispatcher"),
    "gloo": ("GlooCommunicator",),
    "grid": ("Axis", "Coordinates", "Grid"),
    "layers": ("ColumnParallelLinear", "Matmul", "ParallelLayer", "ParallelLinear", "RowParallelLinear"),
    "nccl": ("NcclCommunicator", "NcclError"),
    "placement": ("ExpertPlacement", "load_placements", "save_placements"),
    "rendezvous": ("Backend", "Communicators", "RendezvousError", "connect", "make_communicators"),
    "ring": ("PeerDied", "RingBroadcast", "RingClosed", "RingError", "RingReader", "RingTimeout"),
    "shared_group": ("RankLost",),
    "shared_memory": ("SharedMemoryCommunicator",),
    "sharding": ("AttentionShard", "Shard", "attention_shards", "padded_shard", "shard"),
    "vocabulary": ("ParallelLMHead", "VocabParallelEmbedding"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AttentionShard",
    "Axis",
    "Backend",
    "ColumnParallelLinear",
    "Communicator",
    "Communicators",
    "Compute",
    "Coordinates",
    "ExpertDispatcher",
    "ExpertPlacement",
    "GlooCommunicator",
    "Grid",
    "LocalCommunicator",
    "Matmul",
    "NcclCommunicator",
    "NcclError",
    "ParallelLMHead",
    "ParallelLayer",
    "ParallelLinear",
    "PeerDied",
    "RankLost",
    "ReduceOp",
    "RendezvousError",
    "RingBroadcast",
    "RingClosed",
    "RingError",
    "RingReader",
    "RingTimeout",
    "RowParallelLinear",
    "Shard",
    "SharedMemoryCommunicator",
    "VocabParallelEmbedding",
    "attention_shards",
    "connect",
    "load_placements",
    "make_communicators",
    "padded_shard",
    "save_placements",
    "shard",
]


def __getattr__(name: str) -> Any:
    """Import a public name's module (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
