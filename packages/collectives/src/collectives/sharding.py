"""Which slice of a dimension each rank holds."""

from typing import NamedTuple


class Shard(NamedTuple):
    """The half-open range [start, stop) of a full dimension that one rank holds."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def shard(length: int, ranks: int, rank: int, units: int | None = None) -> Shard:
    """What `rank` holds when `length` features are cut for `ranks` ranks.

    Without `units` they are cut as evenly as they come: the first length % ranks ranks hold one more.

    With `units` they are made of that many units of equal size, such as attention heads, and a unit is never
    cut. With fewer units than ranks, each unit is held by the same number of neighbouring ranks.
    Raises ValueError when not every rank can hold equally many units, nor every unit be held equally often.
    """
    if units is None:
        share, extra = divmod(length, ranks)
        start = rank * share + min(rank, extra)
        return Shard(start, start + share + (rank < extra))
    if units < 1 or length % units:
        raise ValueError(f"{length} features cannot be made of {units} units (heads) of equal size")
    width = length // units
    if units % ranks == 0:
        held = units // ranks * width
        return Shard(rank * held, (rank + 1) * held)
    if ranks % units == 0:
        unit = rank // (ranks // units)
        return Shard(unit * width, (unit + 1) * width)
    raise ValueError(
        f"{units} units (heads) cannot be given to {ranks} ranks evenly: one must be a multiple of the other"
    )


def padded_shard(length: int, ranks: int, rank: int) -> Shard:
    """What `rank` holds when `length` entries are padded to a multiple of `ranks` and cut equally.

    Every rank has room for ceil(length / ranks) entries. The range has the real ones only: on the last ranks
    there may be fewer, or none.
    """
    room = -(-length // ranks)
    return Shard(min(rank * room, length), min((rank + 1) * room, length))
