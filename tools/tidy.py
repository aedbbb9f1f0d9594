#!/usr/bin/env python3
"""The project's own lint, besides compilers and formatters. Prints `path:line: rule: advice`. Status 1 on findings.

    tools/tidy.py [--root FOLDER]

A comment that gives a reason exempts a line from a rule. It is on that line, or alone on the line above:

    // tidy: allow(sleep) the back-off of a real network
"""

from __future__ import annotations

import argparse
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tidy_bans
import tidy_commits
import tidy_docs
import tidy_lengths
import tidy_names

# The folders of src/muster that a folder may include directly. It may also include the folders that those may include.
LAYERS = {
    "base": [],
    "io": ["base"],
    "shm": ["io"],
    "transport": ["shm"],
    "store": ["io", "transport"],
    "kernels": ["base"],
    "collective": ["kernels", "transport"],
    "flight": ["collective"],
    "group": ["flight", "store"],
    "mpi": ["group"],
    "nccl": ["group"],
    "rpc": ["flight", "store"],
    "steps": ["group"],
    "launch": ["store"],
    "cli": ["launch", "mpi", "rpc"],
    "torch": ["group", "nccl", "rpc", "steps", "store"],
}
# A header at the top of a layer's folder is public. A header in a subfolder is private unless it is listed here.
PUBLIC_HEADERS = {
    "collective/cost/cost.h",
    "collective/cost/tuning.h",
    "collective/host/host_collectives.h",
    "collective/host/host_plan.h",
    "collective/schedule/evaluation.h",
    "collective/schedule/execution.h",
    "collective/schedule/rounds.h",
    "collective/schedule/schedule.h",
    "collective/schedule/schedule_builder.h",
    "group/engine/scaling.h",
    "group/queue/call_queue.h",
    "io/connect/handshake.h",
    "io/connect/tls.h",
    "launch/agent/agent.h",
    "launch/agent/agent_monitor.h",
    "launch/agent/hosts.h",
    "launch/agent/status_file.h",
    "launch/options/command_line.h",
    "launch/options/option_table.h",
    "launch/options/option_values.h",
    "launch/options/options.h",
    "launch/rendezvous/rendezvous_messages.h",
    "launch/workers/warm.h",
    "launch/workers/zygote_program.h",
    "rpc/log/call_log_reader.h",
    "store/proxy/proxy.h",
    "store/server/server.h",
    "store/state/state.h",
    "transport/links/link_table.h",
    "transport/links/process_monitor.h",
    "transport/shm/shm_link.h",
    "transport/socket/socket_link.h",
}
MAX_PAIRS = 15  # of a source and its header, or of one alone, in a folder of src/muster
MAY_SEE_TORCH = ("src/muster/torch/", "python/bindings/", "tests/torch/", "examples/cpp/", "benchmarks/")
CODE = (".h", ".inc", ".cpp")
MAX_COLUMNS = 120
COLUMNS_CHECKED = (*CODE, ".py", ".pyi", ".md", ".cmake", ".sh", ".toml", "CMakeLists.txt")
# Python files that tools find by name, without a mention.
FOUND_BY_NAME = re.compile(r"(^|/)(__init__|__main__|conftest|test_\w+)\.pyi?$")


@dataclass(order=True)
class Finding:
    path: str
    line: int
    rule: str
    advice: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.advice}"


class Tree:
    """The files that git tracks or would track, with their text."""

    def __init__(self, root: Path) -> None:
        listing = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            check=True,
        ).stdout.decode()
        self.root = root
        self.text: dict[str, str] = {}
        for path in sorted(set(filter(None, listing.split("\0")))):
            try:
                self.text[path] = (root / path).read_text(encoding="utf-8")
            except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
                continue  # binary, or deleted and not committed yet
        self.code = {path: blank_comments_and_strings(text) for path, text in self.text.items() if path.endswith(CODE)}

    def lines(self, path: str, code_only: bool = False) -> Iterator[tuple[int, str]]:
        source = self.code.get(path, self.text[path]) if code_only else self.text[path]
        yield from enumerate(source.split("\n"), start=1)

    def allows(self, path: str, line: int, rule: str) -> bool:
        lines = self.text[path].split("\n")
        near = lines[max(0, line - 2) : line]
        return any(re.search(rf"tidy: allow\({rule}\) \S+", text) for text in near)


