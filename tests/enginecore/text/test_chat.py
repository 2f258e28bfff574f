from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from data_files import STORIES
from enginecore.errors import ConfigError, RequestError
from enginecore.frontend.text.chat import ChatTemplate, read_template
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles, locate

CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "héllo 语"},
    {"role": "assistant", "content": "Hi. "},
    {"role": "user", "content": ""},
]
TOOLS = [{"type": "function", "function": {"name": "day", "parameters": {"a": ["<b>", 1.5, None, "ü"]}}}]

CHATML = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}[none]{% endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

TOOL_USER = """{% for tool in tools %}
{{ tool | tojson }} {{ tool | tojson(indent=2, sort_keys=true) }} {{ tool | tojson(separators=(',', ':')) }}
{% endfor %}
{% for document in documents or [] %}{{ document.title }}:{{ document['text'] }}{% endfor %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{% endgeneration %}{% continue %}{% endif %}
{{ loop.index }} {{ message.content }}{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}{% endfor %}{{ ns.last }}
{{ tone | default('plain') }} {{ strftime_now('%Y') }}"""

PARTS_READER = """{% for message in messages %}{{ message.role }}:
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.type }}={{ part.text }};{% endfor %}{% endif %}
{% endfor %}"""


@pytest.fixture(scope="session")
def oracle(transformers_tokenizer: Callable[[Path], Any]) -> Any:
    return transformers_tokenizer(STORIES)


@pytest.fixture(scope="session")
def stories() -> Tokenizer:
    tokenizer = load_tokenizer(ModelFiles("", STORIES, {}))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, TOOL_USER, PARTS_READER])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": TOOLS, "documents": [{"title": "T", "text": "x"}], "tone": "warm"},
        {"tools": TOOLS, "bos_token": "<<"},
    ],
)
def test_renders_as_transformers_does(
    oracle: Any, stories: Tokenizer, template: str, options: dict[str, Any]
) -> None:
    if template == TOOL_USER and "tools" not in options:
        options = {**options, "tools": TOOLS}
    expected = oracle.apply_chat_template(
        CONVERSATION,
        chat_template=template,
        tokenize=False,
        **{"add_generation_prompt": True, **options},
    )
    assert ChatTemplate(template, stories).render(CONVERSATION, **options) == expected


@pytest.mark.parametrize("model", [str(STORIES), pytest.param("demo", marks=pytest.mark.slow)])
def test_real_templates_render_as_transformers_does(
    transformers_tokenizer: Callable[..., Any], model: str
) -> None:
    files = locate(model)
    tokenizer = load_tokenizer(files)
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    text = ChatTemplate(tokenizer.chat_template, tokenizer).render(CONVERSATION)
    if files.path.is_dir():
        theirs = transformers_tokenizer(files.path)
    else:
        theirs = transformers_tokenizer(files.path.parent, gguf_file=files.path.name)
    ids = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (CHATML, "Once upon"),
        (CHATML, ""),
        (PARTS_READER, "Once upon  "),
        (PARTS_READER, [{"type": "text", "text": "a "}]),
    ],
)
def test_continues_the_final_message_as_transformers_does(
    oracle: Any, stories: Tokenizer, content: Any, template: str
) -> None:
    messages = [*CONVERSATION, {"role": "assistant", "content": content}]
    expected = oracle.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    ours = ChatTemplate(template, stories).render(
        messages, continue_final_message=True, add_generation_prompt=False
    )
    assert ours == expected


def test_text_parts_are_joined_for_a_template_that_takes_text() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}|{% endfor %}", None)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb|"
    assert template.render([{"role": "user", "content": []}]) == "|"


SHOW = "{% macro show(role, parts) %}{% for p in parts %}{{ p.text }}{% endfor %}{% endmacro %}"


