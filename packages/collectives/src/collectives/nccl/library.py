"""Bindings of NCCL's C library by ctypes: location, signatures, errors.

Signatures and codes are those of nccl.h, release 2.27; they have not changed since 2.20 (fp8 came in 2.24).
"""

import ctypes
import importlib.metadata
import os
import re
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import torch

UNIQUE_ID_BYTES = 128
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
BYTES = DTYPES[torch.uint8]
OPS = {"sum": 0, "max": 2, "min": 3}

_VARIABLE = "OCTAVO_NCCL_LIBRARY"
_FILE = "libnccl.so.2"
_OLDEST = (2, 20, 0)
_MAJOR = 2
_DISTRIBUTION = re.compile(r"nvidia-nccl-cu(\d+)")


class UniqueId(Structure):
    """ncclUniqueId, the id under which ranks join one communicator. Passed by value."""

    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)


_REDUCE = (c_void_p, c_void_p, c_size_t, c_int, c_int)  # from, to, count, dtype, op
_MOVE = (c_void_p, c_void_p, c_size_t, c_int)  # from, to, count, dtype
_ON = (c_void_p, c_void_p)  # communicator, stream
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclGetErrorString": (c_int,),
    "ncclGetLastError": (c_void_p,),
    "ncclAllReduce": (*_REDUCE, *_ON),
    "ncclReduceScatter": (*_REDUCE, *_ON),
    "ncclReduce": (*_REDUCE, c_int, *_ON),  # …, root
    "ncclAllGather": (*_MOVE, *_ON),
    "ncclBroadcast": (*_MOVE, c_int, *_ON),  # …, root
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, *_ON),  # …, count, dtype, peer
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, *_ON),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
_TEXTS = ("ncclGetErrorString", "ncclGetLastError")


class NcclError(RuntimeError):
    """An NCCL operation failed: `operation`, its result `code`, NCCL's `text` for that, and its `last_error`,
    which may be empty."""

    def __init__(self, operation: str, code: int, text: str, last_error: str) -> None:
        super().__init__(f"{operation}: {text} (code {code})" + (f": {last_error}" if last_error else ""))
        self.operation = operation
        self.code = code
        self.text = text
        self.last_error = last_error


class NcclLibrary:
    """One loaded libnccl, with its `path` and `version`.

    Raises OSError when it cannot be loaded, and ImportError, with the file, the version and the symbols that
    are missing, when it is not one that can be used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise OSError(
                f"cannot load NCCL from {path}: {error}. Install torch for CUDA, which brings NCCL, "
                f"or name the library's file in {_VARIABLE}"
            ) from error
        missing = [name for name in _SIGNATURES if not hasattr(self._library, name)]
        self.version = (0, 0, 0) if "ncclGetVersion" in missing else self._read_version()
        if not missing and self.version[0] != _MAJOR:
            raise ImportError(
                f"{path} has NCCL version {_dotted(self.version)}; only versions {_MAJOR}.x can be used, "
                f"from {_dotted(_OLDEST)} on"
            )
        if missing or self.version < _OLDEST:
            raise ImportError(
                f"{path} has NCCL version {_dotted(self.version)}, and {_dotted(_OLDEST)} is the oldest that "
                f"can be used; missing symbols: {', '.join(missing) or 'none'}"
            )
        for name, argtypes in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = argtypes
            function.restype = c_char_p if name in _TEXTS else c_int

    def call(self, name: str, *arguments: object, comm: c_void_p | None = None) -> None:
        """Call a function that returns ncclResult_t. NcclError, with the last error of `comm`, on failure."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise self.error(name, code, comm)

    def error(self, operation: str, code: int, comm: c_void_p | None = None) -> NcclError:
        """Return the error for a result code."""
        text: bytes | None = self._library.ncclGetErrorString(code)
        last: bytes | None = self._library.ncclGetLastError(comm)
        return NcclError(operation, code, _decoded(text), _decoded(last))

    def unique_id(self) -> bytes:
        """Return a new ncclUniqueId: one rank makes it, all ranks join under it."""
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def _read_version(self) -> tuple[int, int, int]:
        number = c_int()
        self._library.ncclGetVersion(ctypes.byref(number))
        thousands = 10000 if number.value >= 10000 else 1000  # the form changed with 2.9
        major, rest = divmod(number.value, thousands)
        return (major, *divmod(rest, 100))


@cache
def default_library() -> NcclLibrary:
    """Load the library that OCTAVO_NCCL_LIBRARY names, or the one that torch has loaded, or an installed
    package's, or the system's."""
    return NcclLibrary(os.environ.get(_VARIABLE) or _loaded() or _installed(torch.version.cuda) or _FILE)


def _loaded() -> str | None:
    """Return the file of the NCCL in this process: torch for CUDA is linked with one."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    files = {line.split(maxsplit=5)[-1] for line in lines if line.endswith(f"/{_FILE}")}
    return min(files, default=None)


def _installed(cuda: str | None) -> str | None:
    """Return the file of the installed nvidia-nccl package for the CUDA version `cuda`, or of any for None.

    Raises ImportError when there are only packages for other major versions of CUDA.
    """
    others = []
    for distribution in importlib.metadata.distributions():
        name = distribution.name or ""
        found = _DISTRIBUTION.fullmatch(name)
        if found is None:
            continue
        if cuda is not None and found[1] != cuda.split(".")[0]:
            others.append(name)
            continue
        for file in distribution.files or []:
            if file.name == _FILE:
                return str(file.locate())
    if others:
        raise ImportError(
            f"torch is for CUDA {cuda}, and the installed {', '.join(sorted(others))} is for another major "
            f"version: install torch with the NCCL it asks for, or name the library's file in {_VARIABLE}"
        )
    return None


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode(errors="replace").strip()
