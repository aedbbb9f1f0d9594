"""Checks documents: links have targets, and the documented environment variables are those that the code reads."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

VARIABLES = "docs/reference/environment.md"
# Files with variables for users; docs/project/testing.md describes those of tests.
READERS = re.compile(r"(src/muster|python/muster)/.*\.(cpp|h|py)$")

Finding = tuple[str, int, str, str]  # path, line, rule, advice


def check(text: dict[str, str]) -> Iterator[Finding]:
    yield from check_links(text)
    if VARIABLES in text:
        yield from check_variables(text)


def check_links(text: dict[str, str]) -> Iterator[Finding]:
    there = set(text) | {parent.as_posix() for path in text for parent in Path(path).parents}
    for path in text:
        if not path.endswith(".md"):
            continue
        for number, line in enumerate(text[path].split("\n"), start=1):
            for target, _, anchor in re.findall(r"\]\(([^)\s:#]*)(#([^)\s]+))?\)", line):
                name = posixpath.normpath((Path(path).parent / target).as_posix()) if target else path
                if name not in there:
                    yield path, number, "broken-link", f"there is no {name}"
                elif anchor and anchor not in map(anchor_of, re.findall(r"^#+ (.*)$", text[name], re.M)):
                    yield path, number, "broken-link", f"{name} has no section #{anchor}"


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def check_variables(text: dict[str, str]) -> Iterator[Finding]:
    documented = set(re.findall(r"\bMUSTER_[A-Z_]+\b", text[VARIABLES]))
    for path in filter(READERS.match, text):
        for number, line in enumerate(text[path].split("\n"), start=1):
            for name in re.findall(r'"(MUSTER_[A-Z_]+)"', line):
                if name not in documented:
                    yield path, number, "undocumented", f"say in {VARIABLES} what {name} does"
    code = "\n".join(content for path, content in text.items() if not path.endswith(".md"))
    for name in sorted(documented):
        if name not in code:
            yield VARIABLES, 1, "stale", f"nothing reads {name}"
