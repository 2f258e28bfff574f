"""The Triton back end's decisions: tile sizes, splits, and shared prefixes read once."""

from itertools import product

import pytest
import torch
from pagedattn_reference import make_case

from pagedattn.triton_backend.cascade import prefix_pays
from pagedattn.triton_backend.plan import Device, make_plan
from pagedattn.triton_backend.split import choose_splits
from pagedattn.triton_backend.tiles import LaunchShape, choose_tiles, parse_record


def test_tiles_hold_whole_queries_in_powers_of_two():
    # The whole product, since it takes no time.
    for max_query, group, itemsize, head_dim in product(
        (1, 3, 8), (1, 3, 8, 16, 71), (1, 2, 4), (32, 80, 256)
    ):
        for kind, queries in (("decode", max_query), ("prefill", 100 * max_query)):
            tiles = choose_tiles(
                kind,
                max_query=queries,
                group=group,
                head_dim=head_dim,
                itemsize=itemsize,
                capability=(9, 0),
            )
            assert tiles.queries >= (max_query if kind == "decode" else 1)
            assert tiles.heads >= 1
            assert tiles.queries * tiles.heads <= tiles.rows
            for size in (tiles.rows, tiles.keys, tiles.head_dim):
                assert size >= 16
                assert size & (size - 1) == 0
            assert tiles.head_dim >= head_dim


def test_a_record_is_read_by_device_kind_and_sizes():
    entry = {
        "capability": [9, 0],
        "kind": "decode",
        "head_dim": 128,
        "itemsize": 2,
        "rows": 64,
        "keys": 32,
        "num_warps": 4,
        "num_stages": 7,
    }
    assert parse_record([entry]) == {((9, 0), "decode", 128, 2): LaunchShape(64, 32, 4, 7)}
    with pytest.raises(ValueError, match="two entries"):
        parse_record([entry, entry])


def test_splits_fill_the_device_but_leave_worthwhile_pieces():
    assert choose_splits(programs=8, context=100_000, processors=132) == 33
    assert choose_splits(programs=1, context=100_000, processors=132) == 64
    assert choose_splits(programs=8, context=1024, processors=132) == 4
    assert choose_splits(programs=8, context=200, processors=132) == 1


def test_a_full_device_still_cuts_contexts_that_would_keep_it_waiting():
    assert choose_splits(programs=512, context=4096, processors=132) == 1
    assert choose_splits(programs=512, context=32_768, processors=132) == 8


def plan_of(sequences, window=None, **changes):
    case = make_case(sequences, head_dim=16, block_size=64, **changes)
    return make_plan(case.query, case.cache, case.batch, window, Device((9, 0), 132))


def test_decodes_in_a_mixed_batch_are_split_and_prefills_are_not():
    plan = plan_of([(1, 2000), (1, 30), (20, 40)])
    assert (plan.num_short, plan.short_tokens) == (2, 2)
    assert plan.splits == 7  # of 2000 positions at least 256 each
    assert plan.long is not None
    assert plan_of([(20, 40), (12, 2000)]).parts == 1


def test_drafts_to_be_verified_are_split_as_decodes_are():
    plan = plan_of([(5, 2000), (1, 30), (8, 40)])
    assert (plan.num_short, plan.short_tokens, plan.splits) == (3, 14, 7)
    assert plan.long is None
    assert plan.short.queries >= 8


def test_only_the_window_is_split():
    assert plan_of([(1, 2000)], window=300).splits == 1
    assert plan_of([(1, 2000)], window=600).splits == 2


def test_a_prefix_is_shared_when_that_saves_more_than_it_costs():
    # 8 KV heads of 128 float16: 4 KiB a position. 63 of 64 readings saved, 2048 positions each: 516 MiB.
    pays = {
        "num_seqs": 64,
        "query_tiles": 1,
        "shared": 2048,
        "position_bytes": 4096,
        "partial_bytes": 8 << 20,
    }
    assert prefix_pays(**pays)
    assert not prefix_pays(**pays | {"shared": 64})  # 16 MiB, as much as a launch
    assert not prefix_pays(**pays | {"num_seqs": 2})  # 8 MiB
    assert not prefix_pays(**pays | {"partial_bytes": 300 << 20})
    assert not prefix_pays(**pays | {"query_tiles": 64})


def test_a_shared_prefix_of_little_use_or_under_a_window_is_left_alone():
    assert plan_of([(1, 200), (1, 300)], shared_prefix=128).prefix is None
    case = make_case([(1, 2100)] * 3, head_dim=16, block_size=64, shared_prefix=2048)
    query = torch.zeros(3, 4096, 16)  # so many heads that the prefix pays
    cache = torch.zeros(1, 2, 2048, 64, 16)
    device = Device((9, 0), 132)
    plan = make_plan(query, cache, case.batch, None, device)
    assert (plan.shared, plan.prefix_splits, plan.splits) == (2048, 1, 1)
    assert make_plan(query, cache, case.batch, 4000, device).prefix is None
