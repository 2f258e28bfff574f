"""The choice of an instruction set for the C kernels, and of AMX at their start."""

import logging
from types import SimpleNamespace

import pytest

from pagedattn.cpu_backend import instructions
from pagedattn.cpu_backend.instructions import INSTRUCTIONS_VARIABLE, compiler_flags, cpu_flags, start_amx

AVX2 = {"avx2", "fma", "f16c"}
AMX = {"amx_tile", "amx_bf16", "amx_int8"}
IN_USE = 1


@pytest.fixture
def x86(monkeypatch):
    """An x86-64 CPU with the given flags, and a choice of instructions, or none."""

    def choose(flags, name=None):
        monkeypatch.setattr(instructions, "cpu_flags", lambda: frozenset(flags))
        monkeypatch.setattr(instructions, "_ARM", False)
        monkeypatch.setattr(instructions, "_NATIVE", "-march=native")
        if name is None:
            monkeypatch.delenv(INSTRUCTIONS_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(INSTRUCTIONS_VARIABLE, name)

    return choose


def kernels(outcome):
    """A library that says so of the start of AMX."""
    return SimpleNamespace(octavo_start_amx=lambda: outcome)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        (None, (), ("-march=native",)),
        ("", (), ("-march=native",)),
        ("amx", AMX, ("-march=native",)),
        ("avx512", {"avx512f"}, ("-march=native", "-DNO_AMX")),
        ("avx2", AVX2, ("-march=x86-64-v3",)),
        ("avx2", AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
        ("plain", (), ("-march=x86-64",)),
    ],
)
def test_a_set_is_what_the_compiler_is_told(name, flags, expected, x86):
    x86(flags, name)
    assert compiler_flags() == expected


def test_a_set_that_is_unknown_or_not_there_is_refused(x86, monkeypatch):
    x86(AVX2, "avx1024")
    with pytest.raises(ValueError, match=r"is one of amx, avx512, avx2, plain, not 'avx1024'"):
        compiler_flags()
    x86(AVX2 | {"amx_tile"}, "amx")
    with pytest.raises(ValueError, match=r"asks for amx, but this CPU, .*, has no amx_bf16, amx_int8"):
        compiler_flags()
    x86(AVX2, "avx512")
    with pytest.raises(ValueError, match="has no avx512f"):
        compiler_flags()
    x86((), "plain")
    monkeypatch.setattr(instructions, "_ARM", True)
    with pytest.raises(ValueError, match="no choice"):
        compiler_flags()


def test_the_system_names_what_the_cpu_has():
    assert cpu_flags() == frozenset() or {"fpu", "fp"} & cpu_flags()


def test_amx_that_may_not_be_used_is_said_unless_it_was_asked_for(x86, caplog):
    x86(AMX)
    with caplog.at_level(logging.WARNING):
        assert start_amx(kernels(IN_USE))
        assert not start_amx(kernels(0))  # compiled without it
    assert not caplog.records
    for outcome, reason in {2: "does not permit", 4: "bfloat16", 5: "integers", 6: "beside it"}.items():
        x86(AMX)
        caplog.clear()
        assert not start_amx(kernels(outcome))
        (record,) = caplog.records
        assert "vectors in place of AMX" in record.message
        assert reason in record.message
        x86(AMX, "amx")
        with pytest.raises(ValueError, match=f"asks for amx, but .*{reason}"):
            start_amx(kernels(outcome))
    with pytest.raises(ValueError, match="the compiler knows no AMX"):
        start_amx(kernels(0))
    assert start_amx(kernels(IN_USE))
