"""Grammars compiled for a vocabulary: which texts they allow, and which tokens come next."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from byte_tokenizer import EOS
from enginecore.errors import RequestError
from enginecore.frontend.guides import GuideReader
from enginecore.frontend.parsing import Thinking
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.grammars import GrammarError, Grammars
from enginecore.model_files import ModelFiles
from enginecore.structured_outputs import StructuredOutputsParams


class Language:
    """What a grammar allows, asked a token at a time."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar

    def next_tokens(self, ids: list[int]) -> list[int]:
        """The ids that may follow `ids`, which must be allowed themselves."""
        matcher = self._grammars.matcher(self._grammar)
        assert matcher.try_consume_tokens(ids) == len(ids)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()

    def allows(self, text: str) -> bool:
        """Whether byte after byte may come, and then the end."""
        matcher = self._grammars.matcher(self._grammar)
        ids = list(text.encode())
        for place, token in enumerate(ids):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if not bits[token // 8] >> token % 8 & 1:
                return False
            assert matcher.try_consume_tokens([token]) == 1, text[: place + 1]
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return bool(bits[EOS // 8] >> EOS % 8 & 1)


@pytest.fixture
def read(byte_tokenizer):
    """Turns fields of StructuredOutputsParams into a Language of the byte tokenizer, of 320 ids."""
    grammars = Grammars(byte_tokenizer, 320, [EOS])
    reader = GuideReader(byte_tokenizer, lambda: grammars)
    return lambda **fields: Language(grammars, reader.read(StructuredOutputsParams(**fields)))


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v", "kids"],
        }
    },
    "$ref": "#/$defs/node",
}
STRING = {"type": "string"}
OPTIONAL = {"type": "object", "properties": {"a": STRING, "b": {"type": "integer"}, "c": {"type": "boolean"}}}

REACHABLE = [
    (STRING, r'"\"\\\n\u0007/"'),
    ({"type": "string", "maxLength": 6}, r'"\"\\\n\u0007é🌶"'),
    ({"type": "string", "minLength": 2, "maxLength": 4}, r'"\\\""'),
    (TREE, '{"v":1,"kids":[{"v":-2,"kids":[]},{"v":3,"kids":[{"v":40,"kids":[]}]}]}'),
    ({"$defs": {"a/b": {"type": "null"}}, "properties": {"x": {"$ref": "#/$defs/a~1b"}}}, '{"x":null}'),
    ({"anyOf": [{"const": "abc"}, {"const": "abd"}, {"const": "ab"}]}, '"abd"'),
    ({"type": "array", "items": {"type": "number"}}, "[-0.5e+10,1E5,0,-12.25]"),
    ({"type": "object"}, "{}"),
    ({"type": "array"}, "[]"),
    (OPTIONAL, '{"a":"x","c":true}'),
    (OPTIONAL, '{"b":7,"zzz":[1,{}]}'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"é":1,"\\"":2,"":3}'),
    ({"type": ["string", "null"]}, "null"),
    ({"enum": [1, "two", None, {"three": [3]}]}, '{"three":[3]}'),
    ({"type": "integer", "minimum": -10, "maximum": 300}, "-10"),
    ({"type": "integer", "minimum": -10, "maximum": 300}, "300"),
    ({"type": "integer"}, "4096"),
    ({"type": "array", "items": STRING, "minItems": 2, "maxItems": 3}, '["a","b","c"]'),
    ({"oneOf": [STRING, {"type": "integer"}]}, "17"),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, '"AB-12"'),
    ({"type": "string", "format": "date"}, '"2026-11-30"'),
]
"""Schemas, and a text of each that a grammar of its own accord might forget."""


@pytest.mark.parametrize(("schema", "text"), REACHABLE, ids=[text[:40] for _, text in REACHABLE])
@pytest.mark.parametrize("compact", [False, True])
def test_what_a_schema_allows_is_reachable(read, schema, text, compact):
    jsonschema.validate(json.loads(text), schema)
    assert read(json=schema, disable_any_whitespace=compact).allows(text)


SPACED = '{\n  "a": "x",\r\n\t"c" : true }'


