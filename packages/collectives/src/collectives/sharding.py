"""The range of a dimension that each rank holds."""

from typing import NamedTuple


class Shard(NamedTuple):
    """The half-open range [start, stop) of a full dimension that one rank holds."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, width: int) -> "Shard":
        """Return the range in features of `width` to each unit, such as a head."""
        return Shard(self.start * width, self.stop * width)


class AttentionShard(NamedTuple):
    """The ranges of query heads and of key and value heads that one rank holds."""

    query: Shard
    kv: Shard

    def qkv(self, head_dim: int) -> tuple[Shard, Shard, Shard]:
        """Return the ranges of features in the query, key and value projections."""
        return self.query.scaled(head_dim), self.kv.scaled(head_dim), self.kv.scaled(head_dim)


def shard(length: int, ranks: int, rank: int) -> Shard:
    """Return the range that `rank` holds of `length` features cut as evenly as they come for `ranks` ranks.

    The first length % ranks ranks hold one feature more.
    """
    share, extra = divmod(length, ranks)
    start = rank * share + min(rank, extra)
    return Shard(start, start + share + (rank < extra))


def attention_shards(query_heads: int, kv_heads: int, ranks: int) -> list[AttentionShard]:
    """Return the heads that each rank holds when grouped-query attention is cut for `ranks` ranks.

    Each KV head serves a group of query_heads / kv_heads query heads, and a rank holds the KV heads of its
    query heads. With as many KV heads as ranks, or more, whole groups are cut as evenly as they come. With
    fewer, each KV head is replicated on adjacent ranks, as evenly as they come, which cut its group among
    themselves.

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
    """Return the entries of `rank` when `length` are padded to a multiple of `ranks` and cut equally.

    Every rank has room for ceil(length / ranks) entries. The range leaves out the padding: on the last ranks
    it may be shorter, or empty.
    """
    room = -(-length // ranks)
    return Shard(min(rank * room, length), min((rank + 1) * room, length))
