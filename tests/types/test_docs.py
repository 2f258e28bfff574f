"""What docs/ says of files and names is so."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["add-a-family", "add-a-metric", "add-a-sampling-parameter", "write-a-policy"]
SOURCES = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_files_are_there(name):
    named = re.findall(r"`((?:packages|apps|tests|tools|docs)/[\w./-]+)`", page(name))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("name", "followed"),
    [("add-a-sampling-parameter", "repetition_penalty"), ("add-a-metric", "preemptions")],
)
def test_what_is_followed_stands_in_the_files_of_the_table_alone(name, followed):
    table = set(re.findall(r"^\| `([\w./-]+)` \|", page(name), re.MULTILINE))
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if re.search(rf"\b_?{followed}\b", path.read_text(encoding="utf-8"))
    }
    assert table == found


def test_the_worked_family_is_the_one_in_the_tree():
    program = re.findall(r"```python\n(.*?)```", page("add-a-family"), re.DOTALL)[0]
    source = (ROOT / "packages/enginecore/src/enginecore/worker/models/families/starcoder2.py").read_text()
    assert program.partition("\n_NAMES")[2] == source.partition("\n_NAMES")[2]
    made = {}
    exec(program, made)
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
    spec = made["starcoder2"](sizes | {"num_attention_heads": 2, "max_position_embeddings": 16})
    assert (spec.norm, spec.gated, spec.mlp_bias) == ("layer", False, True)


def test_the_processors_do_what_they_say(tmp_path, monkeypatch):
    import numpy as np
    import torch

    from enginecore import Positions, SamplingParams
    from enginecore.errors import RequestError
    from enginecore.logits_processors import check_request, load_classes

    function, kind = re.findall(r"```python\n(.*?)```", page("write-a-processor"), re.DOTALL)
    made = {}
    exec(function.partition("\n\n\nllm")[0], made)
    assert made["no_repeats"]([2, 0], torch.ones(4)).tolist() == [-torch.inf, 1, -torch.inf, 1]
    (tmp_path / "steering_of_docs.py").write_text(kind)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    classes = load_classes(["steering_of_docs:Steer"], str(tmp_path))
    with pytest.raises(RequestError, match="extra_args: Steer: steer_by must be a number, got 'x'"):
        wrong = SamplingParams(extra_args={"steer_by": "x"})
        check_request(wrong, classes, ["Steer"], takes_callables=False)
    processor = classes[0](4, 3, torch.device("cpu"))
    assert processor.add(2, SamplingParams(extra_args={"steer_to": 1, "steer_by": 2.5}))
    assert not processor.add(3, SamplingParams())
    rows = np.array([2], np.int32)
    changed = processor.apply(torch.zeros(1, 3), Positions(rows, rows, rows, torch.zeros(4, 9).int()))
    assert changed.tolist() == [[0, 2.5, 0]]


def test_the_policy_does_what_it_says(tmp_path, monkeypatch):
    from batchsched import Request
    from enginecore.core.policies import load_policy

    program = re.findall(r"```python\n(.*?)```", page("write-a-policy"), re.DOTALL)[0]
    (tmp_path / "paying.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    policy = load_policy("paying:Paying")
    ranks = [
        policy.rank(Request(i, [1], 1, priority=priority), i, 0.0) for i, priority in enumerate([1, 0, 2, -1])
    ]
    assert sorted(range(4), key=ranks.__getitem__) == [1, 3, 0, 2]
