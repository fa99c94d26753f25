"""Write docs/errors.md: every text of an error that sparkis can show, from the sources.

    python scripts/errors_page.py            write the page
    python scripts/errors_page.py --check    fail if the page is out of date

The texts are the string arguments of exceptions whose names end in `Error`, of `mistakes.add`, of `sys.exit` and of
lines `sparkis COMMAND: ...` that are printed. What a text names (a key, a file, a number) is written as `…`. Compiled
modules are left out: their errors are those of the Python code beside them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
PACKAGES = ("state_backend", "resp_server", "spark_hooks", "sparkis", "sparkis_ui")

# The sections of the page, and the folders and files whose errors they have: the longest name that fits decides.
SECTIONS = {
    "Replies to clients": (
        "resp_server",
        "resp_server/acl",
        "resp_server/client",
        "resp_server/commands",
        "resp_server/command",
        "resp_server/pipeline",
        "resp_server/protocol",
        "resp_server/push",
        "resp_server/session",
        "resp_server/settings/config_values.py",
        "resp_server/settings/event_classes.py",
        "resp_server/workers",
    ),
    "Proxies and upstreams": ("resp_server/raw_replies", "resp_server/backends", "resp_server/pipeline/batch.py"),
    "Command lines and the start of servers": (
        "resp_server/exporter",
        "resp_server/metrics",
        "resp_server/native",
        "resp_server/net",
        "resp_server/programs",
        "resp_server/serving",
        "resp_server/settings",
        "spark_hooks/cli.py",
        "sparkis",
        "sparkis_ui",
    ),
    "Clusters and their registry": ("resp_server/cluster", "resp_server/registry"),
    "States, keys and values": ("state_backend/codec", "state_backend/model"),
    "Logs": ("state_backend", "state_backend/history", "state_backend/log", "state_backend/native"),
    "Stores and appliers": ("state_backend/apply", "state_backend/lmdb", "state_backend/store"),
    "Checkpoints and attachments": ("spark_hooks/attach", "state_backend/attach", "state_backend/checkpoint"),
    "Spark: publishing and serving": ("spark_hooks",),
}

UNKNOWN = "…"
# What only programmers see.
LEFT_OUT = (
    "AssertionError",
    "NotImplementedError",
    "TypeError",
    "AttributeError",
    "KeyError",
    "IndexError",
    "SystemError",
    "DeclarationError",
    "NotAllowedError",
)
# Errors without a class of ours, by what the page calls them.
PRINTED = "printed by a command, which then exits"

INTRODUCTION = """\
# Errors

Every text of an error that sparkis shows, by the part that shows it, from the sources (`make errors`). Search this page
for the fixed words of your error: `…` stands for a key, a file, a job, a number. A text says what is wrong and what to
do. [Troubleshooting](troubleshooting.md) goes by symptom, and says more about frequent errors.

Errors of Redis itself have Redis' texts. Errors behind a proxy may be those of the servers or of the upstream.
`internal error …` is a bug of sparkis: the server's log has more under the same id; please report both.

## The first word of a reply

| code | meaning |
|---|---|
"""


class Text(NamedTuple):
    """An error's text. error: the class, or how it is shown."""

    section: str
    error: str
    text: str


def main(arguments: list[str]) -> int:
    """Write or check the page; return the exit code."""
    made = page()
    if arguments == ["--check"]:
        is_current = PAGE.exists() and PAGE.read_text() == made
        if not is_current:
            print("docs/errors.md is out of date: run `make errors`", file=sys.stderr)
        return not is_current
    PAGE.write_text(made)
    return 0


