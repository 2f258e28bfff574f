"""Count the lines of code along the reading path of docs/architecture.md.

    python tools/reading_path.py          print the table, as the document has it

Counted are lines with code: not blank ones, comments or docstrings.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ENGINE = "packages/enginecore/src/enginecore"
_ATTENTION = "packages/pagedattn/src/pagedattn"

PATH = {
    "`kvblocks`: pool, tables, prefix, host tier, memory": ["packages/kvblocks/src"],
    "`batchsched`: records, policies, running rows, waiting queue, scheduler": ["packages/batchsched/src"],
    "`pagedattn`: `layout`, `batch`, `attention` and its oracle, `torch_backend`": [
        f"{_ATTENTION}/{name}" for name in ("layout.py", "batch.py", "attention.py", "torch_backend")
    ],
    "`enginecore`, top level: configuration, options, messages, engines": [f"{_ENGINE}/*.py"],
    "`enginecore/frontend`: front-end, output processor, stream, text, OpenAI's format": [
        f"{_ENGINE}/frontend"
    ],
    "`enginecore/data_parallel`: dispatcher, routing, coordinator, waves": [f"{_ENGINE}/data_parallel"],
    "`enginecore/core`, `executor`: loop, process, supervisor, step records, in-process executor": [
        f"{_ENGINE}/core",
        *(f"{_ENGINE}/executor/{name}.py" for name in ("executor", "step", "messages", "inproc")),
    ],
    "`enginecore/worker`: worker, loop, runner, sampling": [
        f"{_ENGINE}/worker/*.py",
        f"{_ENGINE}/worker/runner",
        f"{_ENGINE}/worker/sampling",
    ],
    "`enginecore/worker/models`: spec, decoder, layers, one family": [
        f"{_ENGINE}/worker/models/*.py",
        f"{_ENGINE}/worker/models/families/llama.py",
    ],
    "`octavo_serve`": ["apps/serve/src"],
}
"""Parts of the path, in order, and the files or folders of each."""

PLUG_INS = {
    *("gguf.py", "gguf_tokenizer.py", "experts.py"),
    *("hermes.py", "llama3_json.py", "mistral.py", "pythonic.py", "reasoning.py"),
    *("call_text.py", "json_calls.py", "json_span.py"),
}


def code_lines(source: str) -> int:
    """Return the number of lines of a Python source that hold code."""
    code: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENCODING, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                code.difference_update(range(first, last + 1))
    return len(code)


def files_of(pattern: str) -> list[Path]:
    """Return the Python files that a file name, a folder or a pattern stands for, without plug-ins."""
    found = ROOT.glob(pattern) if "*" in pattern else [ROOT / pattern]
    files = [file for path in found for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [file for file in files if file.name not in PLUG_INS]


def table() -> str:
    """Return the table of the reading path, in Markdown."""
    counts = {
        what: sum(code_lines(file.read_text()) for pattern in patterns for file in files_of(pattern))
        for what, patterns in PATH.items()
    }
    rows = [f"| {what} | {count:,} |" for what, count in counts.items()]
    rows.append(f"| together | {sum(counts.values()):,} |")
    return "\n".join(["| what | lines of code |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
