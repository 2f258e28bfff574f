"""Model families of somebody else, in every process of an engine."""

import asyncio
import json
import sys
import textwrap

import pytest

from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, AsyncEngine, SamplingParams
from enginecore.config import make_config
from enginecore.errors import ConfigError, ModelError, OctavoError
from enginecore.models import decoder_spec, register
from enginecore.plugins import load

OPTIONS = {"dtype": "float32", "device": "cpu", "num_blocks_override": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
PROMPT = [20, 30, 41, 57, 90]
MODULE = """
    from enginecore.models import TensorNames, common_spec, register

    NAMES = TensorNames({"model.layers.{layer}.self_attn.out": "model.layers.{layer}.self_attn.o_proj"})

    def owl(config):
        return common_spec(config, names=NAMES)

    def register_owl():
        register("OwlForCausalLM", owl)
"""


@pytest.fixture
def owl(tmp_path):
    """A Llama under another name, with another name for one of its modules; and transformers' answer."""
    from safetensors.torch import load_file, save_file

    path = save_random(llama_config(), tmp_path / "owl")
    answer = Oracle(path).greedy(PROMPT, 10)[0]
    file = path / "model.safetensors"
    renamed = {name.replace("o_proj", "out"): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["OwlForCausalLM"]}))
    return str(path), answer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with modules in it."""
    (tmp_path / "owls.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "owls_for_octavo.py").write_text("import owls\nowls.register_owl()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _families_as_before(monkeypatch):
    from enginecore.worker.models import families

    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for module in ("owls", "owls_for_octavo", "a_plug_in"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def tokens(model, **options):
    llm = LLM(model, **OPTIONS, **options)
    try:
        return llm.generate({"prompt_token_ids": PROMPT}, PARAMS)[0].outputs[0].token_ids
    finally:
        llm.shutdown()


def test_a_registered_family_runs_in_this_process(owl, folder, monkeypatch):
    path, answer = owl
    with pytest.raises(ModelError, match="OwlForCausalLM is not supported"):
        LLM(path, **OPTIONS)
    monkeypatch.syspath_prepend(str(folder))
    import owls

    register("OwlForCausalLM", owls.owl)
    assert tokens(path) == answer


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}])
def test_a_plugin_runs_in_workers(options, owl, folder):
    path, answer = owl
    assert tokens(path, plugins=["owls_for_octavo"], **options) == answer


@pytest.mark.slow
def test_a_plugin_runs_in_a_core_process(owl, folder):
    path, answer = owl

    async def scenario(plugin):
        engine = AsyncEngine(make_config({"model": path, "plugins": [plugin], **OPTIONS}))
        async with asyncio.timeout(120):
            try:
                await engine.ready()
                async for output in engine.generate({"prompt_token_ids": PROMPT}, PARAMS, "a"):
                    last = output
                return last.outputs[0].token_ids
            finally:
                await engine.shutdown()

    assert asyncio.run(scenario("owls_for_octavo")) == answer
    with pytest.raises(OctavoError, match="owls_for_octawo: there is no module owls_for_octawo"):
        asyncio.run(scenario("owls_for_octawo"))


@pytest.mark.slow
def test_an_entry_point_runs_without_any_option(owl, folder, monkeypatch):
    """As `pip install` leaves it: a module, and a folder that describes the distribution."""
    path, answer = owl
    info = folder / "owls-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: owls\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[octavo.models]\nOwlForCausalLM = owls:owl\nHawkForCausalLM = owls:hawk\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    assert tokens(path) == answer
    assert tokens(path, tensor_parallel_size=2) == answer
    with pytest.raises(ModelError, match="the family of HawkForCausalLM, owls:hawk, is broken"):
        decoder_spec({"architectures": ["HawkForCausalLM"]})
    with pytest.raises(ModelError, match=r"MothForCausalLM is not supported .*HawkForCausalLM"):
        decoder_spec({"architectures": ["MothForCausalLM"]})


def test_what_is_no_family_or_no_module_is_refused(owl, folder):
    with pytest.raises(TypeError, match="a family is a function"):
        register("OwlForCausalLM", "owls:owl")
    with pytest.raises(ConfigError, match="no_owls: there is no module no_owls"):
        LLM(owl[0], plugins=["no_owls"], **OPTIONS)


def test_a_module_of_the_folder_hides_none_that_is_installed(tmp_path):
    (tmp_path / "a_plug_in.py").write_text("here = True\n")
    (tmp_path / "wave.py").write_text("raise RuntimeError('not that of the library')\n")
    assert load("a_plug_in:here", str(tmp_path))
    assert sys.path[-1] == str(tmp_path)
    assert load("wave:Error", str(tmp_path)).__module__ == "wave"
