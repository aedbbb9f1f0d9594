"""Finds the code blocks of the documents, and the comments before them, which say how tests run them.

A comment is alone on the lines before a block:

    <!-- not run: REASON -->       no test runs it; the reason says why, or which test runs the same code
    <!-- fails -->                 a shell block that must end with another status than 0
    <!-- same as PATH -->          the block is that file of the repository
    <!-- part of PATH -->          the block is some lines of that file, which another test runs
    <!-- LANGUAGE CODE -->         code that readers do not see: it runs before the next block of that language
    <!-- not run here: WORD, WORD: REASON -->   as `not run`, for all blocks of the page that begin with such a word
    <!-- run by DIRECTORY -->      tests in that directory run the blocks of the page
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r'(?P<ticks>```+)(?P<language>\w*)(?: title="(?P<title>[^"]+)")?$')
LANGUAGES = {"bash": "sh", "sh": "sh", "python": "python", "cpp": "cpp"}


@dataclass
class Block:
    line: int
    language: str
    code: str
    title: str = ""
    hidden: bool = False
    notes: dict[str, str] = field(default_factory=dict)  # "not run": the reason, "part of": the path, ...


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    notes: dict[str, str] = {}
    other = re.search(r"<!-- run by (\S+) -->", text)
    refused = re.search(r"<!-- not run here: ([\w, ]+): (.+) -->", text)
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line, begin = lines[at], at + 1
        fence = FENCE.match(line)
        at += 1
        if line.startswith("<!--"):
            comment = [line]
            while "-->" not in comment[-1]:
                comment.append(lines[at])
                at += 1
            body = "\n".join(comment).removeprefix("<!--").removesuffix("-->").strip()
            language = re.match(r"(sh|python|cpp):?\s+(.*)", body, re.DOTALL)
            if language:
                found.append(Block(begin, language.group(1), language.group(2) + "\n", hidden=True))
            elif note := re.match(r"(not run|fails|same as|part of)\b:? ?(.*)", body, re.DOTALL):
                notes[note.group(1)] = note.group(2)
        elif fence:
            code = []
            while lines[at] != fence["ticks"]:
                code.append(lines[at])
                at += 1
            at += 1
            language_name = LANGUAGES.get(fence["language"], fence["language"])
            found.append(Block(begin, language_name, "\n".join(code) + "\n", fence["title"] or "", notes=notes))
            notes = {}
        elif line.startswith("    ") and not lines[at - 2].strip() and not found_in_list(lines, at - 1):
            code = [line[4:]]
            while lines[at].startswith("    "):
                code.append(lines[at][4:])
                at += 1
            found.append(Block(begin, "sh", "\n".join(code) + "\n", notes=notes))
            notes = {}
        elif line.strip():
            notes = {}
    if other:
        for block in found:
            block.notes = {**block.notes, "run by": other.group(1)}
    if refused:
        words = refused.group(1).split(", ")
        for block in found:
            if block.code.startswith(tuple(words)) and not block.hidden:
                block.notes = {"not run": refused.group(2)}
    return found


def found_in_list(lines: list[str], at: int) -> bool:
    """True if an indented line continues an item of a list."""
    before = next((line for line in reversed(lines[:at]) if line.strip() and not line.startswith(" ")), "")
    return bool(re.match(r"([-*]|\d+\.) ", before))


def runs(block: Block, language: str) -> bool:
    """True if the block runs by itself, and not as a file that another block uses."""
    return block.language == language and not block.title and not {"not run", "part of", "run by"} & block.notes.keys()


# All documents for users, by path from the root of the repository.
PAGES = {
    page.relative_to(ROOT).as_posix(): blocks_of(page.read_text())
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md"])
}
