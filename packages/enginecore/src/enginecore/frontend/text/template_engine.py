"""The Jinja that chat templates are written for: transformers' names and filters, in a sandbox."""

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the assistant said; here its body is simply shown."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja's base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class CompiledTemplate(NamedTuple):
    """A template ready to render."""

    template: jinja2.Template
    reads_parts: bool
    """Whether it takes a message's content as a list of parts."""
    knows_developer: bool
    """Whether it compares with the role developer."""


def compile_template(source: str) -> CompiledTemplate:
    """Compile a chat template.

    Raises:
        jinja2.TemplateSyntaxError: it does not parse.
    """
    environment = _environment()
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    template = environment.from_string(source, globals=functions)
    tree = environment.parse(source)
    knows_developer = any(constant.value == "developer" for constant in tree.find_all(nodes.Const))
    return CompiledTemplate(template, _reads_content_parts(tree), knows_developer)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _reads_content_parts(tree: nodes.Template) -> bool:
    """Return whether a template loops over a message's content, and so takes it as a list of parts.

    The content may have been given a name first, by `set` or as a macro's argument.
    """
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set())
    }
    names |= set(_content_arguments(tree, names))
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Return whether a node is some `….content` or `…["content"]`, filtered or not, or one of `names`."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


def _content_arguments(tree: nodes.Template, names: set[str]) -> Iterator[str]:
    """Yield the parameters of macros that are called with a message's content."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = [argument.name for argument in macros[call.node.name].args]
            for parameter, argument in zip(parameters, call.args):
                if _is_content(argument, names):
                    yield parameter
            for keyword in call.kwargs:
                if _is_content(keyword.value, names):
                    yield keyword.key
