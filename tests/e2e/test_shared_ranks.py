"""Servers that share ranks through an `octavo-coordinator`; experts that are placed anew meanwhile."""

import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import byte_tokenizer
from checkpoints import Oracle, llama_config, mixtral_config, save_random
from collectives import ExpertPlacement, save_placements
from enginecore import LLM, SamplingParams
from parallel_server import ParallelServer, by_rank, total
from server_process import LIMIT_S, wait_until

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--device", "cpu", "--max-model-len", "128", "--api-server-count", "1")
PROMPT = [5, 9, 77, 31, 8]
COMMANDS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    path = save_random(mixtral_config(), tmp_path_factory.mktemp("m-moe"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    """Start an octavo-coordinator; yield the flags of its address and key."""
    key = tmp_path_factory.mktemp("key") / "octavo.key"
    command = str(COMMANDS / "octavo-coordinator")
    subprocess.run([command, "--write-key", str(key)], check=True)
    for port in range(23400, 23500, 2):
        process = subprocess.Popen(
            [command, "--port", str(port), "--key-file", str(key)], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        if any("listening" in line for line in process.stderr):
            yield f"127.0.0.1:{port}", str(key)
            process.kill()
            process.wait()
            return
        process.wait()
    raise AssertionError("no two free ports beside each other")


def status(coordinator):
    address, key = coordinator
    command = [str(COMMANDS / "octavo-coordinator"), "--status", "--json", "--address", address]
    answer = subprocess.run([*command, "--key-file", key], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def start(stack, model, coordinator, *flags):
    address, key = coordinator
    shared = ("--coordinator", address, "--coordinator-key", key)
    return stack.enter_context(ParallelServer(model, *FLAGS, *shared, *flags, wait=False))


def wait_until_ready(*servers):
    for server in servers:
        wait_until(lambda server=server: httpx.get(f"{server.url}/health").status_code == 200)


def alone(model, max_tokens):
    """The text of one engine in this process."""
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == Oracle(model).greedy(PROMPT, max_tokens)[0]
    return output.outputs[0].text


def text_of(server, max_tokens):
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_each_rank_of_shared_experts_has_a_server_and_one_dies(experts, coordinator):
    expected = alone(experts, 100)
    flags = ("--data-parallel-size", "2", "--enable-expert-parallel", "--data-parallel-rank")
    with ExitStack() as stack:
        first, second = (start(stack, experts, coordinator, *flags, str(rank)) for rank in range(2))
        wait_until_ready(first, second)
        # One of them idles.
        assert text_of(second, 100) == expected
        found = []
        asking = threading.Thread(target=lambda: found.append(text_of(second, 100)))
        asking.start()
        wait_until(lambda: total(second.counts(), "octavo_num_requests_running") == 1)
        first.processes("rank")[0].kill()
        asking.join(LIMIT_S)
        assert found == [expected]
        wait_until_ready(first, second)
        assert text_of(first, 100) == expected
        waves = status(coordinator)["waves"]
        assert waves["group"] == 1
        assert waves["ended"] >= 1


def test_two_servers_of_two_ranks_each(dense, coordinator):
    expected = alone(dense, 20)
    flags = ("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-start-rank")
    with ExitStack() as stack:
        servers = [start(stack, dense, coordinator, *flags, str(rank)) for rank in (0, 2)]
        wait_until_ready(*servers)
        for server in servers:
            for _ in range(6):
                assert text_of(server, 20) == expected
        generated = [by_rank(server.counts(), "octavo_generation_tokens_total") for server in servers]
        assert generated == [{"0": 60, "1": 60}, {"2": 60, "3": 60}]
        known = status(coordinator)
        assert [rank["rank"] for rank in known["ranks"] if rank["ready"]] == [0, 1, 2, 3]
        assert len(known["frontends"]) == 2


def test_experts_are_placed_anew_while_a_request_runs(experts, tmp_path):
    expected = alone(experts, 110)
    file = tmp_path / "placement.json"
    count = mixtral_config().num_local_experts
    save_placements(file, [ExpertPlacement.even(count, 2)])
    flags = ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--expert-placement", str(file))
    with ParallelServer(experts, *FLAGS, *flags) as server:
        assert text_of(server, 110) == expected
        loads = httpx.get(f"{server.url}/expert_loads").json()
        assert [len(layer) for layer in loads] == [count] * len(loads)
        assert all(map(sum, loads))
        save_placements(file, [ExpertPlacement.balanced(layer, 2, redundant=1) for layer in loads])
        found = []
        asking = threading.Thread(target=lambda: found.append(text_of(server, 110)))
        asking.start()
        wait_until(lambda: total(server.counts(), "octavo_num_requests_running") == 1)
        assert httpx.post(f"{server.url}/expert_placement/reload").status_code == 202
        asking.join(LIMIT_S)
        assert found == [expected]
        assert server.logged("is up again") == 1
        # One that no rank can use is given up for the last that all could.
        file.write_text(json.dumps({"ranks": [[0], [1]]}))
        assert httpx.post(f"{server.url}/expert_placement/reload").status_code == 202
        wait_until(lambda: server.logged("is up again") == 2)
        assert server.logged("the new placement of experts is given up") == 1
        assert text_of(server, 110) == expected


def test_a_placement_is_read_again_only_where_there_is_one(dense):
    with ParallelServer(dense, *FLAGS) as server:
        answer = httpx.post(f"{server.url}/expert_placement/reload")
        assert answer.status_code == 400
        assert "--expert-placement" in answer.json()["error"]["message"]
        answer = httpx.get(f"{server.url}/expert_loads")
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "the model has no experts")


def test_prompts_of_one_beginning_go_to_the_rank_that_has_it(dense):
    flags = ("--data-parallel-size", "2", "--data-parallel-routing", "prefix")
    with ParallelServer(dense, *FLAGS, *flags) as server:

        def complete(start: int, last: int) -> None:
            body = {"prompt": [*range(start, start + 64), last], "max_tokens": 2, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        cached: list[int] = []
        for last in range(6):
            complete(10, 100 + last)
        assert cached == [0, 64, 64, 64, 64, 64]
        for last in range(6):
            complete(140, 10 + last)
        assert cached[6:] == [0, 64, 64, 64, 64, 64]
        generated = by_rank(server.counts(), "octavo_generation_tokens_total")
        assert set(generated.values()) <= {12, 24, 0}
