"""Rank grids, communicators, and layers and experts that are spread over ranks."""

from collectives.communicator import Communicator, LocalCommunicator, ReduceOp
from collectives.experts import Compute, ExpertDispatcher, ExpertPlacement
from collectives.grid import Axis, Coordinates, Grid
from collectives.layers import ColumnParallelLinear, Matmul, ParallelLayer, ParallelLinear, RowParallelLinear
from collectives.nccl import NcclCommunicator, NcclError
from collectives.rendezvous import Backend, Communicators, RendezvousError, connect, make_communicators
from collectives.ring import PeerDied, RingBroadcast, RingClosed, RingError, RingReader, RingTimeout
from collectives.sharding import AttentionShard, Shard, attention_shards, padded_shard, shard
from collectives.torch_communicator import TorchCommunicator
from collectives.vocabulary import ParallelLMHead, VocabParallelEmbedding

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
    "Grid",
    "LocalCommunicator",
    "Matmul",
    "NcclCommunicator",
    "NcclError",
    "ParallelLMHead",
    "ParallelLayer",
    "ParallelLinear",
    "PeerDied",
    "ReduceOp",
    "RendezvousError",
    "RingBroadcast",
    "RingClosed",
    "RingError",
    "RingReader",
    "RingTimeout",
    "RowParallelLinear",
    "Shard",
    "TorchCommunicator",
    "VocabParallelEmbedding",
    "attention_shards",
    "connect",
    "make_communicators",
    "padded_shard",
    "shard",
]
