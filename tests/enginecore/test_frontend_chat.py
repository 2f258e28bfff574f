"""Conversations and templates become prompts."""

from pathlib import Path

import pytest

from enginecore.errors import ConfigError, RequestError
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles
from front_ends import EOS, front, greedy, ids, run


@pytest.mark.parametrize(("template", "count"), [("{{ bos_token }}", 1), ("", 0)])
def test_a_chat_holds_the_special_tokens_of_its_template_alone(
    byte_folder: Path, template: str, count: int
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(byte_folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer = Tokenizer(
        backend,
        special_tokens={"bos_token": "<bos>"},
        chat_template=template + "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    frontend = front(tokenizer)
    prompt = frontend.prepare_chat([{"role": "user", "content": "hi"}])
    assert prompt == Prompt("<bos>" * count + "hi", [256] * count + ids("hi"))
    assert frontend.prepare_prompt("<bos>hi").token_ids == [256, 256, *ids("hi")]
    assert frontend.prepare_prompt("<bos>hi", add_special_tokens=False).token_ids == [256, *ids("hi")]


def test_a_chat_may_ask_for_the_tokenizer_s_own_special_tokens(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders["byte-fallback"], {}))
    assert tokenizer is not None
    frontend = front(tokenizer, chat_template="{{ messages[0]['content'] }}")
    messages = [{"role": "user", "content": "hi"}]
    plain = frontend.prepare_chat(messages).token_ids
    assert frontend.prepare_chat(messages, add_special_tokens=True).token_ids == tokenizer.encode("hi")
    assert plain == tokenizer.encode("hi", add_special_tokens=False) != tokenizer.encode("hi")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "stories"])
def test_a_long_list_of_ids_becomes_the_text_of_all_of_them(
    tokenizer_folders: dict[str, Path], kind: str
) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders[kind], {}))
    assert tokenizer is not None
    ids = tokenizer.encode("Once upon é a time 语 <s>" * 2000)
    assert len(ids) > 3 * 4096
    assert front(tokenizer).detokenize(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_model_without_template_still_completes(frontend: Frontend) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        frontend.prepare_chat([{"role": "user", "content": "hi"}])
    run(frontend, [EOS], greedy())


def test_a_broken_template_of_the_model_fails_chats_alone(byte_folder: Path) -> None:
    (byte_folder / "chat_template.jinja").write_text("{% if %}")
    frontend = front(load_tokenizer(ModelFiles("", byte_folder, {})))
    with pytest.raises(RequestError, match="line 1"):
        frontend.prepare_chat([{"role": "user", "content": "hi"}])
    run(frontend, [EOS], greedy())


def test_a_broken_template_option_is_an_error_at_once(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        front(byte_tokenizer, chat_template="{% if %}")


def test_a_given_template_comes_before_the_option_and_the_model_s(byte_tokenizer: Tokenizer) -> None:
    frontend = front(byte_tokenizer, chat_template="{{ 'o' }}")
    messages = [{"role": "user", "content": "hi"}]
    assert frontend.prepare_chat(messages).text == "o"
    assert frontend.prepare_chat(messages, chat_template="{{ x }}", x="r").text == "r"
    with pytest.raises(RequestError) as refusal:
        frontend.prepare_chat(messages, chat_template="{% if %}")
    assert refusal.value.param == "chat_template"
