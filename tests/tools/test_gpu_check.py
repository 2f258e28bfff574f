"""The GPU check where there is no GPU: in Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_check import __main__ as gpu_check

PROGRAM = Path(__file__).parents[2] / "tools" / "gpu_check.py"


@pytest.mark.slow
def test_all_that_needs_no_gpu_passes_interpreted(tmp_path):
    output = tmp_path / "report.json"
    command = [sys.executable, PROGRAM, "--interpret", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(output.read_text())
    failed = {
        (name, check): entry
        for name, part in report["parts"].items()
        for check, entry in part.get("checks", {}).items()
        if not entry["passed"]
    }
    assert failed == {}
    assert (done.returncode, report["passed"], report["interpreted"]) == (0, True, True), done.stderr
    parts = report["parts"]
    skipped = {name for name, part in parts.items() if part.get("skipped") == "needs a GPU"}
    assert skipped == {"graph", "decode", "prefill", "ops_speed"}
    assert all(len(parts[name]["checks"]) >= 5 for name in ("attention", "cache", "ops", "sampling"))
    assert "Paris" in parts["engine"]["checks"]["answer"]["answer"]


def test_a_part_that_raises_or_fails_is_recorded_and_stops_no_other(monkeypatch, capsys):
    def fail(interpret):
        return {"checks": {"one": {"passed": True}, "two": {"passed": False}}}

    def break_(interpret):
        raise RuntimeError("no such kernel")

    module = type(sys)("gpu_check.made_up")
    module.fail, module.break_ = fail, break_
    module.pass_ = lambda interpret: {"checks": {"one": {"passed": interpret}}}
    monkeypatch.setitem(sys.modules, "gpu_check.made_up", module)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = {"first": "break_", "second": "fail", "third": "pass_"}
    monkeypatch.setattr(gpu_check, "PARTS", {name: ("made_up", made) for name, made in names.items()})
    assert gpu_check.main(["--interpret"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [part["passed"] for part in report["parts"].values()] == [False, False, True]
    assert "RuntimeError: no such kernel" in report["parts"]["first"]["error"]
    assert gpu_check.main(["--interpret", "--parts", "third"]) == 0


def test_without_a_device_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main([])
    assert exit_.value.code == 2
    assert "--interpret checks the kernels without one" in capsys.readouterr().err
