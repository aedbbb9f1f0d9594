"""Hooks of mkdocs.yml: makes the generated pages, and turns links that leave docs/ into links of the site.

It generates the references of Python, C++ and the command line, a page for each source file that a document links to,
and the output of `muster explain` where a page has a comment `<!-- output of: muster explain ... -->`. The repository
contains none of these, so they cannot be out of date. Needs a built muster.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import docs_cpp
import docs_python

ROOT = Path(__file__).resolve().parent.parent
# Documents outside docs/, and their paths on the site.
MOVED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "examples/README.md": "tutorials/examples.md",
}
ORIGIN = {page: document for document, page in MOVED.items()}
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s:#]+)(#[^)\s]+)?\)")
NOTE_FOR_TESTS = re.compile(r"(?s)<!-- (?!output of).*?-->\n?")  # tests/python/doc_blocks.py
OUTPUT_OF = re.compile(r"(?m)^<!-- output of: (.*) -->$")
LANGUAGES = {".h": "cpp", ".cpp": "cpp", ".inc": "cpp", ".py": "python", ".txt": "cmake", ".md": "markdown"}


def on_config(config: Any) -> None:
    """Adds the references of Python and C++ to the menu."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    python = [f"reference/python/{name}.md" for name in docs_python.MODULES]
    cpp = [f"reference/cpp/{layer}.md" for layer in reversed(docs_cpp.layers(ROOT))]  # from the top
    reference += [{"Python API": python}, {"C++ API": cpp}]


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found,unused-ignore]

    documents = {path: (ROOT / path).read_text() for path in MOVED}
    documents |= {f"docs/{file.src_uri}": file.content_string for file in files if file.src_uri.endswith(".md")}
    pages = {MOVED[path]: text for path, text in documents.items() if path in MOVED}
    pages |= {f"reference/python/{name}.md": docs_python.page(name) for name in docs_python.MODULES}
    pages |= {f"reference/cpp/{layer}.md": docs_cpp.page(ROOT, layer) for layer in docs_cpp.layers(ROOT)}
    pages["reference/commands.md"] = commands_page()
    for origin, text in documents.items():
        for _, target, _ in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
            if page_of(path).startswith("source/"):
                pages[page_of(path)] = source_page(path)
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def page_of(path: str) -> str:
    """The page, and its section, that shows a file of the repository. Empty for a folder."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    header = path.removeprefix("src/muster/")
    layer = header.split("/")[0]
    if header != path and ROOT / path in docs_cpp.layers(ROOT).get(layer, []):
        return f"reference/cpp/{layer}.md#{docs_cpp.anchor_of(header)}"
    return "" if (ROOT / path).is_dir() else f"source/{path}.md"


def source_page(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    return (
        f"---\nsearch:\n  exclude: true\n---\n# {posixpath.basename(path)}\n\n`{path}`\n\n"
        f"~~~~{language}\n{(ROOT / path).read_text()}~~~~\n"
    )


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith(("source/", "reference/python/", "reference/cpp/")):
        return markdown
    origin = ORIGIN.get(uri, f"docs/{uri}")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.group(1), found.group(2), found.group(3) or ""
        shown = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(origin), target)))
        if not shown:
            return text  # a folder has no page
        return f"[{text}]({posixpath.relpath(shown, posixpath.dirname(uri))}{anchor if '#' not in shown else ''})"

    markdown = LINK.sub(link, NOTE_FOR_TESTS.sub("", markdown))
    # Code in a table writes `\|` for GitHub. Python's Markdown would show the backslash.
    markdown = re.sub(r"`[^`\n]*`", lambda code: code.group().replace("\\|", "|"), markdown)
    return OUTPUT_OF.sub(lambda found: shown_output(found.group(1)), markdown)


def shown_output(command: str) -> str:
    """Inserts a picture or a table unchanged, and other output as text."""
    output = output_of(command)
    if output.startswith("<svg"):
        return f"<figure>\n{output}</figure>"
    return output if "\n|--" in output else fenced(output)


def output_of(command: str) -> str:
    """The output of a command on a machine without measurements."""
    words = shlex.split(command)
    environment = {**os.environ, "XDG_CACHE_HOME": "/nonexistent", "COLUMNS": "120"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"docs: `{command}` ended with {done.returncode}: {done.stderr}")
    return done.stdout


def commands_page() -> str:
    """The command-line reference, from the help texts of the table of options in src/muster/launch/options."""
    summary = output_of("muster --help")
    names = re.findall(r"(?m)^  muster ([a-z]+) ", summary)
    text = ["# Command line\n", fenced(summary)]
    for name in names:
        if name != "help":
            text.append(f"## muster {name}\n")
            help_text = output_of(f"muster {name} --help")
            text.append(option_tables(help_text) if name == "run" else fenced(help_text))
            for sub in re.findall(r"(?m)^  (\w+) ", help_text.partition("Subcommands:\n")[2]):
                text += [f"### muster {name} {sub}\n", fenced(output_of(f"muster {name} {sub} --help"))]
    return "\n".join(text)


def fenced(output: str) -> str:
    return f"```text\n{output.rstrip()}\n```\n"


def option_tables(help_text: str) -> str:
    """Makes a table for each group of options. The description of a long option is on the next line."""
    lines: list[str] = []
    for line in re.sub(r"(?m)^(  -\S.*)\n {20,}", r"\1  ", help_text).split("\n"):
        option = re.fullmatch(r"  (-\S.*?\S) {2,}(\S.*)", line)
        if option:
            names, description = option.groups()
            lines.append(f"| `{names}` | {description.replace('|', '&#124;').replace('<', '&lt;')} |")
        elif re.fullmatch(r"\S[^.]*:", line):
            lines += ["", f"### {line.rstrip(':')}", "", "| option | what it does |", "|---|---|"]
        elif line.strip():
            lines.append(line if not line.startswith("Usage: ") else f"\n`{line.removeprefix('Usage: ')}`")
    return "\n".join(lines) + "\n"
