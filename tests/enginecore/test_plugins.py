"""Loading the user's own code by name."""

import sys

import pytest

from enginecore.errors import ConfigError
from enginecore.plugins import load


@pytest.fixture(autouse=True)
def search_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("a_plug_in", "broken_plug_in"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_module_of_the_folder_is_found_and_hides_none_that_is_installed(tmp_path):
    (tmp_path / "a_plug_in.py").write_text("class Outer:\n    class Inner:\n        here = True\n")
    (tmp_path / "wave.py").write_text("raise RuntimeError('not that of the library')\n")
    assert load("a_plug_in:Outer.Inner", str(tmp_path)).here
    assert sys.path[-1] == str(tmp_path)
    assert load("wave:Error", str(tmp_path)).__module__ == "wave"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("a_plug_in", "must be module:name"),
        (":Name", "must be module:name"),
        ("no_such_plug_in:Name", "No module named 'no_such_plug_in'; plugin_path is"),
        ("a_plug_in:Name", "has no attribute 'Name'"),
        ("broken_plug_in:Name", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_of_one_line(tmp_path, reference, message):
    (tmp_path / "a_plug_in.py").write_text("")
    (tmp_path / "broken_plug_in.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        load(reference, str(tmp_path))
