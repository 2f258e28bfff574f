"""Options from the command line, the environment and a file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from enginecore.config import EngineConfig, make_config
from enginecore.errors import ConfigError
from enginecore.model_files import locate
from enginecore.option_sources import LIBRARY_VARIABLES
from enginecore.options import OptionParser, run_command
from enginecore.speculation import Speculation

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def option(default: Any, **more: Any) -> Any:
    return field(default=default, metadata={"help": "50% of it", **more})


@dataclass(frozen=True, kw_only=True)
class Tool:
    model: str = option("demo")
    max_items: int = option(3)
    ratio: float = option(0.5)
    enable_cache: bool = option(True)
    kind: Literal["a", "b"] = option("a")
    limit: int | None = option(None)
    names: tuple[str, ...] = option(())
    prompt: tuple[str, ...] = option((), repeat=True)


@dataclass(frozen=True, kw_only=True)
class Net:
    port: int = option(8000)


@dataclass(frozen=True, kw_only=True)
class More:
    size: int = option(1)


def read(*arguments: str, **environment: str) -> Tool:
    (tool,) = OptionParser("tool", "A tool.", "1.2", {"tool": Tool}).read(arguments, environment)
    return tool


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tool.yaml"
    path.write_text(text)
    return str(path)


def test_defaults():
    assert read() == Tool()


def test_every_kind_of_flag():
    tool = read(
        *("--max-items", "7", "--ratio", "0.25", "--no-enable-cache", "--kind", "b", "--limit", "-1"),
        *("--names", "x", "y", "--names", "z", "--prompt", "one", "--prompt", "two", "some/model"),
    )
    assert tool == Tool(
        model="some/model",
        max_items=7,
        ratio=0.25,
        enable_cache=False,
        kind="b",
        limit=-1,
        names=("x", "y", "z"),
        prompt=("one", "two"),
    )


def test_command_line_beats_environment_beats_file(tmp_path):
    path = write(tmp_path, "max-items: 1\nratio: 0.1\nlimit: 1\nenable_cache: false\n")
    for config in (["--config", path], [f"--config={path}"]):
        for arguments in ([*config, "--max-items", "9"], ["--max-items", "9", *config]):
            tool = read(*arguments, OCTAVO_MAX_ITEMS="5", OCTAVO_RATIO="0.9")
            assert (tool.max_items, tool.ratio, tool.limit, tool.enable_cache) == (9, 0.9, 1, False)


def test_the_file_may_be_named_by_the_environment(tmp_path):
    path = write(tmp_path, "max_items: 1")
    other = tmp_path / "other.yaml"
    other.write_text("max_items: 2")
    assert read(OCTAVO_CONFIG=path).max_items == 1
    assert read("--config", str(other), OCTAVO_CONFIG=path).max_items == 2


def test_false_wins_when_given_later_in_rank(tmp_path):
    path = write(tmp_path, "enable_cache: true")
    assert read("--config", path, OCTAVO_ENABLE_CACHE="false").enable_cache is False
    assert read("--config", path, "--no-enable-cache", OCTAVO_ENABLE_CACHE="1").enable_cache is False
    assert read("--enable-cache", OCTAVO_ENABLE_CACHE="0").enable_cache is True


def test_lists(tmp_path):
    path = write(tmp_path, "names: [x, y]\nprompt: one")
    assert read("--config", path) == Tool(names=("x", "y"), prompt=("one",))
    assert read(OCTAVO_NAMES="x").names == ("x",)
    assert read(OCTAVO_NAMES='["x", "y"]').names == ("x", "y")


def test_the_model_has_two_spellings(tmp_path):
    path = write(tmp_path, "model: from-file")
    assert read("--config", path).model == "from-file"
    assert read("--config", path, "given").model == "given"
    assert read("--model", "given", OCTAVO_MODEL="elsewhere").model == "given"
    assert read("given", "--model", "given").model == "given"
    with pytest.raises(ConfigError, match="the model is named twice: one and --model two"):
        read("one", "--model", "two")


@pytest.mark.parametrize(
    "text, said",
    [
        ("max_itms: 3", "unknown option 'max_itms'; the nearest is max_items"),
        ("max-items: 3\nmax_items: 4", "max_items is given twice"),
        ("- a", "must hold `option: value` lines"),
        ("a: [", "is not valid YAML"),
        ("max_items: many", "max_items must be an integer, got 'many'"),
        ("max_items: true", "max_items must be an integer, got True"),
        ("max_items: null", "max_items must be an integer, got None"),
        ("enable_cache: maybe", "enable_cache must be true or false, got 'maybe'"),
        ("kind: c", "kind must be one of a, b, got 'c'"),
        ("ratio: [1]", r"ratio must be a number, got \[1\]"),
        ("model: 7", "model must be text, got 7"),
        ("names: [1]", r"names must be a list of texts, got \[1\]"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as error:
        read("--config", path)
    assert path in str(error.value)


def test_a_file_may_be_empty_or_missing(tmp_path):
    assert read("--config", write(tmp_path, "")) == Tool()
    assert read("--config", write(tmp_path, "limit: null")) == Tool()
    with pytest.raises(ConfigError, match=r"config file .*none.yaml: No such file or directory"):
        read("--config", str(tmp_path / "none.yaml"))


def test_environment_variables_that_are_wrong():
    with pytest.raises(ConfigError, match=r"max_items must be an integer, got 'x' \(from OCTAVO_MAX_ITEMS\)"):
        read(OCTAVO_MAX_ITEMS="x")
    with pytest.raises(ConfigError, match="names must be a list of texts"):
        read(OCTAVO_NAMES="[x")


def test_an_unknown_variable_is_a_warning_that_names_the_nearest_option(capsys):
    assert read(OCTAVO_MAX_ITMS="3", OCTAVO_ZZZ="1") == Tool()
    assert capsys.readouterr().err.splitlines() == [
        "tool: warning: environment variable OCTAVO_MAX_ITMS names no option; the nearest is max_items",
        "tool: warning: environment variable OCTAVO_ZZZ names no option",
    ]


def test_variables_of_libraries_are_passed_over(capsys):
    assert read(**dict.fromkeys([*LIBRARY_VARIABLES, "HOME", "OCTAVOX"], "x")) == Tool()
    assert capsys.readouterr().err == ""


def test_options_of_other_apps_are_passed_over(tmp_path, capsys):
    path = write(tmp_path, "api_key: secret\nmax_items: 7\ntemperature: 0.5\n")
    assert read("--config", path, OCTAVO_SHUTDOWN_TIMEOUT="x", OCTAVO_SYSTEM="be brief").max_items == 7
    assert capsys.readouterr().err == ""


KUBERNETES = {
    "SERVICE_HOST": "10.96.7.20",
    "SERVICE_PORT": "80",
    "SERVICE_PORT_HTTP": "80",
    "PORT": "tcp://10.96.7.20:80",
    "PORT_80_TCP": "tcp://10.96.7.20:80",
    "PORT_80_TCP_PROTO": "tcp",
    "PORT_80_TCP_PORT": "80",
    "PORT_80_TCP_ADDR": "10.96.7.20",
}


@pytest.mark.parametrize("service", ["OCTAVO_", "OCTAVO_SERVE_", "OCTAVO_MAX_ITEMS_"])
def test_variables_of_a_cluster_are_passed_over(service, capsys):
    """HC-88: Kubernetes sets them in every pod for a service of that name; `port` is also an option."""
    parser = OptionParser("tool", "", "1", {"tool": Tool, "net": Net})
    tool, net = parser.read([], {service + name: value for name, value in KUBERNETES.items()})
    assert (tool, net) == (Tool(), Net())
    assert capsys.readouterr().err == ""
    assert parser.read([], {"OCTAVO_PORT": "9000"})[1] == Net(port=9000)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--max"], "unrecognized arguments: --max"),
        (["--max-item", "3"], "unrecognized arguments: --max-item"),
        (["--kind", "c"], "argument --kind: invalid choice: 'c'"),
        (["--max-items"], "argument --max-items: expected one argument"),
        (["one", "two"], "unrecognized arguments: two"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(capsys, arguments, said):
    with pytest.raises(SystemExit) as exit_:
        read(*arguments)
    written = capsys.readouterr()
    assert (exit_.value.code, written.out) == (2, "")
    assert written.err.startswith(f"tool: {said}")
    assert written.err.count("\n") == 1


def test_help_and_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        read("--help")
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--max-items N", "50% of it [3]", "--no-enable-cache", "{a,b}", "--config FILE", "MODEL"):
        assert part in shown
    with pytest.raises(SystemExit):
        read("--version")
    assert capsys.readouterr().out == "tool 1.2\n"


def test_what_the_dataclass_refuses_is_passed_on():
    parser = OptionParser("tool", "", "1", {"engine": EngineConfig})
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1, got 0"):
        parser.read(["--max-num-seqs", "0"], {})


def test_several_dataclasses_share_one_command_line():
    parser = OptionParser("tool", "", "1", {"more": More, "engine": EngineConfig})
    more, engine = parser.read(["given", "--size", "4"], {"OCTAVO_MAX_NUM_SEQS": "5"})
    assert more == More(size=4)
    assert engine == EngineConfig(model="given", max_num_seqs=5)


def test_run_command(capsys):
    def refused() -> int:
        raise ConfigError("two\nlines")

    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_command("tool", lambda: 0) == 0
    assert run_command("tool", refused) == 2
    assert capsys.readouterr().err == "tool: two lines\n"
    assert run_command("tool", interrupted) == 130


def engine_config(*arguments: str) -> EngineConfig:
    (config,) = OptionParser("tool", "A tool.", "1.2", {"engine": EngineConfig}).read(arguments, {})
    return config


VLLM_COMMAND_LINE = (
    "model --enable-chunked-prefill --disable-log-stats --enforce-eager --load-format auto "
    "--tokenizer-mode auto --no-trust-remote-code --generation-config vllm --data-parallel-size 1"
)


def test_options_of_vllm_without_effect_are_taken_with_a_line_each(caplog):
    expected = EngineConfig(model="model", generation_config="vllm", enforce_eager=True)
    assert engine_config(*VLLM_COMMAND_LINE.split()) == expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 5
    assert said[0] == "enable_chunked_prefill=true has no effect: long prompts always run in chunks"
    caplog.clear()
    assert make_config({"task": "generate", "model": "m"}) == EngineConfig(model="m")
    assert len(caplog.records) == 1
    engine_config()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("enable_chunked_prefill", False, "enable_chunked_prefill=false is not supported: long prompts"),
        ("trust_remote_code", True, "trust_remote_code=true is not supported: no code .* leave it out"),
        ("load_format", "dummy", "load_format=dummy is not supported: .* or give auto or safetensors"),
        ("tokenizer_mode", "slow", "tokenizer_mode=slow"),
        ("generation_config", "some/folder", "generation_config must be one of auto, vllm"),
        ("hf_overrides", "[1]", "hf_overrides must be a JSON object"),
        ("hf_overrides", "{", "hf_overrides must be a JSON object"),
    ],
)
def test_other_values_of_them_are_refused(name, value, said):
    with pytest.raises(ConfigError, match=said):
        make_config({name: value})


def test_overrides_of_a_model_s_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1, "rope": {"b": 2, "c": 3}}')
    config = engine_config(str(tmp_path), "--hf-overrides", '{"a": 5, "rope": {"b": 6}}')
    assert make_config({"hf_overrides": {"a": 5}}).hf_overrides == {"a": 5}
    files = locate(config.model, config.revision, config.hf_overrides)
    assert files.config == {"a": 5, "rope": {"b": 6, "c": 3}}


def test_speculative_decoding_is_off_unless_asked_for():
    assert make_config({}).speculation is None
    assert make_config({"speculative_config": None}).speculation is None


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_prompt_lookup_s_sizes_default_to_each_other_as_vllm_s_do(given, lookup, tmp_path):
    mapping = {"method": "ngram", "num_speculative_tokens": 3, **given}
    text = json.dumps(mapping)
    (tmp_path / "options.yaml").write_text(f"speculative_config: {text}")
    for config in (
        make_config({"speculative_config": mapping}),
        make_config({"speculative_config": text}),
        engine_config("--speculative-config", text),
        engine_config("--config", str(tmp_path / "options.yaml")),
    ):
        assert config.speculation == Speculation(3, *lookup)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[1]", "speculative_config must be a JSON object"),
        ("ngram", "speculative_config must be a JSON object"),
        ({}, "speculative_config: method must be ngram, got None"),
        ({"method": "eagle"}, "method must be ngram, got 'eagle': .* draft models are not supported"),
        ({"method": "ngram"}, "speculative_config needs num_speculative_tokens"),
        (NGRAM | {"model": "a"}, "unknown key 'model'; known keys: method, num_speculative_tokens, prompt_"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        (NGRAM | {"num_speculative_tokens": "3"}, "num_speculative_tokens must be an integer, got '3'"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens must be an integer, got True"),
        (NGRAM | {"prompt_lookup_min": 2.5}, "prompt_lookup_min must be an integer, got 2.5"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1, got 0"),
        (
            NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_max=3 is less than prompt_lookup_min=4",
        ),
    ],
)
def test_speculation_that_is_not_there_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        make_config({"speculative_config": given})


@pytest.mark.parametrize(
    ("device", "count", "budget", "most"),
    [("cpu", 5, 2048, 8), ("cpu", 30, 2048, 31), ("cuda", 5, 2048, 256), ("cuda", 5, 100, 50)],
)
def test_tokens_of_a_step_with_drafts_are_bounded_by_device_and_budget(device, count, budget, most):
    asked = NGRAM | {"num_speculative_tokens": count}
    options = {"speculative_config": asked, "max_num_batched_tokens": budget}
    config = make_config({**options, "max_num_seqs": 4})
    assert (config.max_tokens_with_drafts(device), config.max_sampled(device)) == (most, most)
    assert make_config({**options, "max_num_seqs": 300}).max_sampled(device) == 300
    assert make_config({}).max_tokens_with_drafts(device) == 0
