"""Structured outputs as grammars in llguidance's form, checked before a core sees them."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend.parsing import Thinking
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.grammars import GrammarError, Grammars, one_line
from enginecore.structured_outputs import StructuredOutputsParams

FIELD = "structured_outputs"

_LARK = ("grammar", "structural_tag")
"""Kinds whose grammars may name tokens."""

_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s"]+>)', re.DOTALL)
"""Strings, comments and regular expressions of Lark; the group is a token."""

_WHITESPACE = r"[ \t\n\r]{1,64}"
"""JSON's, which may stand anywhere, but not in runs with which a weak model would fill its answer."""
_MOST_READ = 128
"""Grammars that are known to compile."""


class GuideReader:
    """Turns structured outputs into grammars, and refuses what does not compile. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, load: Callable[[], Grammars]) -> None:
        """`load` makes the compiler; it is called when the first grammar comes, and takes up to a second."""
        self._tokenizer = tokenizer
        self._load = load
        self._grammars: Grammars | None = None
        self._read: OrderedDict[bytes, str] = OrderedDict()
        """Grammars that compiled, by what was asked for."""
        self._loading, self._lock = threading.Lock(), threading.Lock()

    def read(self, wanted: StructuredOutputsParams, thinking: Thinking | None = None) -> str:
        """Return a grammar that compiles: of an output that may think first, with `thinking`.

        It takes milliseconds, and for the largest some hundred; one that was compiled before takes less.

        Raises:
            RequestError: it does not compile, or asks for what is not supported.
        """
        key = msgspec.json.encode((wanted, thinking))
        with self._lock:
            if key in self._read:
                self._read.move_to_end(key)
                return self._read[key]
        try:
            grammar = _CONVERSIONS[wanted.kind](wanted, self._tokenizer)
            grammars = self._loaded()
            grammars.check(grammar)
            end = grammars.find_end(_named_tokens(grammar)) if wanted.kind in _LARK else None
            if end is not None:
                raise GrammarError(
                    f"it names {end}, a token that ends the output: leave it out, the output ends where the "
                    "grammar does"
                )
            if thinking is not None:
                grammar = _after_reasoning(grammar, thinking, wanted, self._tokenizer)
                grammars.check(grammar)
        except GrammarError as error:
            raise RequestError(f"{FIELD}: {wanted.kind}: {error}", FIELD) from error
        with self._lock:
            self._read[key] = grammar
            while len(self._read) > _MOST_READ:
                self._read.popitem(last=False)
        return grammar

    def _loaded(self) -> Grammars:
        with self._loading:
            if self._grammars is None:
                self._grammars = self._load()
            return self._grammars


def _named_tokens(grammar: str) -> list[str]:
    """Return the different tokens that a grammar in Lark's form names outside of texts and comments."""
    return list(dict.fromkeys(match[1] for match in _LARK_PARTS.finditer(grammar) if match[1]))


def _after_reasoning(
    grammar: str, thinking: Thinking, wanted: StructuredOutputsParams, tokenizer: Tokenizer
) -> str:
    """Return `grammar` after reasoning up to its closing tag.

    No text but that of the reasoning holds the closing tag, as a parser takes the first one for its end.
    Models put line breaks after it, which JSON may begin with.
    """
    form = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    takes_blanks = wanted.kind in ("json", "json_object") and not (
        wanted.disable_any_whitespace or wanted.whitespace_pattern is not None
    )
    opening = _tag(thinking.opening, tokenizer)
    start = f"{opening}? thought @form" if thinking.begun else f"({opening} thought)? @form"
    closing = tokenizer.token_id(thinking.closing)
    if closing in tokenizer.special_ids:
        spelled = re.escape(thinking.closing).replace("/", "\\/")
        ends = [f"reasoning: TEXT <[{closing}]>", f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{spelled}(.|\\n)*/"]
    else:
        ends = [f"reasoning[lazy]: TEXT {json.dumps(thinking.closing)}", "TEXT: /(.|\\n)*/"]
    blanks = ["thought: reasoning BLANKS", "BLANKS: /\\n{0,2}/"] if takes_blanks else ["thought: reasoning"]
    before = "\n".join(["%llguidance {}", f"start: {start}", *blanks, *ends])
    return json.dumps({"grammars": [{"lark_grammar": before}, {**form, "name": "form"}]})


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    """Return a tag as Lark has it: a special token, or text."""
    token = tokenizer.token_id(tag)
    return f"<[{token}]>" if token in tokenizer.special_ids else json.dumps(tag)


def _json_schema(wanted: StructuredOutputsParams, _: Tokenizer) -> str:
    return _of_schema(json.loads(str(wanted.json)), wanted)


def _json_object(wanted: StructuredOutputsParams, _: Tokenizer) -> str:
    return _of_schema({"type": "object"}, wanted)


def _of_schema(schema: dict[str, Any], wanted: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    # In the place of options that the schema may bring.
    return LLMatcher.grammar_from_json_schema(schema | {"x-guidance": _json_options(wanted)})


def _json_options(wanted: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {"coerce_one_of": False, "lenient": False}
    if wanted.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    return options | {"whitespace_pattern": wanted.whitespace_pattern or _WHITESPACE}


def _regex(wanted: StructuredOutputsParams, _: Tokenizer) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(str(wanted.regex))


def _choice(wanted: StructuredOutputsParams, _: Tokenizer) -> str:
    return "start: " + " | ".join(map(json.dumps, wanted.choice or []))


def _grammar(wanted: StructuredOutputsParams, _: Tokenizer) -> str:
    from llguidance import grammar_from

    try:
        return grammar_from("grammar", str(wanted.grammar))
    except ValueError as error:
        raise GrammarError(one_line(str(error))) from error


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _structural_tag(wanted: StructuredOutputsParams, tokenizer: Tokenizer) -> str:
    """Return free text in which each trigger opens one of the structures that begin with it, as Lark."""
    try:
        tag = msgspec.json.decode(str(wanted.structural_tag), type=_StructuralTag)
    except msgspec.ValidationError as error:
        raise GrammarError(str(error)) from error
    if tag.type != "structural_tag" or not tag.structures or not tag.triggers or "" in tag.triggers:
        raise GrammarError("type must be structural_tag, and structures and triggers must not be empty")
    rules, names = ["TEXT: /(.|\\n)*/"], []
    for number, structure in enumerate(tag.structures):
        trigger = next((each for each in tag.triggers if structure.begin.startswith(each)), None)
        if trigger is None:
            raise GrammarError(f"no trigger begins {structure.begin!r:.80}")
        body = _body(structure, structure.begin[len(trigger) :], wanted)
        names.append(f"structure_{number}")
        if tokenizer.token_id(trigger) in tokenizer.special_ids:
            rules.append(f"{names[-1]}: TEXT <[{tokenizer.token_id(trigger)}]> {body}")
        else:
            rules.append(f"opening_{number}[lazy]: TEXT {json.dumps(trigger)}")
            rules.append(f"{names[-1]}: opening_{number} {body}")
    return "\n".join(["%llguidance {}", f"start: ({' | '.join(names)})* rest", "rest: TEXT", *rules])


def _body(structure: _Structure, begin: str, wanted: StructuredOutputsParams) -> str:
    schema: Any = structure.schema
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _json_options(wanted)}
    texts = [json.dumps(text) if text else "" for text in (begin, structure.end)]
    return f"{texts[0]} %json {json.dumps(schema)} {texts[1]}"


_CONVERSIONS: Mapping[str, Callable[[StructuredOutputsParams, Tokenizer], str]] = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
