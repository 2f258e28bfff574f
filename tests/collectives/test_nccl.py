"""NcclCommunicator without a device: a library that records its calls, compiled against NVIDIA's header.

The tensors are in ordinary memory, and a stream is a number. What the calls do together is tested by playing
them among threads, with the checks that every communicator must pass.
"""

import importlib.metadata
import importlib.util
import shutil
import sys
import threading
from pathlib import Path

import primitives
import pytest
import torch
import torch.distributed as dist
from fake_nccl import COMM, STREAM, Listener, Player, compile_library

from collectives import NcclCommunicator, NcclError
from collectives.nccl import communicator as module
from collectives.nccl import library as library_module
from collectives.nccl.library import NcclLibrary, UniqueId, default_library

CPU = torch.device("cpu")
DTYPES = [
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
]
CHECKS = sorted(name for name in vars(primitives) if name.startswith("ranks_"))


def nccl_header() -> Path | None:
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((Path(f) / "include" for f in folders if (Path(f) / "include" / "nccl.h").exists()), None)


pytestmark = pytest.mark.skipif(
    nccl_header() is None or shutil.which("gcc") is None, reason="needs NCCL's header and gcc"
)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return lambda *flags: compile_library(tmp_path_factory.mktemp("nccl"), nccl_header(), *flags)


@pytest.fixture(scope="module")
def path(build):
    return build()


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(module, "_stream_of", lambda x: STREAM)
    monkeypatch.setattr(module, "_use_device", lambda device: None)
    monkeypatch.setattr(module, "_wait_for_stream", lambda device: None)


@pytest.fixture
def listen(path):
    listeners = []

    def start(on_call):
        listeners.append(Listener(path, on_call))

    yield start
    for listener in listeners:
        listener.close()


@pytest.fixture
def calls(listen):
    """The calls as (name, *arguments) in order; `results` of a name is what it returns."""
    recorded = Recorded()
    listen(recorded)
    return recorded


class Recorded(list):
    def __init__(self):
        super().__init__()
        self.results = {}

    def __call__(self, name, arguments):
        self.append((name, *arguments))
        return self.results.get(name, 0)

    def take(self):
        taken = list(self)
        self.clear()
        return taken


def join(path, rank=0, size=2, store=None, timeout=5.0, name="tp"):
    store = store or dist.HashStore()
    if rank > 0:
        store.set(f"nccl/{name}", bytes(range(128)).hex())
    library = NcclLibrary(str(path))
    return NcclCommunicator(store, rank, size, device=CPU, name=name, timeout=timeout, library=library)


@pytest.fixture
def comm(path, calls):
    """Rank 1 of 3."""
    comm = join(path, 1, 3)
    calls.clear()
    return comm


def on(comm):
    """The last two arguments of every call that is enqueued."""
    return COMM + comm.rank, STREAM


def test_rank_0_leaves_an_id_and_all_join_under_it(path, calls):
    store = dist.HashStore()
    join(path, 0, 2, store)
    unique_id = bytes((3 * i) % 256 for i in range(128))
    assert calls.take() == [("ncclGetUniqueId",), ("ncclCommInitRank", 2, unique_id.hex(), 0)]
    assert store.get("nccl/tp").decode() == unique_id.hex()
    join(path, 1, 2)
    assert calls.take() == [("ncclCommInitRank", 2, bytes(range(128)).hex(), 1)]


def test_groups_of_other_names_have_other_ids(path, calls):
    store = dist.HashStore()
    join(path, 0, 2, store, name="tp")
    with pytest.raises(TimeoutError, match=r"rank 0 of NCCL group 'pp' left no id for rank 1 within 0\.1 s"):
        NcclCommunicator(store, 1, 2, device=CPU, name="pp", timeout=0.1, library=NcclLibrary(str(path)))


def test_joining_that_does_not_end_is_given_up(path, listen):
    release = threading.Event()
    listen(lambda name, arguments: int(name == "ncclCommInitRank" and not release.wait(20)))
    with pytest.raises(
        TimeoutError, match=r"rank 0 joining the 2 ranks of NCCL group 'tp' did not end within 0\.2 s"
    ):
        join(path, timeout=0.2)
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rank 0 joining"):
            thread.join(20)


