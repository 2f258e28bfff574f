"""Embedding and head against the unsharded table, over vocabularies that do not divide."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from collectives import Communicator, LocalCommunicator, ParallelLMHead, VocabParallelEmbedding

pytestmark = pytest.mark.xdist_group("ranks")

VOCABULARIES = (320, 321, 5)  # with 5, the last of four ranks holds padding only


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_on_every_rank(check, ranks):
    ranks.assert_passed(check)


def ranks_embedding_finds_every_id(comm: Communicator):
    for vocabulary in VOCABULARIES:
        for dtype in (torch.float32, torch.bfloat16):
            table = draw(vocabulary, 8).to(dtype)
            embedding = VocabParallelEmbedding(vocabulary, 8, comm=comm, dtype=dtype)
            embedding.load_weight(table)
            for ids in (
                torch.arange(vocabulary),
                torch.tensor([[vocabulary - 1, 0], [2, 2]]),
                torch.empty(0).int(),
            ):
                assert torch.equal(embedding(ids), F.embedding(ids, table))


def ranks_head_gives_every_logit_and_no_padding(comm: Communicator):
    for vocabulary in VOCABULARIES:
        weight, bias, x = draw(vocabulary, 8), draw(vocabulary, seed=1), draw(2, 3, 8, seed=2)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            head = ParallelLMHead(vocabulary, 8, bias=True, comm=comm, dtype=dtype)
            head.load_weight(weight)
            head.load_bias(bias)
            logits = head(x.to(dtype))
            assert logits.shape == (2, 3, vocabulary)
            torch.testing.assert_close(
                logits.float(), F.linear(x, weight, bias), rtol=tolerance, atol=tolerance
            )
        assert head(x[:0].to(dtype)).shape == (0, 3, vocabulary)


def ranks_padding_does_not_win_over_negative_logits(comm: Communicator):
    head = ParallelLMHead(321, 1, comm=comm)
    head.load_weight(-1 - torch.arange(321.0).view(321, 1) / 321)
    logits = head(torch.ones(4, 1))
    assert logits.max() == -1.0
    assert logits.argmax(-1).tolist() == [0, 0, 0, 0]


def ranks_tied_head_multiplies_with_the_embedding(comm: Communicator):
    table, x = draw(321, 8), draw(3, 8, seed=1)
    embedding, head = VocabParallelEmbedding(321, 8, comm=comm), ParallelLMHead(321, 8, comm=comm)
    head.tie(embedding)
    embedding.load_weight(table)
    torch.testing.assert_close(head(x), F.linear(x, table), rtol=1e-5, atol=1e-5)


def test_padding_rows_are_zero(seat):
    shards = []
    for rank in range(4):
        embedding = VocabParallelEmbedding(5, 1, comm=seat(rank, 4))
        embedding.load_weight(torch.arange(1.0, 6.0).view(5, 1))
        shards.append(embedding.weight.flatten().tolist())
    assert shards == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_tied_weight_is_one_tensor_and_loaded_in_one_place():
    embedding = VocabParallelEmbedding(7, 4, comm=LocalCommunicator())
    head = ParallelLMHead(7, 4, bias=True, comm=LocalCommunicator())
    head.tie(embedding)
    assert head.weight is embedding.weight
    with pytest.raises(ValueError, match="tied to an embedding"):
        head.load_weight(draw(7, 4))
    embedding.load_weight(draw(7, 4))
    assert torch.equal(head.weight, draw(7, 4))


def test_only_what_has_the_same_size_can_be_tied():
    head = ParallelLMHead(7, 4, comm=LocalCommunicator())
    with pytest.raises(ValueError, match=r"\(7, 4, 1\) and \(8, 4, 1\)"):
        head.tie(VocabParallelEmbedding(8, 4, comm=LocalCommunicator()))


def test_alone_the_head_is_one_matmul():
    head = ParallelLMHead(5, 4, comm=LocalCommunicator())
    y = draw(2, 5)
    head.matmul = lambda x, weight, bias: y
    assert head(draw(2, 4)) is y
    assert head.weight.shape == (5, 4)


def test_alone_an_id_out_of_the_vocabulary_is_an_error():
    embedding = VocabParallelEmbedding(5, 4, comm=LocalCommunicator())
    embedding.load_weight(draw(5, 4))
    with pytest.raises(IndexError):
        embedding(torch.tensor([5]))


def test_wrong_shapes_are_refused_with_both_shapes(seat):
    with pytest.raises(
        ValueError, match=r"VocabParallelEmbedding weight: expected shape \[5, 4\], got \[6, 4\]"
    ):
        VocabParallelEmbedding(5, 4, comm=seat(0, 2)).load_weight(draw(6, 4))
    head = ParallelLMHead(5, 4, bias=True, comm=seat(0, 2))
    with pytest.raises(ValueError, match=r"ParallelLMHead weight: expected shape \[5, 4\], got \[3, 4\]"):
        head.load_weight(draw(3, 4))
    with pytest.raises(ValueError, match=r"ParallelLMHead bias: expected shape \[5\], got \[6\]"):
        head.load_bias(draw(6))
    with pytest.raises(ValueError, match="made without a bias"):
        ParallelLMHead(5, 4, comm=seat(0, 2)).load_bias(draw(5))
