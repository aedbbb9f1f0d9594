"""Checks lengths for tidy.py: functions have at most 70 lines, files at most 500.

tools/tidy_lengths.txt lists the functions and files that were longer when the rule began, with their lengths. A length
there may only shrink: an entry that is too large, or not needed any more, is a finding too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MAX_FUNCTION = 70
MAX_FILE = 500
RATCHET = "tools/tidy_lengths.txt"
NOT_A_FUNCTION = re.compile(
    r"^(inline\s+)?(namespace|class|struct|union|enum|extern)\b|^(export\s+)?template\s*<[^()]*>\s*(class|struct)\b"
)

Row = tuple[str, int, str, str]  # path, line, rule, advice


def cpp_functions(code: str) -> Iterator[tuple[str, int, int]]:
    """Yields (name, first line, lines) of each outermost function body. `code` has blanked comments and literals."""
    code = re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda match: re.sub(r"[^\n]", " ", match.group()), code, flags=re.M
    )
    scopes: list[str | None] = []  # a function's name, or None for a namespace, class or initializer
    starts: list[int] = []
    head_start = 0
    for match in re.finditer(r"[{};]", code):
        inside_function = any(scope is not None for scope in scopes)
        if match.group() == "{":
            head = code[head_start : match.start()]
            scopes.append(None if inside_function else function_name(head))
            starts.append(head_start + len(head) - len(head.lstrip()))
        elif match.group() == "}" and scopes:
            name, start = scopes.pop(), starts.pop()
            if name is not None and not any(scope is not None for scope in scopes):
                first = code.count("\n", 0, start) + 1
                yield name, first, code.count("\n", 0, match.start()) + 2 - first
        if match.group() != ";" or not open_parenthesis(code[head_start : match.start()]):
            head_start = match.end()


def open_parenthesis(text: str) -> bool:
    return text.count("(") > text.count(")")


def function_name(head: str) -> str | None:
    head = re.sub(r"\b(public|private|protected)\s*:|\[\[[^\]]*\]\]", " ", head).strip()
    head = re.sub(r"^template\s*<[^{};]*?>\s*(requires[^{};]*?\n\s*)?(?=\w)", "", head)
    if not head or NOT_A_FUNCTION.match(head) or "(" not in head:
        return None
    name = re.search(r"([\w:~]+|operator\s*[^\s(]+(?:\(\))?)\s*\(", head)
    before = head[: name.start()] if name else ""
    return None if name is None or "=" in before else name.group(1)


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # ruff reports syntax errors
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def lengths(text: dict[str, str], code: dict[str, str]) -> Iterator[tuple[str, str, int, int, int]]:
    """Yields (path, what, line, length, limit) of every function and file; `what` is the function's name, or "file"."""
    for path, source in text.items():
        functions: Iterator[tuple[str, int, int]] = iter(())
        if path in code:
            functions = cpp_functions(code[path])
        elif path.endswith(".py"):
            functions = python_functions(source)
        else:
            continue
        for name, line, length in functions:
            yield path, name, line, length, MAX_FUNCTION
        yield path, "file", 1, source.count("\n"), MAX_FILE


def check(text: dict[str, str], code: dict[str, str]) -> Iterator[Row]:
    allowed: dict[tuple[str, str], tuple[int, int]] = {}
    for number, entry in enumerate(text.get(RATCHET, "").splitlines(), start=1):
        if entry and not entry.startswith("#"):
            path, what, count = entry.split()
            allowed[path, what] = (int(count), number)
    longest: dict[tuple[str, str], int] = {}
    for path, what, line, length, limit in lengths(text, code):
        longest[path, what] = max(length, longest.get((path, what), 0))
        if length > max(limit, allowed.get((path, what), (0, 0))[0]):
            kind = "a file" if what == "file" else f"{what}()"
            yield path, line, "length", f"{kind} of {length} lines: split it before {limit}"
    for (path, what), (length, number) in allowed.items():
        now = longest.get((path, what), 0)
        limit = MAX_FILE if what == "file" else MAX_FUNCTION
        if now <= limit:
            yield RATCHET, number, "ratchet", f"{path} {what} is within the limit: remove its line"
        elif now < length:
            yield RATCHET, number, "ratchet", f"{path} {what} has {now} lines now: lower its count"
