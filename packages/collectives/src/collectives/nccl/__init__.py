"""Communicators over NCCL's C library, without torch.distributed."""

from collectives.nccl.communicator import NcclCommunicator
from collectives.nccl.library import NcclError, NcclLibrary

__all__ = ["NcclCommunicator", "NcclError", "NcclLibrary"]