def blank_comments_and_strings(text: str) -> str:
    """Blanks comments and the contents of literals, except in #include lines."""
    token = re.compile(
        r'(?P<include>^[ \t]*#[ \t]*include[^\n]*)|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|//[^\n]*|/\*.*?\*/'
        r"""|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'""",
        re.DOTALL | re.MULTILINE,
    )

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        if match.group("include"):
            return found
        blanked = re.sub(r"[^\n]", " ", found)
        return f'"{blanked[1:-1]}"' if found.startswith(('"', "R")) and len(found) > 1 else blanked

    return token.sub(blank, text)


def layers_below(folder: str) -> set[str]:
    seen: set[str] = set()
    pending = [folder]
    while pending:
        layer = pending.pop()
        if layer not in seen:
            seen.add(layer)
            pending += LAYERS[layer]
    return seen


def check_includes(tree: Tree) -> Iterator[Finding]:
    for path in tree.code:
        layer = path.split("/")[2] if path.startswith("src/muster/") else None
        for number, line in tree.lines(path, code_only=True):
            include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not include:
                continue
            quote, target = include.groups()
            if re.match(r"(torch|ATen|c10|pybind11)/", target) and not path.startswith(MAY_SEE_TORCH):
                yield Finding(path, number, "torch-include", "only src/muster/torch and python/bindings see torch")
            if layer is None:
                continue
            if layer not in LAYERS:
                yield Finding(
                    path, number, "layer", f"add the folder {layer} to LAYERS in tools/tidy.py and to the design"
                )
                break
            if quote == '"' and not target.startswith("muster/"):
                yield Finding(
                    path, number, "include-path", f'write "muster/{layer}/{Path(target).name}": the folder path'
                )
            elif target.startswith("muster/"):
                yield from check_layer(path, number, layer, target.removeprefix("muster/"))


def check_layer(path: str, number: int, layer: str, target: str) -> Iterator[Finding]:
    """`target` is the included header's path from src/muster."""
    other = target.split("/")[0]
    if other not in layers_below(layer):
        yield Finding(path, number, "layer", f"{layer} is below {other}: what it needs belongs lower")
    elif other != layer and target.count("/") > 1 and target not in PUBLIC_HEADERS:
        yield Finding(path, number, "private", f"{target} is for {other} alone: include a header of {other}/ itself")


def check_folders(tree: Tree) -> Iterator[Finding]:
    """Finds folders of src/muster with more than MAX_PAIRS pairs of files."""
    pairs: dict[str, set[str]] = {}
    for path in tree.code:
        if path.startswith("src/muster/"):
            pairs.setdefault(posixpath.dirname(path), set()).add(posixpath.splitext(posixpath.basename(path))[0])
    for folder, names in pairs.items():
        if len(names) > MAX_PAIRS:
            advice = f"{len(names)} pairs of source and header, at most {MAX_PAIRS}: split the folder"
            yield Finding(f"{folder}/CMakeLists.txt", 1, "folder", advice)


def check_listed(tree: Tree) -> Iterator[Finding]:
    """Finds each .cpp that no CMakeLists.txt names, and each .h that no file includes."""
    listed = {source for path in tree.text for source in sources_listed_by(tree, path)}
    included = {target for code in tree.code.values() for target in re.findall(r'#\s*include\s*["<]([^">]+)[">]', code)}
    for path in tree.code:
        if path.endswith(".cpp"):
            if path not in listed:
                yield Finding(path, 1, "unlisted", "list it in the CMakeLists.txt of its folder, or remove it")
        elif not {path, path.removeprefix("src/"), path.removeprefix("tests/"), Path(path).name} & included:
            yield Finding(path, 1, "dead-file", "nothing includes this header: include it or remove it")


def sources_listed_by(tree: Tree, path: str) -> Iterator[str]:
    if Path(path).name != "CMakeLists.txt":
        return
    text = re.sub(r"#.*", "", tree.text[path])
    looped = re.search(r"\$\{\w+\}\.cpp", text)  # foreach(name a b c) ... ${name}.cpp
    for word in re.findall(r"[\w./-]+", text):
        if word.endswith(".cpp") or looped:
            yield posixpath.normpath((Path(path).parent / word).as_posix().removesuffix(".cpp") + ".cpp")


def check_mentioned(tree: Tree) -> Iterator[Finding]:
    """Finds documents that no other document links to, and Python modules that no other file names."""
    for path in tree.text:
        name = Path(path).name
        if path.startswith("docs/") and name.endswith(".md"):
            if not any(name in text for other, text in tree.text.items() if other.endswith(".md") and other != path):
                yield Finding(path, 1, "dead-file", "no other document links to this one")
        elif name.endswith((".py", ".pyi")) and not FOUND_BY_NAME.search(path):
            word = re.compile(rf"(?<!\w){re.escape(name.rsplit('.', 1)[0])}(?!\w)")
            if not any(word.search(text) for other, text in tree.text.items() if other != path):
                yield Finding(path, 1, "dead-file", "nothing names this module: use it or remove it")


