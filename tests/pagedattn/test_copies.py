import pytest
import torch

from pagedattn import KVLayout, allocate, copy_blocks

BACKENDS = ["torch", None]
LAYERS, HEADS, BLOCK, DIM = 3, 2, 4, 6


def cache(num_blocks, dtype=torch.float32, seed=0):
    tensor = allocate(KVLayout(LAYERS, HEADS, DIM, BLOCK, dtype), num_blocks)
    torch.manual_seed(seed)
    return tensor.copy_(torch.randn(tensor.shape).to(dtype))


def bits(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str
)
def test_blocks_of_all_layers_go_to_another_cache(dtype, backend):
    source, target = cache(7, dtype), cache(5, dtype, seed=1)
    before = target.clone()
    copy_blocks(source, target, torch.tensor([[6, 0], [2, 4], [2, 1]]), backend=backend)
    for block, origin in {0: source[:, 6], 1: source[:, 2], 4: source[:, 2]}.items():
        assert torch.equal(bits(target[:, block]), bits(origin))
    for block in (2, 3):
        assert torch.equal(bits(target[:, block]), bits(before[:, block]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_within_a_cache_all_is_read_before_anything_is_written(backend):
    tensor = cache(6)
    before = tensor.clone()
    copy_blocks(tensor, tensor, torch.tensor([[0, 1], [1, 2], [2, 0], [5, 4]]), backend=backend)
    for block, origin in enumerate([2, 0, 1, 3, 5, 5]):
        assert torch.equal(tensor[:, block], before[:, origin])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_pairs(backend):
    tensor = cache(2)
    before = tensor.clone()
    copy_blocks(tensor, tensor, torch.zeros(0, 2, dtype=torch.int64), backend=backend)
    assert torch.equal(tensor, before)


def test_what_does_not_fit_is_refused():
    source, target, pairs = cache(4), cache(2), torch.tensor([[3, 1]])
    with pytest.raises(ValueError, match="source block 4 does not exist: there are 4"):
        copy_blocks(source, target, torch.tensor([[4, 1]]))
    with pytest.raises(ValueError, match="target block -1 does not exist: there are 2"):
        copy_blocks(source, target, torch.tensor([[3, -1]]))
    with pytest.raises(ValueError, match="target block 1 occurs in 2 pairs"):
        copy_blocks(source, target, torch.tensor([[3, 1], [0, 0], [2, 1]]))
    with pytest.raises(ValueError, match="may differ in num_blocks only"):
        copy_blocks(source, target[:2], pairs)
    with pytest.raises(ValueError, match=r"source is torch.float32, target torch.float16"):
        copy_blocks(source, target.half(), pairs)
    with pytest.raises(ValueError, match="target must be a contiguous"):
        copy_blocks(source, target[:, :1], pairs)
    with pytest.raises(ValueError, match=r"int64 \[n, 2\] on the CPU, not torch.int32 \[1, 2\]"):
        copy_blocks(source, target, pairs.int())
