"""Rank grids, communicators and tensor-parallel layers."""

from collectives.communicator import Communicator, LocalCommunicator, ReduceOp, TorchCommunicator
from collectives.grid import Axis, Coordinates, Grid
from collectives.layers import ColumnParallelLinear, Matmul, ParallelLayer, ParallelLinear, RowParallelLinear
from collectives.sharding import Shard, padded_shard, shard
from collectives.vocabulary import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "Communicator",
    "Coordinates",
    "Grid",
    "LocalCommunicator",
    "Matmul",
    "ParallelLMHead",
    "ParallelLayer",
    "ParallelLinear",
    "ReduceOp",
    "RowParallelLinear",
    "Shard",
    "TorchCommunicator",
    "VocabParallelEmbedding",
    "padded_shard",
    "shard",
]
