"""Which slice of a dimension each rank holds."""

from typing import NamedTuple


class Shard(NamedTuple):
    """The half-open range [start, stop) of a full dimension that one rank holds."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, width: int) -> "Shard":
        """The range of features that these units make up, each `width` features long."""
        return Shard(self.start * width, self.stop * width)


class AttentionShard(NamedTuple):
    """The ranges of query heads and of key and value heads that one rank holds."""

    query: Shard
    kv: Shard

    def qkv(self, head_dim: int) -> tuple[Shard, Shard, Shard]:
        """The ranges of features in the query, key and value projections."""
        return self.query.scaled(head_dim), self.kv.scaled(head_dim), self.kv.scaled(head_dim)


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


def attention_shards(query_heads: int, kv_heads: int, ranks: int) -> list[AttentionShard]:
    """What each rank holds when grouped-query attention is cut for `ranks` ranks.

    Query heads go where the key and value head is that their group of query_heads / kv_heads attends to, and
    on every rank equally many attend to each head that it holds. With as many key and value heads as ranks,
    or more, whole groups are cut as evenly as they come. With fewer, each is held by several neighbouring
    ranks, as evenly as they come, which cut its group among themselves.

    Raises ValueError when heads make no equal groups, or there are more ranks than query heads.
    """
    if kv_heads < 1 or query_heads < kv_heads or query_heads % kv_heads:
        raise ValueError(
            f"{query_heads} query heads cannot share {kv_heads} key and value heads in groups of equal size"
        )
    if query_heads < ranks:
        raise ValueError(f"{query_heads} query heads cannot be cut for {ranks} ranks: a rank would have none")
    group = query_heads // kv_heads
    if kv_heads >= ranks:
        cuts = [shard(kv_heads, ranks, rank) for rank in range(ranks)]
        return [AttentionShard(cut.scaled(group), cut) for cut in cuts]

    shards: list[AttentionShard] = []
    for head in range(kv_heads):
        holders = shard(ranks, kv_heads, head).size
        for holder in range(holders):
            part = shard(group, holders, holder)
            query = Shard(head * group + part.start, head * group + part.stop)
            shards.append(AttentionShard(query, Shard(head, head + 1)))
    return shards


def padded_shard(length: int, ranks: int, rank: int) -> Shard:
    """What `rank` holds when `length` entries are padded to a multiple of `ranks` and cut equally.

    Every rank has room for ceil(length / ranks) entries. The range has the real ones only: on the last ranks
    there may be fewer, or none.
    """
    room = -(-length // ranks)
    return Shard(min(rank * room, length), min((rank + 1) * room, length))
