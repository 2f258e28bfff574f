import numpy as np
import pytest
import torch

from pagedattn import grouped_matmul
from pairwise import parametrize_pairs

BACKENDS = ["torch", None]


def expected(x, weight, starts):
    x, weight = x.double().numpy(), weight.double().numpy()
    out = np.zeros((x.shape[0], weight.shape[1]))
    for expert in range(len(weight)):
        rows = slice(int(starts[expert]), int(starts[expert + 1]))
        out[rows] = x[rows] @ weight[expert].T
    return out


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@parametrize_pairs(starts_dtype=[torch.int32, torch.int64], dtype=list(TOLERANCE), backend=BACKENDS)
def test_each_expert_multiplies_its_rows(starts_dtype, dtype, backend):
    torch.manual_seed(0)
    x, weight = torch.randn(11, 48).to(dtype), (torch.randn(4, 33, 48) / 48**0.5).to(dtype)
    for starts in ([0, 3, 3, 4, 11], [0, 0, 0, 0, 11], [0, 11, 11, 11, 11], [0, 1, 2, 3, 11]):
        result = grouped_matmul(x, weight, torch.tensor(starts, dtype=starts_dtype), backend=backend)
        assert (result.dtype, result.shape) == (dtype, (11, 33))
        wanted = expected(x, weight, starts)
        difference = np.abs(result.double().numpy() - wanted).max()
        assert difference < TOLERANCE[dtype] * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    starts = torch.zeros(5, dtype=torch.int32)
    assert grouped_matmul(torch.zeros(0, 8), torch.zeros(4, 6, 8), starts, backend=backend).shape == (0, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_weights_may_be_slices(backend):
    wide, stacked = torch.randn(5, 24), torch.randn(3, 20, 16)
    x, weight, starts = wide[:, 4:12], stacked[:, 3:9, :8], torch.tensor([0, 2, 2, 5])
    result = grouped_matmul(x, weight, starts, backend=backend)
    assert np.abs(result.double().numpy() - expected(x, weight, starts)).max() < 1e-5


def test_what_does_not_fit_is_refused():
    x, weight, starts = torch.zeros(5, 8), torch.zeros(3, 6, 8), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"not \[5, 8\] and \[3, 8, 6\]"):
        grouped_matmul(x, weight.mT, starts)
    with pytest.raises(ValueError, match=r"int32 or int64 \[4\] for 3 experts, not torch.int32 \[3\]"):
        grouped_matmul(x, weight, starts[1:])
    with pytest.raises(ValueError, match=r"\[4\] for 3 experts, not torch.float32 \[4\]"):
        grouped_matmul(x, weight, starts.float())
    with pytest.raises(ValueError, match=r"they are torch\.float32, torch\.float16"):
        grouped_matmul(x, weight.half(), starts)
