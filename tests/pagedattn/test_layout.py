import pytest
import torch

from pagedattn import KVLayout, allocate


def test_bytes_per_block_counts_keys_and_values_of_all_layers():
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
    assert layout.bytes_per_block == 30 * 2 * 3 * 16 * 64 * 2


def test_allocate_gives_zeroed_layers_of_blocks():
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype=torch.float16)
    cache = allocate(layout, 5)
    assert cache.shape == (2, 5, 2, 3, 4, 8)
    assert cache.dtype == torch.float16
    assert not cache.any()
    assert cache.numel() * cache.itemsize == 5 * layout.bytes_per_block


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_sizes_below_one_are_refused_by_name(name):
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        KVLayout(**sizes, dtype=torch.float32)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"not torch\.float8_e5m2"):
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.float8_e5m2)


def test_an_empty_cache_is_refused():
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="at least one block"):
        allocate(layout, 0)
