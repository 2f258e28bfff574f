import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginecore.errors import ModelError
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles
from vocabularies import END_OF_TEXT

WORDS = "Hello wörld, it's 2024! <|endoftext|> <extra> </s>"


def load(folder: Path, **config: Any) -> Tokenizer:
    tokenizer = load_tokenizer(ModelFiles("", folder, config))
    assert tokenizer is not None
    return tokenizer


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def gpt2_folder(tokenizer_folders: dict[str, Path], tmp_path: Path) -> Path:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizer_folders["byte-level"] / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True},
        {"tokenizer_class": "GPT2Tokenizer", "add_eos_token": True, "additional_special_tokens": ["<extra>"]},
        {
            "tokenizer_class": "GPT2Tokenizer",
            "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True, "normalized": False},
            "added_tokens_decoder": {
                str(END_OF_TEXT): {"content": "<|endoftext|>", "special": True, "normalized": False},
                str(END_OF_TEXT + 1): {
                    "content": "<extra>",
                    "special": False,
                    "normalized": True,
                    "rstrip": True,
                },
            },
        },
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"},
    ],
)
def test_vocab_and_merges_load_as_transformers_loads_them(
    gpt2_folder: Path, transformers_tokenizer: Callable[[Path], Any], settings: Any
) -> None:
    write_json(gpt2_folder / "tokenizer_config.json", settings)
    ours, theirs = load(gpt2_folder), transformers_tokenizer(gpt2_folder)
    for text in (WORDS, "", "e\u0301 <extra> x"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id


def test_older_files_of_added_and_special_tokens_are_read_as_transformers_reads_them(
    gpt2_folder: Path, transformers_tokenizer: Callable[[Path], Any]
) -> None:
    write_json(gpt2_folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    write_json(gpt2_folder / "added_tokens.json", {"<extra>": END_OF_TEXT + 2, "</s>": END_OF_TEXT + 1})
    write_json(
        gpt2_folder / "special_tokens_map.json", {"eos_token": "</s>", "bos_token": {"content": "</s>"}}
    )
    ours, theirs = load(gpt2_folder), transformers_tokenizer(gpt2_folder)
    ids = ours.encode(WORDS)
    assert ids == theirs.encode(WORDS)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id == END_OF_TEXT + 1
    assert ours.special_tokens["bos_token"] == "</s>"


def test_the_model_tells_how_to_split_when_the_tokenizer_does_not(gpt2_folder: Path) -> None:
    assert (
        load(gpt2_folder).encode("e\u0301")[0] != load(gpt2_folder, model_type="qwen3").encode("e\u0301")[0]
    )
    assert load(gpt2_folder, model_type="qwen3").decode([END_OF_TEXT]) == ""


def test_classes_that_need_tokenizer_json_are_named(gpt2_folder: Path) -> None:
    write_json(gpt2_folder / "tokenizer_config.json", {"tokenizer_class": "RobertaTokenizerFast"})
    with pytest.raises(ModelError, match="RobertaTokenizerFast is not supported"):
        load(gpt2_folder)


def test_special_tokens_missing_in_tokenizer_json_are_added(byte_folder: Path) -> None:
    settings = {
        "eos_token": "<end>",
        "extra_special_tokens": {"image_token": "<image>"},
        "sound_token": "<s>",
    }
    write_json(byte_folder / "tokenizer_config.json", settings)
    tokenizer = load(byte_folder)
    assert tokenizer.encode("<end><image>") == [260, 261]
    assert tokenizer.eos_token_id == 260
    assert tokenizer.decode([260, 261]) == ""
    assert tokenizer.special_tokens == {"eos_token": "<end>", "sound_token": "<s>"}


def test_bos_in_tokenizer_json_is_added_and_settings_do_not_change_it(
    tokenizer_folders: dict[str, Path], tmp_path: Path
) -> None:
    original = tokenizer_folders["byte-fallback"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(original / name, tmp_path / name)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(
        tmp_path / "tokenizer_config.json", {**settings, "add_bos_token": False, "add_eos_token": True}
    )
    assert load(tmp_path).encode("a") == load(original).encode("a")
    assert load(tmp_path).encode("") == [1]


def test_another_folder_may_hold_the_tokenizer(byte_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    files = ModelFiles("", model, {})
    assert load_tokenizer(files) is None
    loaded = load_tokenizer(files, str(byte_folder))
    assert loaded is not None
    assert loaded.encode("a") == [97]
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(files, str(model))
    with pytest.raises(ModelError, match="there is no folder"):
        load_tokenizer(files, str(tmp_path / "absent" / "too"))


def test_unreadable_tokenizers_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(ModelError, match=r"only a tokenizer\.model"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a readable tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "S"}}, "S"),
        ({"tokenizer_config.json": {"chat_template": "S"}, "chat_template.jinja": "F"}, "F"),
        ({"chat_template.json": {"chat_template": "P"}}, "P"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "D"}]}},
            {"default": "D"},
        ),
        (
            {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "T"},
            {"default": "F", "tool_use": "T"},
        ),
    ],
)
def test_where_a_chat_template_may_lie(byte_folder: Path, files: dict[str, Any], expected: Any) -> None:
    for name, content in files.items():
        (byte_folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (byte_folder / name).write_text(text, encoding="utf-8")
    assert load(byte_folder).chat_template == expected


def test_text_needs_neither_torch_nor_transformers(byte_folder: Path) -> None:
    (byte_folder / "config.json").write_text("{}", encoding="utf-8")
    program = f"""
import sys
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.text.loading import load_tokenizer
assert "tokenizers" not in sys.modules and "jinja2" not in sys.modules
from enginecore.config import EngineConfig
from enginecore.model_files import locate
config = EngineConfig(chat_template="{{{{ messages[0].content }}}}")
files = locate({str(byte_folder)!r})
front = Frontend(config, files, load_tokenizer(files))
print(front.prepare_chat([dict(role="user", content="hi")]).token_ids)
print([name for name in ("torch", "triton", "transformers", "huggingface_hub") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n") == ["[104, 105]", "[]", ""]