def test_joining_uses_the_device_on_the_thread_that_joins(path, calls, monkeypatch):
    threads = []
    monkeypatch.setattr(module, "_use_device", lambda device: threads.append((device, threading.get_ident())))
    joined = []
    calls.results = {}
    monkeypatch.setattr(
        Recorded, "__call__", lambda self, name, arguments: joined.append(threading.get_ident()) or 0
    )
    join(path, 1)
    assert threads == [(CPU, joined[-1])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_names_the_dtype_and_the_operation(comm, calls, dtype):
    x = torch.zeros(2, 3, dtype=getattr(torch, dtype))
    for op in ("sum", "max", "min"):
        assert comm.all_reduce(x, op) is x
    address = x.data_ptr()
    assert calls == [
        ("ncclAllReduce", address, address, 6, dtype, op, *on(comm)) for op in ("sum", "max", "min")
    ]


def test_counts_of_more_than_32_bits_arrive(path, calls):
    address, count = 0x7FFE12345678, (1 << 40) + 5
    NcclLibrary(str(path)).call("ncclSend", address, count, 9, 7, COMM, STREAM)
    assert calls == [("ncclSend", address, count, "bfloat16", 7, COMM, STREAM)]


def test_a_broadcast_names_its_root(comm, calls):
    x = torch.zeros(5, dtype=torch.bfloat16)
    comm.broadcast(x, 2)
    address = x.data_ptr()
    assert calls == [("ncclBroadcast", address, address, 10, "uint8", 2, *on(comm))]


def test_what_is_moved_travels_as_bytes(comm, calls):
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64, torch.int16):
        x = torch.zeros(3, 2, dtype=dtype)
        comm.send(x, 0)
        comm.recv(x, 2)
        count = 6 * x.itemsize
        assert calls.take() == [
            ("ncclSend", x.data_ptr(), count, "uint8", 0, *on(comm)),
            ("ncclRecv", x.data_ptr(), count, "uint8", 2, *on(comm)),
        ]


def test_an_even_all_gather_is_one_call_into_the_given_tensor(comm, calls):
    x, out = torch.zeros(2, 4), torch.zeros(6, 4)
    assert comm.all_gather(x, out=out) is out
    assert calls == [("ncclAllGather", x.data_ptr(), out.data_ptr(), 32, "uint8", *on(comm))]


def test_an_uneven_all_gather_is_one_group_without_the_empty_pieces(comm, calls):
    x, out = torch.zeros(2, 4), torch.zeros(5, 4)
    comm.all_gather(x, 0, [0, 2, 3], out)
    mine = x.data_ptr()
    assert calls == [
        ("ncclGroupStart",),
        ("ncclBroadcast", mine, out.data_ptr(), 32, "uint8", 1, *on(comm)),
        ("ncclBroadcast", mine, out.data_ptr() + 32, 48, "uint8", 2, *on(comm)),
        ("ncclGroupEnd",),
    ]


def test_an_even_reduce_scatter_is_one_call(comm, calls):
    x = torch.zeros(6, 4, dtype=torch.float16)
    mine = comm.reduce_scatter(x)
    assert mine.shape == (2, 4)
    assert calls == [("ncclReduceScatter", x.data_ptr(), mine.data_ptr(), 8, "float16", "sum", *on(comm))]


def test_an_uneven_reduce_scatter_is_one_group_of_reductions(comm, calls):
    x = torch.zeros(6, 4)
    mine = comm.reduce_scatter(x, [4, 2, 0])
    assert mine.shape == (2, 4)
    assert calls == [
        ("ncclGroupStart",),
        ("ncclReduce", x.data_ptr(), mine.data_ptr(), 16, "float32", "sum", 0, *on(comm)),
        ("ncclReduce", x.data_ptr() + 64, mine.data_ptr(), 8, "float32", "sum", 1, *on(comm)),
        ("ncclGroupEnd",),
    ]


