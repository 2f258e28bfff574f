"""Host columns to a device, in one copy where there is a way to go."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 4
"""Elements of four or eight bytes after which a column may begin: Triton compiles a kernel anew for pointers
that are not multiples of 16 bytes."""


def upload_integers(
    columns: Sequence[np.ndarray], device: torch.device, dtype: type[np.integer] = np.int64
) -> list[Tensor]:
    """Return int columns [k] of any lengths as `dtype` on the device."""
    return _upload(columns, dtype, device)


def upload_floats(columns: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return float columns [k] of any lengths as float32 on the device."""
    return _upload(columns, np.float32, device)


def _upload(columns: Sequence[np.ndarray], dtype: type, device: torch.device) -> list[Tensor]:
    if device.type == "cpu":
        return [torch.from_numpy(np.array(column, dtype)) for column in columns]
    starts = np.cumsum([0, *(-(-len(column) // _ALIGNED) * _ALIGNED for column in columns)]).tolist()
    joined = np.zeros(starts[-1], dtype)
    for start, column in zip(starts, columns):
        joined[start : start + len(column)] = column
    on_device = torch.from_numpy(joined).to(device, non_blocking=True)
    return [on_device[start : start + len(column)] for start, column in zip(starts, columns)]
