"""Continuous batching with chunked prefill and preemption."""

from batchsched.errors import DuplicateHandle, NeverFits, PromptTooLong, RequestRefused, StepMismatch
from batchsched.limits import Limits
from batchsched.memory import Memory
from batchsched.messages import Committed, Finish, Load, OpenedRow, StepPlan, StepResult
from batchsched.policy import Fcfs, Policy
from batchsched.preemption import Preemption, Recompute
from batchsched.request import Request
from batchsched.scheduler import Scheduler

__all__ = [
    "Committed",
    "DuplicateHandle",
    "Fcfs",
    "Finish",
    "Limits",
    "Load",
    "Memory",
    "NeverFits",
    "OpenedRow",
    "Policy",
    "Preemption",
    "PromptTooLong",
    "Recompute",
    "Request",
    "RequestRefused",
    "Scheduler",
    "StepMismatch",
    "StepPlan",
    "StepResult",
]