def test_an_all_to_all_is_one_group_of_sends_and_receives(comm, calls):
    x = torch.zeros(5, 2, dtype=torch.int64)
    received = comm.all_to_all(x, [1, 0, 4], [0, 0, 3])
    assert received.shape == (3, 2)
    assert calls == [
        ("ncclGroupStart",),
        ("ncclSend", x.data_ptr(), 16, "uint8", 0, *on(comm)),
        ("ncclSend", x.data_ptr() + 16, 64, "uint8", 2, *on(comm)),
        ("ncclRecv", received.data_ptr(), 48, "uint8", 2, *on(comm)),
        ("ncclGroupEnd",),
    ]


def test_what_is_empty_is_not_sent(comm, calls):
    empty = torch.zeros(0, 3)
    for operate in (comm.all_reduce, comm.broadcast, comm.all_gather, comm.reduce_scatter):
        operate(empty)
    comm.send(empty, 0)
    comm.recv(empty, 0)
    assert calls == []


def test_what_is_not_contiguous_is_sent_from_a_copy(comm, calls):
    comm.send(torch.zeros(2, 3).t(), 0)
    assert calls[0][2:] == (24, "uint8", 0, *on(comm))


def test_a_barrier_waits_for_the_stream(comm, calls, monkeypatch):
    waits = []
    monkeypatch.setattr(module, "_wait_for_stream", lambda device: waits.append((device, len(calls))))
    comm.barrier()
    assert [call[0] for call in calls] == ["ncclAllReduce"]
    assert waits == [(CPU, 1)]  # after the call


def test_a_refusal_is_an_error_with_all_that_nccl_says(comm, calls):
    calls.results["ncclAllReduce"] = 4
    with pytest.raises(
        NcclError, match=r"^ncclAllReduce: invalid argument \(code 4\): the last words$"
    ) as caught:
        comm.all_reduce(torch.zeros(1))
    error = caught.value
    assert (error.operation, error.code) == ("ncclAllReduce", 4)
    assert (error.text, error.last_error) == ("invalid argument", "the last words")


def test_a_group_ends_also_when_a_call_in_it_fails(comm, calls):
    calls.results["ncclSend"] = 4
    with pytest.raises(NcclError, match="ncclSend"):
        comm.all_to_all(torch.zeros(3, 2))
    assert [call[0] for call in calls] == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]


def test_check_raises_what_happened_since(comm, calls):
    comm.check()
    calls.results["ncclCommGetAsyncError"] = 6
    with pytest.raises(NcclError, match=r"NCCL group 'tp': remote error \(code 6\): the last words"):
        comm.check()
    assert calls == [("ncclCommGetAsyncError", COMM + 1)] * 2


@pytest.mark.parametrize("how,name", [("close", "ncclCommDestroy"), ("abort", "ncclCommAbort")])
def test_a_group_is_left_once(comm, calls, how, name):
    getattr(comm, how)()
    getattr(comm, how)()
    assert calls == [(name, COMM + 1)]
    with pytest.raises(ValueError, match="NCCL group 'tp' is closed"):
        comm.all_reduce(torch.zeros(1))


def test_tensors_elsewhere_and_dtypes_that_cannot_be_reduced_are_refused(comm, calls):
    with pytest.raises(ValueError, match="NCCL group 'tp' is on cpu, the tensor on meta"):
        comm.all_reduce(torch.zeros(1, device="meta"))
    with pytest.raises(TypeError, match=r"NCCL cannot reduce torch\.bool"):
        comm.all_reduce(torch.zeros(1, dtype=torch.bool))
    assert calls == []


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("primitive", CHECKS)
def test_played_among_threads_the_calls_do_what_is_asked(path, listen, primitive, size):
    player, store, errors = Player(size), dist.HashStore(), []
    listen(player)
    library = NcclLibrary(str(path))

    def rank(number):
        try:
            comm = NcclCommunicator(
                store, number, size, device=CPU, name="world", timeout=20, library=library
            )
            getattr(primitives, primitive)(comm)
        except BaseException as error:
            errors.append(error)
            player.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_the_installed_library_can_be_used_without_a_device(monkeypatch):
    monkeypatch.delenv("OCTAVO_NCCL_LIBRARY", raising=False)
    default_library.cache_clear()
    library = default_library()
    assert library.path.endswith("nvidia/nccl/lib/libnccl.so.2")
    header = (nccl_header() / "nccl.h").read_text()
    assert all(
        f"{name} {part}\n" in header
        for name, part in zip(
            ("#define NCCL_MAJOR", "#define NCCL_MINOR", "#define NCCL_PATCH"), library.version
        )
    )
    assert library.error("x", 4).text.startswith("invalid argument")
    default_library.cache_clear()


