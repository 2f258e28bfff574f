"""A plug-in under which some prompts end the process that runs them.

A prompt with KILLS kills it, each time. One with FAILS lets its step fail, as long as there is the file that
the environment variable FILE names: it is removed first.
"""

import os
import signal
from pathlib import Path

from deadly_prompts import FAILS, FILE, KILLS

from enginecore.worker.runner.runner import Runner

_run = Runner.run


def _deadly(self, step):
    for admitted in step.plan.admitted:
        prompt = admitted.tokens[: admitted.num_prompt].tolist()
        if KILLS in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAILS in prompt and Path(os.environ[FILE]).exists():
            Path(os.environ[FILE]).unlink()
            raise ValueError("two tensors do not match")
    return _run(self, step)


Runner.run = _deadly