@pytest.mark.parametrize(
    "template",
    [
        PARTS_READER,
        "{% for p in messages[0]['content'] | selectattr('type') %}{{ p.text }}{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}",
        SHOW + "{% for m in messages %}{{ show('user', m.content) }}{% endfor %}",
        SHOW + "{{ show(parts=messages[0]['content']) }}",
    ],
)
def test_text_parts_reach_a_template_that_reads_them(template: str) -> None:
    parts = [{"type": "text", "text": "left"}, {"type": "text", "text": "right"}]
    text = ChatTemplate(template, None).render([{"role": "user", "content": parts}])
    assert "left" in text
    assert "\n" not in text.strip()
    assert "right" in text


def test_looping_over_words_of_the_content_is_not_reading_parts() -> None:
    source = "{% for m in messages %}{% for w in m.content.split(' ') %}{{ w }},{% endfor %}{% endfor %}"
    assert ChatTemplate(source, None).render(
        [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]
    ) == ("a,b,")


def test_other_parts_are_refused() -> None:
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\] is 'image_url'"):
        ChatTemplate(PARTS_READER, None).render([{"role": "user", "content": picture}])


@pytest.mark.parametrize(
    "messages", [[], "hi", {"role": "user"}, ["hi"], [{"content": "x"}], [{"role": "user", "content": 5}]]
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        ChatTemplate(CHATML, None).render(messages)


def test_the_template_s_own_refusal_is_passed_on(byte_tokenizer: Tokenizer) -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}ok"
    template = ChatTemplate(source, byte_tokenizer)
    with pytest.raises(RequestError, match="no system role here") as refusal:
        template.render(CONVERSATION)
    assert refusal.value.param == "messages"
    assert template.render(CONVERSATION[1:]) == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ nobody.home.at }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_failing_or_forbidden_template_is_a_refused_request(source: str) -> None:
    with pytest.raises(RequestError, match=r"^chat template: "):
        ChatTemplate(source, None).render(CONVERSATION)


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(ConfigError, match=r"line 2: .*endfor"):
        ChatTemplate("\n{% for m in messages %}", None)


def test_null_fields_are_as_if_absent() -> None:
    source = "{{ messages[0].content is defined }} {{ messages[0].name is defined }}"
    message = {"role": "assistant", "content": None, "name": "x"}
    assert ChatTemplate(source, None).render([message]) == "False True"


def test_the_tool_template_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, None)
    question = CONVERSATION[1:2]
    assert template.render(question) == "plain"
    assert template.render(question, tools=[]) == "plain"
    assert template.render(question, tools=TOOLS) == "tools"


def test_named_templates_need_a_default() -> None:
    with pytest.raises(ConfigError, match=r"\['rag'\]"):
        ChatTemplate({"rag": "x"}, None)


def test_continuing_and_starting_an_answer_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        ChatTemplate(CHATML, None).render(CONVERSATION, continue_final_message=True)


def test_continuing_needs_content_that_the_template_shows() -> None:
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(RequestError, match="content in the last message"):
        ChatTemplate(CHATML, None).render([{"role": "assistant"}], **options)
    with pytest.raises(RequestError, match="does not show the last message"):
        ChatTemplate("fixed", None).render(CONVERSATION, **options)


def test_a_variable_named_messages_does_not_replace_them() -> None:
    extra: dict[str, Any] = {"messages": "mine"}
    assert ChatTemplate("{{ messages[0].content }}", None).render(CONVERSATION[1:2], **extra) == "héllo 语"


def test_the_year_comes_from_the_clock() -> None:
    years = {datetime.now().year}
    text = ChatTemplate("{{ strftime_now('%Y') }}", None).render(CONVERSATION[1:2])
    assert int(text) in years | {datetime.now().year}


def test_a_template_option_is_jinja_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}é", encoding="utf-8")
    assert read_template("{{ x }}") == "{{ x }}"
    assert read_template(str(tmp_path / "chat.jinja")) == "{{ messages }}é"
    with pytest.raises(ConfigError, match="neither a Jinja template nor a readable file"):
        read_template(str(tmp_path / "absent.jinja"))


