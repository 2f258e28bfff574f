"""For every test: one compute thread a process, and no word to a model hub."""

import os

# Before torch is imported. The machine's cores are shared by the test processes, and threads that wait for
# each other at a barrier while another process has their core wait for milliseconds.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
