"""Scheduling policies of somebody else: `scheduling_policy=module:Class`."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

import byte_tokenizer
from checkpoints import llama_config, save_random
from enginecore import LLM, AsyncEngine, SamplingParams
from enginecore.config import make_config
from enginecore.errors import ConfigError, EngineDeadError, OctavoError, RequestError

OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128}
MODULE = """
    from batchsched import Fcfs

    class Inherits(Fcfs):
        pass

    class Last(Fcfs):
        def rank(self, request, arrival_index, arrival):
            return -arrival_index

    class Priorities(Fcfs):
        def rank(self, request, arrival_index, arrival):
            return -request.priority

    class Refuses(Fcfs):
        def __init__(self):
            raise RuntimeError("not on a Monday")

    class Wants(Fcfs):
        def __init__(self, quantum):
            self.quantum = quantum

    class FailsLater(Fcfs):
        calls = 0
        def rank(self, request, arrival_index, arrival):
            FailsLater.calls += 1
            if FailsLater.calls > 6:
                raise RuntimeError("the seventh request\\nis unlucky")
            return arrival_index

    class NoPolicy:
        quantum = None

    def function():
        return Fcfs()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with policies in it."""
    path = tmp_path_factory.mktemp("policies")
    (path / "own_policies.py").write_text(textwrap.dedent(MODULE))
    (path / "broken_policies.py").write_text("class Half(:\n")
    (path / "needy_policies.py").write_text("import no_such_library\n")
    return path


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path.copy())


WRONG = {
    "own_policies:Missing": r"own_policies:Missing: module own_policies \(.*own_policies.py\) has no Missing",
    "own_polices:Last": "own_polices:Last: there is no module own_polices",
    "own_policies:function": "own_policies:function is a function, not a class",
    "own_policies:NoPolicy": "own_policies:NoPolicy is no policy, as it has no rank, victim, margin",
    "own_policies:Refuses": "own_policies:Refuses: .* failed: RuntimeError: not on a Monday",
    "own_policies:Wants": "own_policies:Wants: .* failed: TypeError: .*'quantum'",
    "broken_policies:Half": "broken_policies:Half: importing broken_policies failed: SyntaxError",
    "needy_policies:X": "needy_policies:X: .*no_such_library",
    "own_policies:": "own_policies:: write it as module:Name",
    "./own_policies.py:Last": "./own_policies.py:Last: write it as module:Name",
    "own_policies": "scheduling_policy must be one of fcfs, .*or module:Class, got 'own_policies'",
    "fifo": "scheduling_policy must be one of fcfs, .*got 'fifo'",
}


@pytest.mark.parametrize("reference", WRONG)
def test_a_policy_that_cannot_be_had_is_refused_before_the_model_loads(reference, tmp_path):
    save_random(llama_config(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=WRONG[reference]):
        LLM(str(tmp_path), scheduling_policy=reference, **OPTIONS)


def test_the_order_is_the_policys(model):
    def order(policy):
        llm = LLM(model, scheduling_policy=f"own_policies:{policy}", max_num_seqs=1, **OPTIONS)
        outputs = llm.generate(["a", "b", "c"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        return sorted(range(3), key=lambda index: outputs[index].metrics.finished_time)

    assert order("Inherits") == [0, 1, 2]
    assert order("Last") == [2, 1, 0]


def test_a_policy_of_ones_own_may_look_at_priorities(model):
    params = SamplingParams(max_tokens=2)
    engine = LLM(model, scheduling_policy="own_policies:Priorities", **OPTIONS).llm_engine
    engine.add_request("x", "abc", params, priority=3)
    engine = LLM(model, **OPTIONS).llm_engine
    with pytest.raises(RequestError, match="priority has no effect"):
        engine.add_request("x", "abc", params, priority=3)


def test_a_policy_that_fails_later_ends_the_engine_with_its_message(model):
    llm = LLM(model, scheduling_policy="own_policies:FailsLater", **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=3)
    llm.generate(["abc"] * 6, params)
    said = "the engine has ended: RuntimeError: the seventh request is unlucky"
    for _ in range(2):
        with pytest.raises(EngineDeadError) as told:
            llm.generate("abc", params)
        assert str(told.value) == said


@pytest.mark.slow
def test_in_a_core_process(model, capfd):
    async def scenario(policy, count):
        options = {"model": model, "scheduling_policy": policy, "max_rank_restarts": 0, **OPTIONS}
        engine = AsyncEngine(make_config(options))
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

        async def ask(index):
            async for output in engine.generate("abc", params, str(index)):
                last = output
            return last.finished

        async with asyncio.timeout(120):
            try:
                await engine.ready()
                return await asyncio.gather(*map(ask, range(count)), return_exceptions=True)
            finally:
                await engine.shutdown()

    assert asyncio.run(scenario("own_policies:Last", 3)) == [True] * 3
    with pytest.raises(OctavoError, match=WRONG["own_policies:Missing"]):
        asyncio.run(scenario("own_policies:Missing", 1))
    capfd.readouterr()
    told = asyncio.run(scenario("own_policies:FailsLater", 7))
    assert all("the seventh request is unlucky" in str(error) for error in told)
    assert "the seventh request" in capfd.readouterr().err


@pytest.mark.slow
def test_a_policy_that_fails_after_every_start_ends_all_requests_soon(model, caplog):
    async def scenario():
        engine = AsyncEngine(
            make_config({"model": model, "scheduling_policy": "own_policies:FailsLater", **OPTIONS})
        )
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

        async def ask(index):
            async for _ in engine.generate("abc", params, str(index)):
                pass

        async with asyncio.timeout(120):
            try:
                await engine.ready()
                return await asyncio.gather(*map(ask, range(30)), return_exceptions=True)
            finally:
                await engine.shutdown()

    told = asyncio.run(scenario())
    assert all("the seventh request is unlucky" in str(error) for error in told)
    # It was started twice: five restarts take half a minute.
    assert caplog.text.count("rank 0 has ended") == 2


@pytest.mark.parametrize("program", ["octavo-offline", "octavo-serve"])
def test_commands_answer_with_one_line(program, model, folder):
    arguments = ["--prompt", "a"] if program == "octavo-offline" else ["--port", "0"]
    command = [program, "--model", model, *arguments, "--scheduling-policy", "own_policies:Missing"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    line = ended.stderr.strip().splitlines()[-1]
    assert line.startswith(f"{program}: own_policies:Missing: module own_policies")
    assert "Traceback" not in ended.stderr