def test_whitespace_is_json_s_unless_the_caller_says_otherwise(read):
    assert read(json=OPTIONAL).allows(SPACED)
    assert not read(json=OPTIONAL, disable_any_whitespace=True).allows(SPACED)
    # Runs are bounded: a weak model would fill its answer with them.
    for run, allowed in ((64, True), (65, False)):
        for blank in " \n":
            assert read(json=OPTIONAL).allows(f'{{{blank * run}"a":{blank * run}"x"}}') is allowed
    single = read(json=OPTIONAL, whitespace_pattern=" ?")
    assert single.allows('{"a": "x" , "c":true}')
    assert not single.allows('{"a":  "x"}')


def test_options_within_a_schema_count_for_nothing(read):
    schema = OPTIONAL | {"x-guidance": {"whitespace_flexible": False, "lenient": True}, "not": {}}
    with pytest.raises(RequestError, match="Unimplemented keys"):
        read(json=schema)
    del schema["not"]
    assert read(json=schema).allows(SPACED)


STRANGE = 'a+b(c)|"é🌶"\n[x]\x00\x7f%\\'


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"choice": ["ab", "abc", "abcd"]}, ["ab", "abc", "abcd"], ["a", "abcde", ""]),
        ({"choice": ["abcd", "ab", "ab"]}, ["ab", "abcd"], ["abc"]),
        ({"choice": [STRANGE, "x"]}, [STRANGE, "x"], ["aab(c)"]),
        ({"regex": "[0-9]+"}, ["1", "12", "4096"], ["", "a"]),
        ({"regex": "[0-9]{1,4}"}, ["1", "12", "4096"], ["40960"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["yes$", "^yes"]),
        ({"regex": r"yes\$"}, ["yes$"], ["yes"]),
        ({"regex": "é|🌶"}, ["é", "🌶"], ["e"]),
        ({"grammar": 'root ::= "a" | "ab"'}, ["a", "ab"], ["abc"]),
        ({"grammar": 'root ::= "(" root? ")"'}, ["()", "((()))"], ["(", "(()"]),
        ({"grammar": 'start: word ("," word)*\nword: /[a-z]+/'}, ["a", "ab,c"], ["a,", ","]),
        ({"json_object": True}, ["{}", '{"a":[1,"x",null]}'], ["[]", "3", '"{}"']),
    ],
    ids=lambda value: str(value)[:40],
)
def test_texts_of_regexes_choices_and_grammars(read, fields, right, wrong):
    language = read(**fields)
    assert [text for text in right if not language.allows(text)] == []
    assert [text for text in wrong if language.allows(text)] == []


TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"const": "x"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def test_a_trigger_opens_a_structure_in_free_text(read):
    language = read(structural_tag=TAG)
    for text in ("", "hello <f", 'say <f=a>12</f> and <f=b>"x"</f>\nbye'):
        assert language.allows(text), text
    for text in ("<f=c>", "<f=a>12", "<f=a>x</f>", "<f=b>12</f>"):
        assert not language.allows(text), text


def test_a_trigger_that_is_a_special_token_is_that_token(byte_tokenizer):
    grammars = Grammars(byte_tokenizer, 320, [EOS])
    reader = GuideReader(byte_tokenizer, lambda: grammars)
    tag = {
        "structures": [{"begin": "<eot>n=", "schema": {"type": "integer"}, "end": ""}],
        "triggers": ["<eot>"],
    }
    language = Language(grammars, reader.read(StructuredOutputsParams(structural_tag=tag)))
    eot = byte_tokenizer.token_id("<eot>")
    assert eot in language.next_tokens(list(b"hi"))
    assert language.next_tokens([*b"hi", eot]) == [ord("n")]
    assert ord("<") in language.next_tokens([])  # the text "<eot>" is not the token