SYSTEM_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'system' %}[{{ m['content'] | trim }}]"
    "{% elif m['role'] == 'user' %}({{ m['content'] }}){% endif %}{% endfor %}"
)
RAISES = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
KNOWS = (
    "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
RHYME = "Answer in rhyme. "


@pytest.mark.parametrize("content", [RHYME, [{"type": "text", "text": RHYME}]], ids=["text", "parts"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SYSTEM_ONLY, "[Answer in rhyme.](hi)"),
        (RAISES, "system:Answer in rhyme. ;user:hi;"),
        (KNOWS, "!developer:Answer in rhyme. ;user:hi;"),
    ],
    ids=["no else", "raises", "knows"],
)
def test_a_developer_s_text_reaches_the_prompt(template: str, content: Any, expected: str) -> None:
    """HC-92."""
    messages = [{"role": "developer", "content": content}, {"role": "user", "content": "hi"}]
    assert ChatTemplate(template, None).render(messages) == expected
    assert messages[0]["role"] == "developer"


def test_a_developer_s_text_that_no_template_shows_is_refused() -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    messages = [{"role": "developer", "content": RHYME}, {"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="shows no message of role developer"):
        ChatTemplate(template, None).render(messages)


USER_ONLY = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("content", [RHYME, [{"type": "text", "text": RHYME}]], ids=["text", "parts"])
@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_message_that_no_template_shows_is_refused(role: str, content: Any) -> None:
    """HC-92: what was accepted must reach the model."""
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": content}]
    with pytest.raises(RequestError, match=rf"messages\[1\]: .* of role {role}"):
        ChatTemplate(USER_ONLY, None).render(messages)


def test_a_template_that_shows_the_first_of_two_system_messages_refuses_the_second() -> None:
    template = "{{ messages[0].content }};{{ messages[1].content }}"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert ChatTemplate(template, None).render(messages) == "be brief;hi"
    with pytest.raises(RequestError, match=r"messages\[2\]"):
        ChatTemplate(template, None).render([*messages, {"role": "system", "content": "again"}])


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ messages[0].content | tojson }}", 'say "hi"\n', '"say \\"hi\\"\\n"'),
        ("{% if messages[0].content == '/no_think' %}-{% else %}+{% endif %}", "/no_think", "-"),
        ("{{ messages[0].content | upper }}", RHYME, RHYME.upper()),
        ("{% if messages[0].content != 'x' %}{{ raise_exception('x only') }}{% endif %}!", "x", "!"),
        ("{{ bos_token }}", "  ", ""),
    ],
    ids=["escaped", "a switch", "changed", "the only one there may be", "blank"],
)
def test_a_template_may_do_with_a_system_message_what_it_wants(
    template: str, content: str, expected: str
) -> None:
    assert ChatTemplate(template, None).render([{"role": "system", "content": content}]) == expected


def test_escaped_results_of_many_tools_cost_one_more_rendering() -> None:
    template = "{% for m in messages %}{{ count() }}{{ m.content | tojson }}{% endfor %}"
    messages = [{"role": "tool", "content": f'"{index}"'} for index in range(50)]
    calls: list[None] = []

    def count() -> str:
        calls.append(None)
        return ""

    assert ChatTemplate(template, None).render(messages, count=count).count("\\") == 100
    assert len(calls) == 2 * len(messages)


@pytest.mark.parametrize("extra", [{"tool_calls": []}, {"tool_calls": None}, {}], ids=str)
def test_a_client_s_own_answer_comes_back_as_a_plain_message(extra: dict[str, Any]) -> None:
    """HC-93."""
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ m.content }};{% endfor %}"
    )
    dumped = {"refusal": None, "annotations": [], "audio": None, "function_call": None, **extra}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", **dumped},
        {"role": "user", "content": "c"},
    ]
    assert ChatTemplate(template, None).render(messages) == "a;b;c;"


@pytest.mark.parametrize("end", ["", "|end|"])
def test_blanks_that_end_the_message_to_continue_are_kept(end: str) -> None:
    template = "{% for m in messages %}{{ m['content'] | trim }}" + end + "{% endfor %}"
    text = ChatTemplate(template, None).render(
        [{"role": "assistant", "content": "  The answer is \n"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert text == "The answer is \n"
