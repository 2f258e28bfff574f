"""A worker's end of a link, in a process of its own: says each step back. Settings come on standard input."""

import sys

import msgspec

from enginecore.executor.link import WorkerEnd
from enginecore.executor.wire import LinkSettings, Progress

link = WorkerEnd(msgspec.json.decode(sys.stdin.buffer.readline(), type=LinkSettings), timeout=20)
while True:
    link.send(Progress(link.read().decode()))
