"""What a start leaves out: it decides the seconds before the first answer."""

import subprocess
import sys

from checkpoints import llama_config, save_random

HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "transformers", "triton", "fastapi")

START = f"""
import sys
from enginecore import LLM
LLM(sys.argv[1], device="cpu")
print([name for name in {HEAVY} if name in sys.modules])
"""


def test_a_model_is_ready_without_what_it_does_not_need(tmp_path):
    path = save_random(llama_config(), tmp_path)
    done = subprocess.run([sys.executable, "-c", START, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
