"""Makes the C++ reference from the public headers: each declaration with the `///` comment before it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import tidy

NAMES = (  # patterns for the name of a declaration; the first match counts
    r"^#define (\w+)",
    r"^(?:class|struct|enum class|enum)\s+(?:\[\[\w+\]\]\s+|alignas\(\w+\)\s+)?(\w+)",
    r"^using (\w+)",
    r"([\w~]+|operator[^\s(]+)\(",
    r"(\w+)\s*(?:=|\{|;|\[)",
)
NOT_INSTALLED = ("launch", "cli")  # cmake/install.cmake leaves them out


@functools.cache  # called for each link of each page
def layers(root: Path) -> dict[str, list[Path]]:
    """The headers that a program may include, by folder of src/muster."""
    source = root / "src/muster"
    found = {}
    for layer in tidy.LAYERS:
        if layer not in NOT_INSTALLED:
            headers = {path.relative_to(source).as_posix() for path in (source / layer).glob("*.h")}
            headers |= {header for header in tidy.PUBLIC_HEADERS if header.startswith(f"{layer}/")}
            if layer == "torch":  # all of torch/ is installed, but programs use these folders
                for folder in ("nn", "optim", "data"):
                    headers |= {path.relative_to(source).as_posix() for path in (source / layer / folder).glob("*.h")}
            found[layer] = [source / header for header in sorted(headers)]
    return found


def anchor_of(header: str) -> str:
    return re.sub(r"\W", "-", header)


def page(root: Path, layer: str) -> str:
    text = [f"# {layer}\n"]
    for header in layers(root)[layer]:
        name = header.relative_to(root / "src/muster").as_posix()
        items = [entry(comment, code) for comment, code in declarations(header.read_text())]
        if items:
            include = f"```cpp\n#include <muster/{name}>\n```\n"
            text += [f"## {name} {{#{anchor_of(name)}}}\n", include, *items]
    return "\n".join(text)


def entry(comment: str, code: str) -> str:
    return f"### {name_of(code)}\n\n{as_markdown(comment)}\n\n```cpp\n{code}\n```\n"


def name_of(code: str) -> str:
    """The name that the declaration declares."""
    code = re.sub(r"^template <.*?>+\s*(?=\w)", "", code.strip(), flags=re.DOTALL)
    for pattern in NAMES:
        if found := re.search(pattern, code):
            return found.group(1)
    return code.split("\n")[0]


def declarations(text: str) -> Iterator[tuple[str, str]]:
    """Yields (comment, public part) of each documented declaration outside of namespace `detail`."""
    comment: list[str] = []
    code: list[str] = []
    hidden = False
    lines = [*text.split("\n"), ""]
    while lines:
        line = lines.pop(0)
        if line.startswith(("namespace", "}  // namespace")):
            hidden = line.startswith(("namespace detail", "namespace {"))
        elif line.startswith("///"):
            if code:
                yield "\n".join(comment), "\n".join(code)
                comment, code = [], []
            comment.append(line[3:].removeprefix(" "))
        elif line.startswith("#define") or (line and not line.startswith(("#", "//"))):
            chunk = [line]
            while not ends(chunk) and lines:
                chunk.append(lines.pop(0))
            if not hidden and not re.fullmatch(r"(class|struct|enum class) \w+( : \w+)?;", line):
                code.append(public_part("\n".join(chunk)))
        else:
            if code and (comment or re.match(r"(class|struct|enum class) ", code[0])):
                yield "\n".join(comment), "\n".join(code)
            comment, code = [], []


def ends(lines: list[str]) -> bool:
    """True if the lines are complete declarations."""
    if lines[0].startswith("#define"):
        return not lines[-1].endswith("\\")
    bare = re.sub(r"//.*|\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])'", "", "\n".join(lines)).rstrip()
    return bare.endswith((";", "}")) and all(bare.count(a) == bare.count(b) for a, b in ("()", "{}"))


def public_part(code: str) -> str:
    """The declaration without private members and without the bodies of functions."""
    lines = code.split("\n")
    if lines[0].startswith("#define"):
        return lines[0].rstrip("\\ ")
    head = next((number for number, line in enumerate(lines) if not line.startswith("template")), 0)
    if not re.match(r"\s*(class|struct) ", lines[head]) or len(lines) == head + 1:
        return without_body(code)
    indent = " " * (len(lines[head]) - len(lines[head].lstrip()) + 2)
    opening = next(number for number, line in enumerate(lines) if line.rstrip().endswith("{"))
    kept = lines[: opening + 1]
    shown = "struct " in lines[head]
    body = lines[opening + 1 : -1]
    while body:
        line = body.pop(0)
        if found := re.fullmatch(r"\s*(public|protected|private):", line):
            shown = found.group(1) == "public"
            kept += [line] if shown else []
            continue
        chunk = [line]
        if line.strip() and not line.strip().startswith("//"):
            while not ends(chunk) and body:
                chunk.append(body.pop(0))
        if shown:
            kept.append(public_part("\n".join(chunk)) if line.startswith(indent) else line)
    while not kept[-1].strip():
        kept.pop()
    return "\n".join([*kept, lines[-1]])


def without_body(code: str) -> str:
    """Returns the declaration of a function's definition, and any other code unchanged."""
    if re.match(r"\s*(using|enum|union|static_assert)\b|\s*(///|//)", code) or "(" not in code.partition("{")[0]:
        return code
    depth = 0
    for at, character in enumerate(code):
        depth += (character == "(") - (character == ")")
        if character == ")" and depth == 0:
            rest = code[at + 1 :]
            qualifiers = r"(?:\s*(?:const|noexcept|override|final|&&?))*(?:\s*->\s*[\w:<>*& ]+?)?"
            body = re.match(rf"({qualifiers})\s*(?::\s|\{{)", rest)
            if body:
                return code[: at + 1] + body.group(1) + ";"
    return code


def as_markdown(comment: str) -> str:
    """The comment's text as Markdown. Indented lines are code."""
    lines: list[str] = []
    for line in comment.split("\n"):
        is_code = line.startswith("  ")
        if lines and is_code != lines[-1].startswith("    ") and lines[-1]:
            lines.append("")
        lines.append("    " + line if is_code else re.sub(r"([<*\[])", r"\\\1", line).replace("\\<", "&lt;"))
    return "\n".join(lines)
