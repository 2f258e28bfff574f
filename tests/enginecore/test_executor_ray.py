"""Workers as actors of a Ray cluster of two nodes: tokens of one process, refusals, and ends."""

import asyncio
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

import byte_tokenizer
from checkpoints import llama_config, save_random
from cores import Ask, message, run, start_core
from enginecore import AsyncEngine
from enginecore.core.engine_core import EngineCore
from enginecore.data_parallel.messages import RankPlace
from enginecore.errors import ConfigError, EngineDeadError, WorkerDied
from enginecore.executor.executor import make_executor
from enginecore.executor.ray_cluster import rank_order
from enginecore.model_files import locate
from executors import Smaller, assert_same, options, ragged_asks

pytestmark = pytest.mark.ray
SECONDS_TO_GO = 60


@pytest.fixture(scope="module")
def cluster():
    """Two nodes that have room for one rank each."""
    before = psutil.Process().children(recursive=True)
    room = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=room)
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address)
    started = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert sum(child.name() == "raylet" for child in started) == 2
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    assert psutil.wait_procs(started, 10)[1] == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("model"))
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def truth(model):
    return run(start_core(model, enable_prefix_caching=False), ragged_asks())


def ray_options(model, **more):
    return options(model, distributed_executor_backend="ray", **more)


def start(config):
    executor = make_executor(config, locate(config.model))
    return executor, [psutil.Process(pid) for pid in executor.pids]


def groups():
    return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def assert_gone(processes):
    assert psutil.wait_procs(processes, SECONDS_TO_GO)[1] == []
    assert groups() == []


def raylet_of(process):
    return next(parent for parent in process.parents() if parent.name() == "raylet")


@pytest.fixture(scope="module")
def two_ranks(cluster, model):
    """An executor of tensor parallelism over both nodes; the last test that takes it kills it."""
    executor, processes = start(ray_options(model, tensor_parallel_size=2))
    yield executor, processes
    executor.shutdown()
    assert_gone(processes)


def assert_tokens(config, executor, truth):
    """With prefixes cached the second time, then in chunks and preempted."""
    core = EngineCore(config, executor)
    assert_same(run(core, ragged_asks()), truth)
    again = run(core, ragged_asks())
    assert_same(again, truth)
    assert sum(answer.cached for answer in again) >= 16 * 5  # all but those that asked for prompt logprobs
    chunked = replace(config, max_num_batched_tokens=16, max_num_seqs=8)
    core = EngineCore(chunked, Smaller(executor, num_blocks=5, max_model_len=80, depth=2))
    assert_same(run(core, ragged_asks()), truth)
    assert core.stats().preemptions > 0


def test_tokens_of_one_process(two_ranks, model, truth):
    executor, processes = two_ranks
    assert raylet_of(processes[0]) != raylet_of(processes[1])
    assert_tokens(options(model), executor, truth)


def test_a_killed_actor(two_ranks, model):
    executor, processes = two_ranks
    core = EngineCore(options(model), executor)
    core.add(0, message(0, Ask(list(range(100)), 400)))
    core.step()
    processes[1].kill()
    with pytest.raises(EngineDeadError) as caught:
        while True:
            core.step()
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerDied)
    assert re.match(rf"rank 1 of 2 \(process {processes[1].pid}\) on \S+ ", str(cause))
    assert (cause.rank, cause.pid) == (1, processes[1].pid)
    assert psutil.wait_procs(processes, SECONDS_TO_GO)[1] == []
    assert groups() == []


def test_stages_on_two_nodes(cluster, model, truth):
    config = ray_options(model, pipeline_parallel_size=2)
    executor, processes = start(config)
    assert_tokens(config, executor, truth)
    executor.shutdown()
    assert_gone(processes)


def test_a_killed_core(cluster, model, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    pids = asyncio.run(kill_core(ray_options(model, tensor_parallel_size=2, max_rank_restarts=0)))
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    until = time.monotonic() + SECONDS_TO_GO
    while groups() and time.monotonic() < until:
        time.sleep(0.05)  # Ray takes a core's bundles back in its own time
    assert groups() == []


def test_two_engines_share_the_cluster(cluster, model, truth):
    """Each engine reserves its own devices: the first takes one node, the second the other."""
    config = ray_options(model, data_parallel_size=2)
    places = [RankPlace(rank=rank, local_index=rank, local_count=2) for rank in range(2)]
    found = [make_executor(config, locate(config.model), place=place) for place in places]
    processes = [psutil.Process(executor.pids[0]) for executor in found]
    assert raylet_of(processes[0]) != raylet_of(processes[1])
    for executor in found:
        assert_same(run(EngineCore(config, executor), ragged_asks()), truth)
        executor.shutdown()
    assert_gone(processes)


async def kill_core(config):
    """Start an engine, kill its core, and return the workers' process ids once they are gone."""
    engine = AsyncEngine(config)
    try:
        await engine.ready()
        workers = [child for child in psutil.Process().children(recursive=True) if is_worker(child)]
        os.kill(engine.core_pids[0], signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, SECONDS_TO_GO)
        assert alive == []
        return [worker.pid for worker in workers]
    finally:
        await engine.shutdown()


def is_worker(process):
    with suppress(psutil.NoSuchProcess):
        return process.name().startswith("ray::RankActor")
    return False


def test_what_a_rank_refuses(cluster, model):
    with pytest.raises(ConfigError, match=r"rank [01]: .*the longest that fits is 33"):
        start(ray_options(model, tensor_parallel_size=2, num_blocks_override=2, max_model_len=100))
    assert groups() == []


def test_more_ranks_than_the_cluster_has_room_for(cluster, model):
    message = r"asked for 3 × CPU, one a rank: the cluster has 2 on 2 nodes, .* did not give 3 within 0\.5 s"
    with pytest.raises(ConfigError, match=message):
        start(ray_options(model, tensor_parallel_size=3, distributed_timeout_seconds=0.5))
    with pytest.raises(ConfigError, match=r"asked for 1 × GPU, one a rank: the cluster has 0 on 2 nodes, 0"):
        start(ray_options(model, device="cuda", distributed_timeout_seconds=0.5))
    assert groups() == []


def test_a_device_by_number_is_refused(cluster, model):
    with pytest.raises(ConfigError, match="device=cuda:1: Ray picks the devices, use device=cuda"):
        start(ray_options(model, device="cuda:1"))


@pytest.fixture
def no_cluster(monkeypatch):
    """This process as one that has not joined any cluster."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "ray://head:10001: the engine runs on a node of the cluster, not as a client"),
        ("127.0.0.1:1", "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1: .*ray start.*refused"),
    ],
)
def test_a_cluster_that_does_not_answer(no_cluster, model, monkeypatch, address, message):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=message):
        start(ray_options(model))


def test_without_ray(model, monkeypatch):
    monkeypatch.delitem(sys.modules, "enginecore.executor.ray_cluster")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray needs Ray \(.*\): install enginecore\[ray\] on every node"):
        start(ray_options(model))


def test_ranks_of_a_stage_sit_on_one_node_where_they_can():
    assert rank_order(["b", "a", "b", "a"], 2, "a") == [1, 3, 0, 2]
    assert rank_order(["a", "b", "b", "b"], 2, "a") == [1, 2, 0, 3]
    assert rank_order(["c", "b", "c", "a", "c", "b"], 3, "b") == [0, 2, 4, 1, 5, 3]
    assert rank_order(["a"], 1, "x") == [0]