def check_columns(tree: Tree) -> Iterator[Finding]:
    for path in tree.text:
        if not path.endswith(COLUMNS_CHECKED):
            continue
        for number, line in tree.lines(path):
            table_or_link = path.endswith(".md") and (line.startswith("|") or re.search(r"https?://\S{60}", line))
            if len(line) > MAX_COLUMNS and not table_or_link:
                yield Finding(path, number, "columns", f"{len(line)} columns: break the line before {MAX_COLUMNS}")


def check_bans(tree: Tree) -> Iterator[Finding]:
    for ban in tidy_bans.BANS:
        for path in tree.text:
            if not re.search(ban.where, path) or re.search(ban.but_not, path):
                continue
            for number, line in tree.lines(path, code_only=ban.rule not in tidy_bans.IN_COMMENTS):
                if re.search(ban.pattern, line) and not tree.allows(path, number, ban.rule):
                    yield Finding(path, number, ban.rule, ban.instead)


def check_detached(tree: Tree) -> Iterator[Finding]:
    """Finds detached threads that a ban on single lines cannot find."""
    for path, code in tree.code.items():
        for thread in re.finditer(r"\bstd::thread\b(?:\s+(\w+))?\s*(?=[({;])", code):
            name = thread.group(1)
            if name:
                found = re.search(rf"\b{name}\.detach\(", code[thread.end() :])
                known = name.startswith("thread")  # the ban on single lines finds it
                ends = [thread.end() + found.start()] if found and not known else []
            else:
                end = after_brackets(code, thread.end())
                ends = [thread.start()] if re.match(r"\s*\.detach\(", code[end:]) else []
            for at in ends:
                line = code.count("\n", 0, at) + 1
                if not tree.allows(path, line, "detach"):
                    yield Finding(path, line, "detach", tidy_bans.KEEP_THREAD)


def check_types(tree: Tree) -> Iterator[Finding]:
    """A program with two types of one name in one namespace has undefined behavior, and no compiler sees it."""
    first: dict[str, str] = {}
    type_line = re.compile(r"(?:class|struct|union|enum(?: class)?) (\w+)(?: final)?(?: : [^;{]*)?(?: \{.*)?$")
    for path in tree.code:
        if not path.startswith(("src/muster/", "python/bindings/")):
            continue
        namespaces: list[str] = []
        for number, line in tree.lines(path):
            if begin := re.match(r"namespace ?([\w:]*) ?\{$", line):
                namespaces.append(begin[1] or path)  # an anonymous one is the file's own
            elif line.startswith("}  // namespace"):
                namespaces.pop()
            elif found := type_line.match(line):
                name = "::".join([*namespaces, found[1]])
                if first.setdefault(name, path) != path:
                    yield Finding(path, number, "one-definition", f"{first[name]} defines {name}, too: rename one")


def after_brackets(code: str, at: int) -> int:
    """The position after the brackets that open at `at`."""
    depth = 0
    for place in range(at, len(code)):
        depth += (code[place] in "({[") - (code[place] in ")}]")
        if depth <= 0:
            return place + 1
    return len(code)


def check_docs(tree: Tree) -> Iterator[Finding]:
    for path, line, rule, advice in tidy_docs.check(tree.text):
        yield Finding(path, line, rule, advice)


def check_lengths(tree: Tree) -> Iterator[Finding]:
    for path, line, rule, advice in tidy_lengths.check(tree.text, tree.code):
        yield Finding(path, line, rule, advice)


def check_names(tree: Tree) -> Iterator[Finding]:
    for path, line, rule, advice in tidy_names.check(tree.code, tree.text):
        yield Finding(path, line, rule, advice)


def check_commits(tree: Tree) -> Iterator[Finding]:
    for path, line, rule, advice in tidy_commits.check(tree.root):
        yield Finding(path, line, rule, advice)


CHECKS = [
    check_includes,
    check_folders,
    check_listed,
    check_mentioned,
    check_columns,
    check_bans,
    check_detached,
    check_types,
    check_docs,
    check_lengths,
    check_names,
    check_commits,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    tree = Tree(parser.parse_args().root)
    findings = sorted(finding for check in CHECKS for finding in check(tree))
    for finding in findings:
        print(finding)
    print(f"tidy: {len(findings)} finding{'s' * (len(findings) != 1)} in {len(tree.text)} files")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
