"""A worker's side of a distributed executor: start, take steps, give results."""

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable

import torch

from collectives import Grid, make_communicators
from collectives.ring import PeerDied, RingClosed, RingReader
from enginecore.errors import OctavoError
from enginecore.executor.wire import (
    ExpertLoads,
    Failure,
    Loaded,
    Progress,
    ReportExpertLoads,
    StepDone,
    WorkerMessage,
    WorkerSettings,
    decode_step,
)
from enginecore.model_files import locate
from enginecore.worker.runner.runner import PendingOutput
from enginecore.worker.worker import Worker, pick_device

Send = Callable[[WorkerMessage], None]
"""Says something to the core; from any thread."""
Read = Callable[[], bytes]
"""Waits for the next step and returns it."""


def serve(settings: WorkerSettings, send: Send, read: Read | None = None) -> int:
    """Load the rank's part of the model and run steps until the core is gone; return an exit status.

    Steps come from `read`, or from the ring that `settings` name if that is None. Whatever is raised is
    sent, and ends it.
    """
    try:
        if read is None:
            assert settings.steps is not None
            read = RingReader(settings.steps, settings.reader).read
        worker = _load(settings, send)
        send(_facts(worker))
        _run(worker, read, send)
    except Exception as error:
        send(failure(error))
        return 2 if isinstance(error, OctavoError) else 1
    return 0


def failure(error: BaseException) -> Failure:
    """Return an exception in the form in which it is sent."""
    lines = traceback.format_exception(error)
    return Failure(type(error).__name__, str(error), "".join(lines), time.monotonic_ns())


def _load(settings: WorkerSettings, send: Send) -> Worker:
    config = settings.config
    device = pick_device(config.device, settings.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.local_size))
    comms = make_communicators(
        Grid(pp=settings.pp, tp=settings.tp),
        settings.rank,
        address=settings.rendezvous,
        backend="gloo" if device.type == "cpu" else "nccl",
        timeout=config.distributed_timeout_seconds,
    )
    send(Progress("communicators connected"))
    return Worker(
        config,
        locate(config.model),
        comms,
        device=device,
        local_size=settings.local_size,
        progress=lambda text: send(Progress(text)),
    )


def _facts(worker: Worker) -> Loaded:
    size = worker.size
    return Loaded(
        size.num_blocks,
        size.host_blocks,
        worker.window,
        size.max_model_len,
        worker.vocab_size,
        on_cpu=worker.device.type == "cpu",
    )


def _run(worker: Worker, read: Read, send: Send) -> None:
    deliver = _delivery(worker, send)
    while True:
        try:
            step = decode_step(read())
        except (RingClosed, PeerDied):
            return
        if isinstance(step, ReportExpertLoads):
            loads = worker.expert_loads()
            if worker.is_output:
                send(ExpertLoads(None if loads is None else loads.tolist()))
        else:
            deliver(worker.run(step))


def _delivery(worker: Worker, send: Send) -> Callable[[PendingOutput], None]:
    """What to do with a step that was started."""
    if not worker.is_output:
        return lambda pending: None
    if worker.device.type == "cpu":
        return lambda pending: send(StepDone(pending.result()))
    # A device is waited for on a thread of its own, so that the next step starts while this one runs.
    started: queue.SimpleQueue[PendingOutput] = queue.SimpleQueue()
    threading.Thread(target=_send_results, args=(started, send), daemon=True, name="results").start()
    return started.put


def _send_results(started: queue.SimpleQueue[PendingOutput], send: Send) -> None:
    try:
        while True:
            send(StepDone(started.get().result()))
    except Exception as error:
        send(failure(error))
        os._exit(1)
