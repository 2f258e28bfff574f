"""Continuous batching with chunked prefill and preemption."""

from batchsched.memory import Memory, SwapMemory
from batchsched.policy import (
    Candidates,
    Fcfs,
    Policy,
    Preemption,
    Priority,
    Recompute,
    ShortestFirst,
    Swap,
    TimeSlice,
)
from batchsched.records import (
    AdmittedRow,
    Committed,
    DuplicateHandle,
    Finish,
    Limits,
    Load,
    NeverFits,
    PromptTooLong,
    Request,
    RequestRefused,
    StepMismatch,
    StepPlan,
    StepResult,
)
from batchsched.scheduler import Scheduler

__all__ = [
    "AdmittedRow",
    "Candidates",
    "Committed",
    "DuplicateHandle",
    "Fcfs",
    "Finish",
    "Limits",
    "Load",
    "Memory",
    "NeverFits",
    "Policy",
    "Preemption",
    "Priority",
    "PromptTooLong",
    "Recompute",
    "Request",
    "RequestRefused",
    "Scheduler",
    "ShortestFirst",
    "StepMismatch",
    "StepPlan",
    "StepResult",
    "Swap",
    "SwapMemory",
    "TimeSlice",
]
