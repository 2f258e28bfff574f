"""Self-attention over the paged cache."""

from torch import Tensor, nn

from collectives import ColumnParallelLinear, Communicator, RowParallelLinear, attention_shards
from enginecore.worker.models.norms import RMSNorm
from enginecore.worker.models.parallel import all_reduce_of
from enginecore.worker.models.rope import Rotation
from enginecore.worker.models.spec import DecoderSpec
from pagedattn import AttentionBatch, attend, rotary, write_kv


class Attention(nn.Module):
    """Fused QKV projection, rotation, attention, output projection; heads are cut over the ranks."""

    def __init__(self, spec: DecoderSpec, window: int | None, comm: Communicator) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.window = window
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.soft_cap = spec.attention_cap
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        shards = attention_shards(spec.num_heads, spec.num_kv_heads, comm.size)
        self.kv_heads = shards[comm.rank].kv.size
        """KV heads that this rank holds, and has a cache for."""
        self.qkv = ColumnParallelLinear(
            spec.hidden_size,
            [count * spec.head_dim for count in heads],
            cuts=[held.qkv(spec.head_dim) for held in shards],
            bias=spec.qkv_bias,
            comm=comm,
        )
        self.o = RowParallelLinear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            cuts=[held.query.scaled(spec.head_dim) for held in shards],
            bias=spec.o_bias,
            comm=comm,
            reduce=all_reduce_of(comm),
        )
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_offset) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_offset) if spec.qk_norm else None

    @property
    def step_width(self) -> int:
        """Elements for each token of projections, what is rotated of them, and mixed values together."""
        return 2 * sum(self.qkv.local_parts) + self.qkv.local_parts[0]

    def forward(self, x: Tensor, rotation: Rotation | None, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Return the attention output of x [tokens, hidden], writing its keys and values to `cache`."""
        parts = self.qkv(x).split(self.qkv.local_parts, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = rotary(query, key, rotation.positions, rotation.cos_sin)
        write_kv(key, value, cache, batch.slots)
        mixed = attend(query, cache, batch, scale=self.scale, window=self.window, soft_cap=self.soft_cap)
        return self.o(mixed.flatten(1))
