"""A worker's part in a distributed executor: load the model, run steps, send results."""

import queue
import socket
import threading
from collections.abc import Callable

import torch

from collectives import Grid, make_communicators
from collectives.ring import PeerDied, RingClosed, RingReader
from enginecore.executor.link import WorkerEnd
from enginecore.executor.messages import (
    CountExperts,
    Loaded,
    Progress,
    StepDone,
    WorkerMessage,
    WorkerSettings,
    decode_step,
)
from enginecore.garbage import freeze_start
from enginecore.messages import ExpertLoads
from enginecore.model_files import locate
from enginecore.plugins import import_all
from enginecore.worker.runner.runner import PendingOutput
from enginecore.worker.worker import Worker, pick_device

Send = Callable[[WorkerMessage], None]


def serve(settings: WorkerSettings, link: WorkerEnd, listener: socket.socket | None) -> None:
    """Load the rank's part of the model and run steps until the core closes the ring or is gone.

    `listener` is rank 0's, at `settings.rendezvous`.
    """
    receive = link.receive if settings.ring is None else RingReader(settings.ring, settings.reader).read
    worker = _load(settings, link.send, listener)
    link.send(worker.limits)
    _run(worker, receive, link)


def _load(settings: WorkerSettings, send: Send, listener: socket.socket | None) -> Worker:
    config = settings.config
    import_all(config.plugins, config.plugin_path)
    device = pick_device(config.device, settings.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shares, rank = config.shares_experts, settings.rank
    send(Progress("connecting the ranks"))
    comms = make_communicators(
        Grid(dp=config.data_parallel_size if shares else 1, pp=settings.pp, tp=settings.tp),
        settings.place.rank * config.world_size + rank if shares else rank,
        address=settings.rendezvous,
        listener=listener,
        backend="gloo" if device.type == "cpu" else "nccl",
        timeout=config.distributed_timeout_seconds,
    )
    return Worker(
        config,
        locate(config.model, config.revision, config.hf_overrides),
        comms,
        device=device,
        local_size=settings.local_size,
        on_phase=lambda text: send(Progress(text)),
        on_loaded=_percents(send) if settings.rank == 0 else None,
    )


def _percents(send: Send) -> Callable[[int, int], None]:
    """Return what tells the core of loaded tensors, at most a hundred times."""
    last = -1

    def on_loaded(done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // total
        if percent != last:
            last = percent
            send(Loaded(done, total))

    return on_loaded


def _run(worker: Worker, receive: Callable[[], bytes], link: WorkerEnd) -> None:
    freeze_start()
    deliver = _delivery(worker, link)
    while True:
        try:
            step = decode_step(receive())
        except (RingClosed, PeerDied):
            return
        if isinstance(step, CountExperts):
            link.send(ExpertLoads(worker.expert_loads()))
        else:
            deliver(worker.run(step))


def _delivery(worker: Worker, link: WorkerEnd) -> Callable[[PendingOutput], None]:
    """Return the function that sends the results of a step that was started."""
    if not worker.is_output:
        return lambda pending: None
    if worker.device.type == "cpu":
        return lambda pending: link.send(StepDone(pending.result()))
    # A device is waited for on a thread of its own, so that the next step starts while this one runs.
    started: queue.SimpleQueue[PendingOutput] = queue.SimpleQueue()
    threading.Thread(target=_send_results, args=(started, link), daemon=True, name="results").start()
    return started.put


def _send_results(started: queue.SimpleQueue[PendingOutput], link: WorkerEnd) -> None:
    try:
        while True:
            link.send(StepDone(started.get().result()))
    except Exception as error:
        link.fail(error)
