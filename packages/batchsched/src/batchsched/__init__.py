"""Continuous batching with chunked prefill and preemption."""

from batchsched.errors import DuplicateHandle, NeverFits, PromptTooLong, RequestRefused, StepMismatch
from batchsched.limits import Limits
from batchsched.memory import Memory
from batchsched.messages import Committed, Finish, Load, OpenedRow, StepPlan, StepResult
from batchsched.policy import Fcfs, Line, Policy, Priority, ShortestFirst, TimeSlice
from batchsched.preemption import Preemption, Recompute, Swap
from batchsched.request import Request
from batchsched.scheduler import Scheduler

__all__ = [
    "Committed",
    "DuplicateHandle",
    "Fcfs",
    "Finish",
    "Limits",
    "Line",
    "Load",
    "Memory",
    "NeverFits",
    "OpenedRow",
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
    "TimeSlice",
]
