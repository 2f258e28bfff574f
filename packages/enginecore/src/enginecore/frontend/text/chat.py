"""Chat messages to one prompt, by a model's Jinja template, as transformers renders it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginecore.errors import ConfigError, RequestError
from enginecore.frontend.text.shown_messages import require_shown
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.frontend.text.tool_messages import plain_calls

if TYPE_CHECKING:
    from enginecore.frontend.text.template_engine import CompiledTemplate

NO_TEMPLATE = "this model has no chat template: send a prompt, or start with chat_template"

_END_MARK = "\ufdd0"
"""Stands for the end of a message that is to be continued; a code point that is no character of any text."""


class ChatTemplate:
    """A compiled chat template, or several by name.

    Args:
        source: The Jinja source; or sources by name, of which "tool_use" serves requests with tools and
            "default" all others.
        tokenizer: Gives the special tokens that templates name, such as bos_token.

    Raises:
        ConfigError: a template does not parse.
    """

    def __init__(self, source: str | Mapping[str, str], tokenizer: Tokenizer | None) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise ConfigError(f"none of the chat templates {sorted(sources)} is named default: choose one")
        self._templates = {name: _compile(name, text) for name, text in sources.items()}
        self._special_tokens = dict(tokenizer.special_tokens) if tokenizer is not None else {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt for `messages`, each a mapping with "role" and mostly "content".

        Content may be text or a list of `{"type": "text", "text": …}` parts, which are joined by newlines
        unless the template reads parts itself. `template_kwargs` are variables for the template.

        Raises:
            RequestError: the messages are malformed, or the template refuses them (its message is passed on)
                or leaves out one of role system, developer or tool.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one to false",
                "continue_final_message",
            )
        compiled = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        plain = _plain_messages(messages, join_parts=not compiled.reads_parts)
        # A template without a branch for developers gets their instructions as those of the system.
        renamed = set() if compiled.knows_developer else _rename_developers(plain)
        if continue_final_message:
            _mark_end(plain[-1])
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "tools": tools or None,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }

        def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
            return compiled.template.render({**variables, "messages": messages})

        try:
            text = rendered(plain)
        except Exception as error:
            # A template is a program of the model's; whatever it raises is its answer to these messages.
            raise RequestError(f"chat template: {error}", "messages") from error
        prompt = _cut_at_mark(text) if continue_final_message else text
        require_shown(plain, text, rendered, renamed)
        return prompt


def read_template(option: str) -> str:
    """Return the template that the option chat_template gives: itself, or the content of the file it names.

    Raises:
        ConfigError: it is neither Jinja nor a readable file.
    """
    if "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {option!r} is neither a Jinja template nor a readable file: {error}"
        ) from error


def _compile(name: str, source: str) -> "CompiledTemplate":
    from jinja2 import TemplateSyntaxError

    from enginecore.frontend.text.template_engine import compile_template

    try:
        return compile_template(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error


def _plain_messages(messages: Any, *, join_parts: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    return [_plain_message(message, index, join_parts) for index, message in enumerate(messages)]


def _plain_message(message: Any, index: int, join_parts: bool) -> dict[str, Any]:
    """Return the message without what is null (templates test whether a key is there), and parts joined."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a role, got {message!r}", "messages")
    plain = {key: value for key, value in message.items() if value is not None}
    calls = plain_calls(plain.pop("tool_calls", ()), f"messages[{index}]")
    if calls:  # an empty list asks for nothing, and templates would take it for a call
        plain = {**plain, "content": plain.get("content", ""), "tool_calls": calls}
    reasoning = plain.get("reasoning_content", plain.get("reasoning"))
    if reasoning is not None:  # templates know it by one name or the other
        plain |= {"reasoning_content": reasoning, "reasoning": reasoning}
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [
            _text_of_part(part, f"messages[{index}].content[{place}]") for place, part in enumerate(content)
        ]
        plain["content"] = (
            "\n".join(parts) if join_parts else [{"type": "text", "text": text} for text in parts]
        )
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages[{index}].content must be text or a list of parts, got {content!r}", "messages"
        )
    return plain


def _rename_developers(messages: Sequence[dict[str, Any]]) -> set[int]:
    """Give messages of role developer the role system; return their places."""
    renamed = {place for place, message in enumerate(messages) if message["role"] == "developer"}
    for place in renamed:
        messages[place]["role"] = "system"
    return renamed


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise RequestError(
        f'{where} is {kind!r}; only parts {{"type": "text", "text": "…"}} are supported', "messages"
    )


def _mark_end(message: dict[str, Any]) -> None:
    # A template that trims messages leaves the blanks before the mark: the model is to go on after them.
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = f"{content}{_END_MARK}"
    elif content:
        content[-1] = {**content[-1], "text": f"{content[-1]['text']}{_END_MARK}"}
    else:
        raise RequestError("continue_final_message needs content in the last message", "messages")


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message",
            "continue_final_message",
        )
    return before