def page() -> str:
    """Return the page."""
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    meanings = dict(meaning for tree in trees.values() for meaning in meanings_of(tree))
    texts = {text for path, tree in trees.items() for text in texts_of(section_of(path), tree)}
    by_section: dict[str, dict[str, list[str]]] = {section: defaultdict(list) for section in SECTIONS}
    for section, error, text in sorted(texts):
        by_section[section][error].append(text)
    codes = sorted(code for tree in trees.values() for code in codes_of(tree))
    parts = [INTRODUCTION + "".join(f"| `{code}` | {meanings[error]} |\n" for code, error in codes)]
    for section, by_error in by_section.items():
        parts.append(f"## {section}\n")
        for error, lines in by_error.items():
            meaning = meanings.get(error)
            parts.append(f"**{error}**{f': {meaning}' if meaning else ''}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


def sources() -> list[Path]:
    """Return the shipped sources."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def section_of(path: Path) -> str:
    """Return the section with a file's errors; KeyError if its folder is in none."""
    names = {name: section for section, folders in SECTIONS.items() for name in folders}
    relative = path.relative_to(ROOT)
    return next(names[str(each)] for each in (relative, *relative.parents) if str(each) in names)


def meanings_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (class, first line of its docstring) of each class of errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and (doc := ast.get_docstring(node)):
            yield node.name, " ".join(doc.partition("\n\n")[0].split())


def codes_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (code, class) of each class of error replies."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value), node.name


def texts_of(section: str, tree: ast.Module) -> Iterator[Text]:
    """Yield the texts of a module."""
    constants = dict(constants_of(tree))
    for node in ast.walk(tree):
        known = constants
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            known = constants | dict(defaults_of(node))
            own = [(node.name, call) for call in ast.walk(node) if isinstance(call, ast.Call) and is_super(call)]
        elif isinstance(node, ast.Call) and (error := error_of(node)):
            own = [(error, node)]
        else:
            continue
        for error, call in own:
            for argument in call.args[:1]:
                for text in alternatives(argument, known):
                    if error not in LEFT_OUT and is_told(text):
                        yield Text(section, error, text)


def defaults_of(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and defaults of a constructor's arguments."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__" and each.args.defaults:
            names = [argument.arg for argument in each.args.args[-len(each.args.defaults) :]]
            for name, default in zip(names, each.args.defaults, strict=True):
                if text_of(default, {}):  # an empty default says nothing of the text that it stands for
                    yield name, default


def alternatives(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the texts that an argument may have."""
    if isinstance(node, ast.IfExp):
        yield from alternatives(node.body, constants)
        yield from alternatives(node.orelse, constants)
    else:
        yield re.sub(f"{UNKNOWN}+", UNKNOWN, text_of(node, constants)).strip()


def constants_of(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and values of a module's constants."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def is_super(call: ast.Call) -> bool:
    """Return whether a call is `super().__init__(...)`."""
    called = call.func
    return (
        isinstance(called, ast.Attribute)
        and called.attr == "__init__"
        and isinstance(called.value, ast.Call)
        and isinstance(called.value.func, ast.Name)
        and called.value.func.id == "super"
    )


def error_of(call: ast.Call) -> str | None:
    """Return the class of the error that a call makes, or how it is shown; None for other calls."""
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if last.endswith("Error"):
        return last.lstrip("_")
    is_line = name == "print" and any("sparkis " in ast.unparse(argument) for argument in call.args)
    return PRINTED if is_line or name == "sys.exit" or name.endswith("mistakes.add") else None


def text_of(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """Return a text, with … for what is not known."""
    match node:
        case ast.Constant(value=str(text)):
            return " ".join(text.split(" ")).replace("\n", " ")
        case ast.JoinedStr(values=values):
            return "".join(text_of(each, constants) for each in values)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in constants:
            return text_of(constants[name], {})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, constants) + text_of(right, constants)
        case ast.Name(id=name) if name in constants:
            return text_of(constants[name], {})
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            return text_of(value, constants)
    return UNKNOWN


def is_told(text: str) -> bool:
    """Return whether a text says something itself: two words at least, beside what it names and the command."""
    said = re.sub(r"^sparkis [\w-]+: ", "", text).replace(UNKNOWN, " ")
    return len([word for word in said.split() if any(letter.isalpha() for letter in word)]) >= 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
