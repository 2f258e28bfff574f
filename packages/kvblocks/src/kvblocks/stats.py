"""What has happened to blocks and in the prefix cache, in totals."""

from dataclasses import dataclass


@dataclass(slots=True)
class PoolStats:
    """Totals since the pool was made, in blocks.

    A block is lost when its content is given up: a published one by eviction or `reset`, any other by the
    release of its last reference. `lifetimes` is the sum of the seconds from their allocation until then.
    """

    allocated: int = 0
    published: int = 0
    evicted: int = 0
    lost: int = 0
    lifetimes: float = 0.0

    @property
    def mean_lifetime(self) -> float:
        """Seconds from a block's allocation until its content is lost; 0 as long as none is."""
        return self.lifetimes / self.lost if self.lost else 0.0


@dataclass(slots=True)
class CacheStats:
    """Tokens looked up in the prefix cache and tokens found there, once a request.

    A request that opens again after preemption finds its own blocks. That says nothing about sharing, so
    only its first opening counts. `restored` are those hits that came from the host tier.
    """

    queries: int = 0
    hits: int = 0
    restored: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that were found, 0 to 1."""
        return self.hits / self.queries if self.queries else 0.0