def test_the_library_that_a_variable_names_is_used(path, monkeypatch):
    monkeypatch.setenv("OCTAVO_NCCL_LIBRARY", str(path))
    default_library.cache_clear()
    assert default_library().path == str(path)
    monkeypatch.setenv("OCTAVO_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    default_library.cache_clear()
    with pytest.raises(
        OSError, match=r"cannot load NCCL from /nowhere/libnccl\.so\.2: .*OCTAVO_NCCL_LIBRARY"
    ):
        default_library()
    default_library.cache_clear()


def package(folder, name, file="nvidia/nccl/lib/libnccl.so.2"):
    """An installed package of that name, with one file, in a folder of its own."""
    info = folder / f"{name.replace('-', '_')}-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "RECORD").write_text(f"{file},,\n")
    (folder / file).parent.mkdir(parents=True)
    (folder / file).touch()  # from Python 3.12 on a package's files are those that exist
    return importlib.metadata.Distribution.at(info)


def test_the_library_that_torch_has_loaded_comes_before_any_package(monkeypatch, tmp_path):
    monkeypatch.delenv("OCTAVO_NCCL_LIBRARY", raising=False)
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libnccl.so.2" in line
    }
    if not mapped:
        pytest.skip("this torch is linked with no NCCL")
    package(tmp_path, "nvidia-nccl-cu12")
    for file in ("__init__.py", "nccl/__init__.py"):
        (tmp_path / "nvidia" / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    default_library.cache_clear()
    assert {default_library().path} == mapped
    default_library.cache_clear()


def test_the_package_for_torchs_cuda_is_taken_and_another_is_refused_by_name(monkeypatch, tmp_path):
    both = [package(tmp_path / "12", "nvidia-nccl-cu12"), package(tmp_path / "13", "nvidia-nccl-cu13")]
    monkeypatch.setattr(library_module.importlib.metadata, "distributions", lambda: both)
    file = "nvidia/nccl/lib/libnccl.so.2"
    assert library_module._installed("12.8") == str(tmp_path / "12" / file)
    assert library_module._installed("13.0") == str(tmp_path / "13" / file)
    assert library_module._installed(None) == str(tmp_path / "12" / file)
    both.pop()
    with pytest.raises(ImportError, match=r"torch is for CUDA 13\.0, .* nvidia-nccl-cu12 is for"):
        library_module._installed("13.0")
    both.pop()
    assert library_module._installed("13.0") is None


def test_another_major_version_is_refused_by_name(build):
    newer = build("-DVERSION=30102")
    with pytest.raises(ImportError, match=rf"{newer} has NCCL version 3\.1\.2; only versions 2\.x"):
        NcclLibrary(str(newer))


def test_a_library_that_is_too_old_or_lacks_a_function_is_named(build):
    old = build("-DVERSION=21903")
    with pytest.raises(
        ImportError, match=rf"{old} has NCCL version 2\.19\.3, and 2\.20\.0 is the oldest.*none"
    ):
        NcclLibrary(str(old))
    ancient = build("-DVERSION=2708")  # versions before 2.9 have one digit for the minor
    with pytest.raises(ImportError, match=r"NCCL version 2\.7\.8"):
        NcclLibrary(str(ancient))
    lacking = build("-DWITHOUT_SEND")
    with pytest.raises(ImportError, match="missing symbols: ncclSend"):
        NcclLibrary(str(lacking))


def test_the_id_keeps_its_zero_bytes():
    assert bytes(UniqueId.from_buffer_copy(bytes(range(128)))) == bytes(range(128))