REFUSED = [
    ({"json": {"type": "strin"}}, "Invalid type: strin"),
    ({"json": {"$ref": "#/nowhere"}}, "Pointer '/nowhere' does not exist"),
    ({"json": {"$ref": "http://example.com/x"}}, "not present in a registry"),
    ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"uniqueItems": True, "type": "array"}}, "Unimplemented keys: ..uniqueItems"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf constraints are not supported"),
    ({"json": {"type": "string", "format": "hostess"}}, "Unknown format"),
    ({"json": '{"items":' * 900 + "{}" + "}" * 900}, "recursion limit|nested too deeply"),
    (
        {
            "json": {
                "allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(10)]
            }
        },
        "too large",
    ),
    ({"json": {"$ref": "#"}}, "allows no text|too"),
    ({"json": {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}}, "allows no text|too"),
    ({"grammar": 'start: x\nx: x "b"'}, "allows no text|too|ambiguous"),
    ({"regex": r"[^\s\S]"}, "."),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"grammar": "root ::= missing"}, "Rule 'missing' not found"),
    ({"grammar": "start: <nowhere>"}, "unknown special token"),
    ({"grammar": "root ::= " + "(" * 20_000}, "recursion"),
    ({"structural_tag": {"structures": [], "triggers": ["x"]}}, "must not be empty"),
    ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "no trigger begins '<f=a>'"),
    ({"structural_tag": {"format": {}}}, "unknown field|missing required field"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_does_not_compile_is_refused_in_one_line(read, fields, message):
    with pytest.raises(RequestError, match=message) as caught:
        read(**fields)
    assert caught.value.param == "structured_outputs"
    assert str(caught.value).startswith(f"structured_outputs: {next(iter(fields))}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


KINDS = [
    ({"json": {"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}}}, '{"a":1}', "\n\n"),
    ({"json": {"const": "x"}, "disable_any_whitespace": True}, '"x"', ""),
    ({"json": {"const": "x"}, "whitespace_pattern": " "}, '"x"', ""),
    ({"json_object": True}, "{}", "\n"),
    ({"regex": "[0-9]/[0-9]"}, "4/2", ""),
    ({"choice": ["é🌶", "b"]}, "é🌶", ""),
    ({"grammar": 'start: "a" x\nx: "b"'}, "ab", ""),
    ({"grammar": '%llguidance {}\nstart: "a" <bos>?'}, "a", ""),
    ({"grammar": 'root ::= "a" [b-c]'}, "ac", ""),
    ({"structural_tag": TAG}, "say <f=a>12</f>", ""),
]


@pytest.fixture
def read_after(byte_tokenizer):
    """As `read`, of an output that may think first."""
    grammars = Grammars(byte_tokenizer, 320, [EOS])
    reader = GuideReader(byte_tokenizer, lambda: grammars)

    def read(thinking: Thinking, **fields):
        return Language(grammars, reader.read(StructuredOutputsParams(**fields), thinking))

    return read


@pytest.mark.parametrize(("fields", "good", "blanks"), KINDS, ids=lambda value: str(value)[:40])
def test_a_form_holds_after_reasoning(read_after, fields, good, blanks):
    language = read_after(Thinking("<think>", "</think>", begun=True), **fields)
    for text in ("Hm.</think>", "</think>", '<think>é {"a": \n</thin <eos></think>'):
        assert language.allows(text + good), text
        assert language.allows(text + blanks + good), text
    assert not language.allows("Hm.")
    assert not language.allows(good)
    if "structural_tag" not in fields:
        assert not language.allows("Hm.</think>" + good + "x")
        assert not language.allows("a</think>b</think>" + good)
        if not blanks:
            assert not language.allows("Hm.</think>\n" + good)


@pytest.mark.parametrize(("fields", "good", "blanks"), KINDS, ids=lambda value: str(value)[:40])
def test_reasoning_that_has_not_begun_may_be_left_out(read_after, fields, good, blanks):
    language = read_after(Thinking("<think>", "</think>", begun=False), **fields)
    assert language.allows(good)
    assert language.allows("<think>Hm.</think>" + blanks + good)
    if "structural_tag" not in fields:
        assert not language.allows("Hm.</think>" + good)
        assert not language.allows(good + "<think></think>")


@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_between_special_tokens(byte_tokenizer, begun):
    grammars = Grammars(byte_tokenizer, 320, [EOS])
    reader = GuideReader(byte_tokenizer, lambda: grammars)
    thinking = Thinking("<bos>", "<eot>", begun)
    language = Language(grammars, reader.read(StructuredOutputsParams(choice=["ab"]), thinking))
    bos, eot = byte_tokenizer.token_id("<bos>"), byte_tokenizer.token_id("<eot>")
    assert (ord("a") in language.next_tokens([])) and bos in language.next_tokens([])
    assert (ord("x") in language.next_tokens([])) == begun
    assert eot in language.next_tokens([bos, *b"hm"])
    assert language.next_tokens([bos, *b"hm", eot]) == [ord("a")]
    assert language.next_tokens([bos, *b"<eot>"[:-1]]).count(ord(">")) == 0  # the parser would end there
    assert EOS not in language.next_tokens([bos, *b"hm"])
    assert language.next_tokens([bos, eot, *b"ab"]) == [EOS]


def test_forms_with_and_without_reasoning_are_not_taken_for_each_other(byte_tokenizer):
    grammars = Grammars(byte_tokenizer, 320, [EOS])
    reader = GuideReader(byte_tokenizer, lambda: grammars)
    wanted = StructuredOutputsParams(choice=["ab"])
    plain = reader.read(wanted)
    first = reader.read(wanted, Thinking("<think>", "</think>", begun=True))
    assert reader.read(wanted) == plain != first
    assert reader.read(wanted, Thinking("<think>", "</think>", begun=False)) not in (plain, first)


@pytest.mark.parametrize("begun", [True, False])
def test_what_no_text_fits_is_refused_after_reasoning_too(read_after, begun):
    thinking = Thinking("<think>", "</think>", begun)
    for fields in ({"regex": r"[^\s\S]"}, {"json": {"$ref": "#"}}, {"grammar": 'start: <eos> "a"'}):
        with pytest.raises(RequestError, match="structured_outputs: "):
            read_after(thinking, **fields)


ENDING = [
    ('start: <eos> "a"', "<eos>"),
    ('start: "a" <eos> "b"', "<eos>"),
    ('start: "a" x?\nx: "b" <eos>', "<eos>"),
    ('start: <[257]> "a"', "<[257]>"),
    ('start: <[65,256-257]> "a"', "<[65,256-257]>"),
    ('start: <[*]> "a"', "<[*]>"),
    ('start: <[^65]> "a"', "<[^65]>"),
    ('start: <bos> <eot> "a"', "<eot>"),
    (f"start: {' | '.join(f'<[{token}]>' for token in range(200))} | <[258]>", "<[258]>"),
]


@pytest.mark.parametrize(("grammar", "named"), ENDING, ids=lambda value: value[:40])
def test_a_token_that_ends_the_output_is_no_part_of_a_grammar(byte_tokenizer, grammar, named):
    """It would end there, and what the grammar asks for after it never come."""
    grammars = Grammars(byte_tokenizer, 320, [EOS, byte_tokenizer.token_id("<eot>")])
    reader = GuideReader(byte_tokenizer, lambda: grammars)
    with pytest.raises(RequestError, match="structured_outputs: grammar: it names ") as caught:
        reader.read(StructuredOutputsParams(grammar=grammar))
    assert f"it names {named}, a token that ends the output" in str(caught.value)


def test_a_trigger_that_ends_the_output_is_refused(read):
    tag = {"structures": [{"begin": "<eos>", "schema": {}, "end": ""}], "triggers": ["<eos>"]}
    with pytest.raises(RequestError, match=r"structural_tag: it names <\[257\]>, a token that ends"):
        read(structural_tag=tag)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "<eos>" "a"',
        'start: "\\"<eos>" "a"',
        "start: /<eos>|a/",
        "start: /\\/<eos>/",
        'start: "a" // <eos>',
        'start: %json {"const": "<eos>"}',
        'root ::= "<eos>"',
        'start: <eot> "a"',
        'start: <[^257]> "a"',
    ],
)
def test_other_tokens_and_texts_may_be_named(read, grammar):
    read(grammar=grammar)


def test_a_schema_that_refers_to_itself_is_no_endless_loop(read):
    with pytest.raises(RequestError, match="structured_outputs: json: "):
        read(json={"allOf": [{"$ref": "#"}], "type": "object"})


@pytest.mark.parametrize("kind", ["stories", "byte-level", "byte-fallback"])
def test_masks_of_choices_hold_what_may_come(tokenizer_folders, kind):
    """Every token that may come begins what is left of some choice, and the end comes in time."""
    tokenizer = _load(tokenizer_folders[kind])
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 17, [eos])
    choices = ["the dog ran", "the dogs ran", "the cat é🌶 \n", "the", "a girl"]
    reader = GuideReader(tokenizer, lambda: grammars)
    language = Language(grammars, reader.read(StructuredOutputsParams(choice=choices)))
    rng = np.random.default_rng(3)
    ended = set()
    for _ in range(60):
        ids: list[int] = []
        while True:
            done = b"".join(tokenizer.token_bytes(token) for token in ids)
            allowed = language.next_tokens(ids)
            assert (eos in allowed) == (done.decode("utf-8", "replace") in choices)
            for token in allowed:
                piece = tokenizer.token_bytes(token)
                assert token == eos or any(text.encode().startswith(done + piece) for text in choices)
            token = int(rng.choice(allowed))
            if token == eos:
                ended.add(done.decode())
                break
            ids.append(token)
    assert ended == set(choices)


def test_text_that_is_forced_is_cut_as_the_tokenizer_cuts_it(tokenizer_folders):
    tokenizer = _load(tokenizer_folders["byte-level"])
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [0])
    text = "Once upon a time, there was a girl"
    wanted = tokenizer.encode(text, add_special_tokens=False)
    language = Language(grammars, "start: " + json.dumps(text))
    assert len(wanted) < len(text)
    for place, token in enumerate(wanted):
        assert language.next_tokens(wanted[:place]) == [token]


@pytest.mark.parametrize("text", ["x<|end|>y", "<|user|>", "a<|assistant|><|end|>"])
def test_text_that_spells_a_special_token_is_text(tokenizer_folders, text):
    tokenizer = _load(tokenizer_folders["stories"])
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.token_id("<|end|>")])
    reader = GuideReader(tokenizer, lambda: grammars)
    language = Language(grammars, reader.read(StructuredOutputsParams(choice=[text])))
    ids: list[int] = []
    while b"".join(tokenizer.token_bytes(token) for token in ids) != text.encode():
        (allowed,) = language.next_tokens(ids)  # nothing else may come
        assert allowed not in tokenizer.special_ids
        ids.append(allowed)
    assert language.next_tokens(ids) == [tokenizer.token_id("<|end|>")]


