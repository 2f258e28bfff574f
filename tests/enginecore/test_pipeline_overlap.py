"""Stages work at different steps at once. Here they are threads, so that a test can hold one up."""

import queue
import threading
from collections import defaultdict

import pytest
import torch

from checkpoints import llama_config, save_random
from collectives import LocalCommunicator
from cores import Ask, run, start_core
from enginecore.core.engine_core import EngineCore
from enginecore.messages import EngineLimits
from enginecore.worker.models.stages import split_layers
from enginecore.worker.runner.runner import Runner
from executors import options
from model_steps import load
from pagedattn import KVLayout, allocate

LIMIT_S = 20
BLOCKS = 64
ROWS, TOKENS = 6, 10


class Pipe(LocalCommunicator):
    """One stage's communicator along the pipeline."""

    def __init__(self, queues, rank):
        self.rank, self.size, self._queues = rank, len(queues), queues

    def send(self, x, dst):
        assert dst == self.rank + 1
        self._queues[dst].put(x)

    def recv(self, x, src):
        assert src == self.rank - 1
        sent = self._queues[self.rank].get(timeout=LIMIT_S)
        assert (sent.shape, sent.dtype) == (x.shape, x.dtype)
        return x.copy_(sent)


class ThreadedStages:
    """An executor with a thread a stage. The last ends a step when `may_end(step, begun)` lets it.

    `begun[stage, step]` are events that are set as stages begin steps.
    """

    descriptors = ()

    def __init__(self, path, stages, may_end):
        self.depth = stages
        self.limits = EngineLimits(max_model_len=64, vocab_size=320, num_blocks=BLOCKS, block_size=16)
        self.begun = defaultdict(threading.Event)
        self._may_end = may_end
        self._steps = [queue.Queue() for _ in range(stages)]
        self._results = queue.Queue()
        hidden = [queue.Queue() for _ in range(stages)]
        spec = load(path).spec
        for stage, layers in enumerate(split_layers(spec, stages)):
            model = load(path, layers=layers)
            layout = KVLayout(len(layers), model.kv_heads, spec.head_dim, 16, torch.float32)
            runner = Runner(
                model,
                allocate(layout, BLOCKS),
                None,
                LocalCommunicator(),
                Pipe(hidden, stage),
                LocalCommunicator(),
                dtype=torch.float32,
                max_rows=8,
                max_len=65,
            )
            threading.Thread(target=self._serve, args=(stage, runner, model), daemon=True).start()

    def submit(self, step):
        for steps in self._steps:
            steps.put(step)

    def collect(self):
        result = self._results.get(timeout=LIMIT_S)
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self):
        self.submit(None)

    def _serve(self, stage, runner, model):
        try:
            while (step := self._steps[stage].get()) is not None:
                self.begun[stage, step.plan.step].set()
                output = runner.run(step).result()
                if model.last:
                    self._may_end(step.plan.step, self.begun)
                    self._results.put(output)
        except BaseException as error:
            self._results.put(error)


@pytest.mark.parametrize("stages", [2, 3])
def test_every_stage_is_at_another_step(tmp_path, stages):
    """The last stage ends no step before each of the others has begun a later one, the first the latest.

    Rows decode in `stages` groups, each in a step of its own, so that this can be from the first such step to
    the one after which fewer than `stages` are left.
    """
    path = save_random(llama_config(num_hidden_layers=3), tmp_path)
    last_full = 1 + stages * (TOKENS - 1) - (stages - 1)

    def may_end(step, begun):
        if 2 <= step <= last_full:
            for stage in range(stages):
                assert begun[stage, step + stages - 1 - stage].wait(LIMIT_S), f"stage {stage} at step {step}"

    asks = [Ask([row, 2, 3], TOKENS) for row in range(ROWS)]
    executor = ThreadedStages(path, stages, may_end)
    core = EngineCore(options(path, pipeline_parallel_size=stages, max_num_seqs=8), executor)
    answers = run(core, asks)
    executor.end()
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in run(start_core(path), asks)]
    assert set(executor.begun) >= {(0, last_full + stages - 1)}
