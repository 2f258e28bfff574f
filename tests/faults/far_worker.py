"""A worker that only a link connects to its core. Settings come as a line on standard input."""

import sys

import msgspec

from enginecore.executor.link import serve_link
from enginecore.executor.wire import WorkerSettings

sys.exit(serve_link(msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)))
