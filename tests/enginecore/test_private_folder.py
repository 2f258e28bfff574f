"""The folder of Unix sockets: private, and with a path that leaves room for a socket's address."""

import asyncio
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest

import byte_tokenizer
from checkpoints import llama_config, save_random
from enginecore import AsyncEngine, SamplingParams
from enginecore.config import make_config
from enginecore.private_folder import private_folder


@pytest.fixture
def temporary(monkeypatch, tmp_path_factory):
    """A short folder that temporary files go to."""
    tmp_path_factory.getbasetemp()  # before, as pytest's own stays where it is
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    use(folder, monkeypatch)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def long_temporary(temporary, monkeypatch):
    """A folder that temporary files go to, whose path has 116 characters."""
    folder = temporary / ("x" * (115 - len(str(temporary))))
    folder.mkdir()
    assert len(str(folder)) == 116
    use(folder, monkeypatch)
    return folder


def use(folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_it_is_private_and_lies_where_temporary_files_go(temporary):
    folder = private_folder()
    assert folder.parent == temporary
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_path_too_long_for_sockets_is_passed_over(long_temporary):
    folder = private_folder()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / ("s" * 16)))
    shutil.rmtree(folder)
    assert list(long_temporary.iterdir()) == []


@pytest.mark.slow
def test_an_engine_of_several_processes_where_that_path_is_too_long(long_temporary, tmp_path):
    path = save_random(llama_config(), tmp_path / "model")
    byte_tokenizer.save(path)
    config = make_config({"model": str(path), "device": "cpu", "tensor_parallel_size": 2})

    async def answer():
        async with asyncio.timeout(120):
            engine = AsyncEngine(config)
            try:
                await engine.ready()
                params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
                async for output in engine.generate("abc", params, "r"):
                    last = output
                return last
            finally:
                await engine.shutdown()

    assert len(asyncio.run(answer()).outputs[0].token_ids) == 3
