import json
import subprocess
import sys
from pathlib import Path

from data_files import AZURE_CONVERSATION

ROOT = Path(__file__).parents[2]


def test_blocks_waste_little_on_the_lengths_of_real_conversations(tmp_path):
    tool = [sys.executable, ROOT / "tools/bench/kv_waste.py", "--trace", AZURE_CONVERSATION, "--steps", "500"]
    subprocess.run([*tool, "--json", tmp_path / "waste.json"], check=True)
    waste = json.loads((tmp_path / "waste.json").read_text())
    assert 0 < waste["blocks_waste"] < 0.04
    assert 0.7 < waste["contiguous_waste"] < 0.8
