"""The layout of ranks over data, pipeline and tensor parallelism."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["dp", "pp", "tp", "ep"]


class Coordinates(NamedTuple):
    """The coordinates of a rank on each axis of a grid."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Grid:
    """`dp` × `pp` × `tp` ranks; tp varies fastest, then pp, then dp.

    Adjacent ranks share a tp group, because tensor parallelism communicates most and adjacent ranks are most
    often on one host. Experts are spread over all ranks that hold the same layers: an ep group is dp × tp for
    one pipeline stage.

    Raises ValueError when an axis is less than 1.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, length in (("dp", self.dp), ("pp", self.pp), ("tp", self.tp)):
            if length < 1:
                raise ValueError(f"a grid needs at least 1 rank along each axis, got {axis}={length}")

    @property
    def size(self) -> int:
        """World size: the number of ranks in the grid."""
        return self.dp * self.pp * self.tp

    @property
    def ep(self) -> int:
        """Ranks over which the experts of one layer are spread."""
        return self.dp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`. ValueError when it is not in the grid."""
        self._check_inside("rank", rank, self.size)
        return Coordinates(rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp)

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates. ValueError when they are not in the grid."""
        self._check_inside("dp", dp, self.dp)
        self._check_inside("pp", pp, self.pp)
        self._check_inside("tp", tp, self.tp)
        return (dp * self.pp + pp) * self.tp + tp

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return all groups along `axis`, each ascending: every rank of the grid is in exactly one.

        A rank's index in its group is its coordinate on that axis; in an ep group it is dp * tp_size + tp.
        """
        dp, pp, tp = range(self.dp), range(self.pp), range(self.tp)
        match axis:
            case "tp":
                return [[self.rank(d, p, t) for t in tp] for d in dp for p in pp]
            case "pp":
                return [[self.rank(d, p, t) for p in pp] for d in dp for t in tp]
            case "dp":
                return [[self.rank(d, p, t) for d in dp] for p in pp for t in tp]
            case "ep":
                return [[self.rank(d, p, t) for d in dp for t in tp] for p in pp]
            case _:
                raise ValueError(f"axis must be dp, pp, tp or ep, got {axis!r}")

    def group(self, axis: Axis, rank: int) -> list[int]:
        """Return the group along `axis` that contains `rank`."""
        self.coordinates(rank)
        return next(group for group in self.groups(axis) if rank in group)

    def _check_inside(self, name: str, value: int, length: int) -> None:
        if not 0 <= value < length:
            raise ValueError(f"{name} must be in [0, {length}) for {self}, got {value}")
