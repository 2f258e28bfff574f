"""A worker's end of a link, in a process of its own, which sends back what it receives.

The address of the link comes as a line of JSON on standard input.
"""

import sys

import msgspec

from enginecore.executor.link import WorkerEnd
from enginecore.executor.messages import LinkSettings, Progress

link = WorkerEnd(msgspec.json.decode(sys.stdin.buffer.readline(), type=LinkSettings))
while (text := link.receive().decode()) != "fail":
    link.send(Progress(text))
link.fail(KeyError(text))