def test_many_alternatives_at_one_place(read):
    choices = [f"{number:04}" for number in range(5000)]
    language = read(choice=choices)
    assert language.allows("4999")
    assert not language.allows("5000")
    optional = {f"p{number}": {"type": "null"} for number in range(600)}
    assert read(json={"type": "object", "properties": optional}).allows('{"p599":null}')


def _load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(ModelFiles("m", folder, {}))
    assert tokenizer is not None
    return tokenizer


def test_ids_beyond_the_tokenizers_and_special_tokens_never_come(read):
    allowed = read(regex="(.|\n)*").next_tokens([])
    assert set(allowed) <= {*range(256), EOS}
    assert EOS in allowed


def test_a_tokenizer_that_joins_tokens_by_rules_of_its_own_is_refused(tokenizer_folders, byte_tokenizer):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    with pytest.raises(GrammarError, match="joins tokens by rules of its own"):
        Grammars(Tokenizer(Backend(models.WordLevel({"a": 0}))), 1, [0])
    with pytest.raises(GrammarError, match="no EOS token"):
        Grammars(byte_tokenizer, 320, [])
    with pytest.raises(GrammarError, match="no EOS token"):
        Grammars(byte_tokenizer, 200, [257])


def test_a_grammar_is_compiled_once(byte_tokenizer, monkeypatch):
    import llguidance

    made = []
    grammars = Grammars(byte_tokenizer, 320, [EOS])
    matcher = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", lambda *a, **k: made.append(a[1]) or matcher(*a, **k))
    first = grammars.matcher('start: "ab"')
    assert first.try_consume_tokens(list(b"ab")) == 2
    # Another row's matcher is at the beginning.
    assert grammars.matcher('start: "ab"').try_consume_tokens(list(b"ab")) == 2
    grammars.matcher('start: "ac"')
    assert made == ['start: "ab"', 'start: "ac"']
