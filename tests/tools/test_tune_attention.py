"""The attention tuner without a GPU: measurements made up, launches planned on the CPU."""

import pytest
import torch

import tune_attention
from pagedattn.triton_backend.plan import Device, make_plan
from pagedattn.triton_backend.tiles import LaunchShape, parse_record, rule_of_thumb
from tune_attention import (
    Measurement,
    Problem,
    candidates,
    make_problem,
    merge_record,
    tune,
    with_shape,
)


def test_tuning_records_the_fastest_shape_that_does_not_spill():
    def measure_for(problem):
        def measure(shape):
            if shape.num_stages == 7:
                return None  # does not fit
            spills = int(shape.keys == 128)
            return Measurement(100.0 - shape.keys - shape.num_warps + shape.num_stages, spills)

        return measure

    device = Device((9, 0), 132)
    (entry,) = tune([Problem("decode", 80, "bfloat16")], device, "a device", measure_for)
    assert entry == {
        "capability": [9, 0],
        "kind": "decode",
        "head_dim": 128,
        "itemsize": 2,
        "rows": 64,
        "keys": 64,
        "num_warps": 8,
        "num_stages": 2,
        "device": "a device",
        "microseconds": 30.0,
    }
    assert parse_record([entry]) == {((9, 0), "decode", 128, 2): LaunchShape(64, 64, 8, 2)}
    with pytest.raises(ValueError, match="no launch shape fits"):
        list(
            tune([Problem("decode", 80, "bfloat16")], device, "a device", lambda problem: lambda shape: None)
        )


def test_the_rule_is_among_the_candidates():
    problem = Problem("prefill", 128, "float8_e4m3fn")
    assert candidates(problem, (9, 0))[0] == rule_of_thumb("prefill", 128, 1, (9, 0))


def test_a_new_measurement_replaces_the_old_of_its_key():
    old = [
        {"capability": [9, 0], "kind": "prefill", "head_dim": 64, "itemsize": 2, "keys": 32},
        {"capability": [9, 0], "kind": "decode", "head_dim": 64, "itemsize": 2, "keys": 32},
    ]
    new = [{"capability": [9, 0], "kind": "prefill", "head_dim": 64, "itemsize": 2, "keys": 64}]
    assert merge_record(old, new) == [old[1], new[0]]


def test_tuning_launches_what_serving_would(monkeypatch):
    monkeypatch.setitem(tune_attention.SEQUENCES, "decode", [(1, 40)] * 3)
    problem = Problem("decode", 32, "float8_e4m3fn")
    query, cache, batch = make_problem(problem, torch.device("cpu"))
    assert (query.shape, query.dtype, cache.dtype) == ((3, 32, 32), torch.bfloat16, torch.float8_e4m3fn)
    assert batch.num_decodes == 3
    plan = make_plan(query, cache, batch, None, Device((9, 0), 132))
    plan = with_shape(plan, problem, LaunchShape(64, 32, 8, 2))
    assert (plan.short.keys, plan.short.num_warps, plan.short.num_stages) == (32, 8, 2)
    assert plan.long is None
