"""The server's memory does not grow with the requests that it has answered."""

import pytest
import soak

REQUESTS = 6000
BYTES_A_REQUEST = 1000
"""Room for what the allocator moves; a request that is kept weighs several times as much."""


@pytest.mark.slow
def test_memory_is_flat(capsys):
    grown = soak.soak(REQUESTS, clients=32)
    assert grown.keys() == {"octavo_serve.process", "core.process"}
    assert max(grown.values()) < BYTES_A_REQUEST, (grown, capsys.readouterr().out)
