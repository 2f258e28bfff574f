"""A worker that only a link connects to its core. The link's address comes as a line on standard input."""

import sys

import msgspec

from enginecore.executor.messages import LinkSettings
from enginecore.worker.process import serve_link

serve_link(msgspec.json.decode(sys.stdin.buffer.readline(), type=LinkSettings))
