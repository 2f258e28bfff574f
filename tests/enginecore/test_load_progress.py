"""The progress of loading, from the reader of weights to who watches the ranks."""

import json
import queue
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from checkpoints import llama_config, save_random
from enginecore.config import make_config
from enginecore.core.start import start_core
from enginecore.core.supervisor import RankSupervisor
from enginecore.messages import RankEvent, RankLoading, RankUp
from enginecore.model_files import locate


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in three files."""
    folder = Path(save_random(llama_config(), tmp_path_factory.mktemp("model")))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(3):
        names = sorted(tensors)[part::3]
        file = f"model-{part + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def options(folder: Path, **more):
    return make_config({"model": str(folder), "device": "cpu", "num_blocks_override": 8, **more})


FILES = [f"reading weights, file {number} of 3" for number in (1, 2, 3)]
PHASES = [
    "importing torch",
    "preparing kernels",
    "reading weights",
    *FILES,
    "allocating a KV cache of 8 blocks",
]


def test_parts_of_starting_are_told_in_their_order(sharded):
    told: list[object] = []
    config = options(sharded, enforce_eager=True)
    core = start_core(
        config,
        locate(config.model),
        on_phase=told.append,
        on_loaded=lambda done, total: told.append((done, total)),
    )
    core.shutdown()
    assert [one for one in told if isinstance(one, str)] == PHASES
    total = len(json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"])
    assert [one for one in told if isinstance(one, tuple)] == [(done, total) for done in range(1, total + 1)]
    # Each file's tensors come after its name.
    places = [told.index(phase) for phase in FILES]
    assert [told[place + 1] for place in places] == [
        (sum(1 for one in told[:place] if isinstance(one, tuple)) + 1, total) for place in places
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_tells_who_started_it_how_far_it_is(sharded, ranks):
    events: queue.SimpleQueue[RankEvent] = queue.SimpleQueue()
    supervisor = RankSupervisor(options(sharded, tensor_parallel_size=ranks))
    try:
        supervisor.listen(events.put)
        seen = [events.get(timeout=120)]
        while not isinstance(seen[-1], RankUp):
            seen.append(events.get(timeout=120))
    finally:
        supervisor.stop()
    progress = [event for event in seen if isinstance(event, RankLoading)]
    assert len(progress) == len(seen) - 1
    assert len({(event.rank, event.incarnation, event.began) for event in progress}) == 1
    phases = list(dict.fromkeys(event.progress.phase for event in progress))
    assert phases[0] == "starting the engine"
    # What comes at once may be told as one.
    order = [
        "starting the engine",
        "importing libraries",
        "finding the model's files",
        "starting the workers",
        "connecting the ranks",
        *PHASES[:-1],
        "waiting for the other ranks",
        PHASES[-1],
        "recording the layers",
    ]
    assert [phase for phase in order if phase in phases] == phases
    done = [event.progress.done for event in progress if event.progress.total]
    assert done == sorted(done)
