"""Tests that each rule of tools/tidy.py finds a violation, in small trees with one violation each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = "#pragma once\nint f();\n"
CLEAN = {
    "src/muster/base/CMakeLists.txt": "muster_library(base SOURCES a.cpp)\n",
    "src/muster/base/a.h": HEADER,
    "src/muster/base/a.cpp": '#include "muster/base/a.h"\nint f() { return 1; }\n',
    "src/muster/io/CMakeLists.txt": "muster_library(io SOURCES b.cpp)\n",
    "src/muster/io/b.cpp": '#include "muster/base/a.h"\nint g() { return f(); }\n',
    "README.md": "See [testing](docs/testing.md).\n",
    "docs/testing.md": "Tests.\n",
}


def tidy(folder: Path, files: dict[str, str]) -> list[str]:
    """The findings of tidy in a tree of these files, as "path:line: rule"."""
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(ROOT / "tools/tidy.py"), "--root", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    *findings, summary = done.stdout.splitlines()
    assert summary.startswith("tidy: "), done.stderr
    assert done.returncode == (1 if findings else 0)
    return [": ".join(finding.split(": ")[:2]) for finding in findings]


def body(line: str, lines: int = 1) -> str:
    return "int f() {\n" + f"  {line}\n" * lines + "}\n"


def test_a_folder_that_is_too_full_is_found(tmp_path: Path) -> None:
    names = [f"p{i}" for i in range(16)]
    files = {f"src/muster/base/many/{name}.cpp": "int n();\n" for name in names}
    listed = "\n".join(f"many/{name}.cpp" for name in names)
    files["src/muster/base/CMakeLists.txt"] = f"muster_library(base SOURCES a.cpp {listed})\n"
    assert tidy(tmp_path, {**CLEAN, **files}) == ["src/muster/base/many/CMakeLists.txt:1: folder"]


def test_a_clean_tree_has_no_findings(tmp_path: Path) -> None:
    assert tidy(tmp_path, CLEAN) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n#include "muster/io/b.h"\n', "2: layer"),
        ("src/muster/io/b.cpp", '#include "muster/group/group.h"\n', "1: layer"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n#include "other.h"\n', "2: include-path"),
        ("src/muster/io/b.cpp", '#include "muster/base/deep/a.h"\n', "1: private"),
        ("src/muster/io/b.cpp", "class Messenger;\n", "1: retired-name"),
        ("python/muster/bench/a.py", '"""A Way."""\n\nclass Way: ...\n', "3: retired-name"),
        ("src/muster/io/b.cpp", "#include <torch/torch.h>\n", "1: torch-include"),
        ("src/muster/io/b.cpp", "#include <c10/util/Logging.h>\n", "1: torch-include"),
        ("src/muster/base/new.cpp", "int n();\n", "1: unlisted"),
        ("src/muster/io/unused.h", HEADER, "1: dead-file"),
        ("tests/io/unlisted_test.cpp", "int n();\n", "1: unlisted"),
        ("docs/alone.md", "Nobody links here.\n", "1: dead-file"),
        ("README.md", "[testing](docs/testing.md), [gone](docs/gone.md)\n", "1: broken-link"),
        ("README.md", "[testing](docs/testing.md#none)\n", "1: broken-link"),
        ("tools/alone.py", "x = 1\n", "1: dead-file"),
        ("src/muster/base/a.h", "#pragma once\n// " + "x" * 118 + "\n", "2: columns"),
        ("tools/long.cmake", "#" * 121 + "\n", "1: columns"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body('std::cout << "x";'), "3: print"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body('throw 1;'), "3: throw"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("assert(x);"), "3: assert"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("strcpy(a, b);"), "3: c-string"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("thread.detach();"), "3: detach"),
        ("src/muster/base/a.h", HEADER + body("std::thread([] {\n f(1);\n}).detach();"), "4: detach"),
        ("src/muster/base/a.h", HEADER + body("std::thread t(f, 1);\n t.detach();"), "5: detach"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\nusing namespace std;\n', "2: using-namespace"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("return rand();"), "3: random"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\nstd::regex r;\n', "2: regex"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("system(c);"), "3: shell"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("usleep(3);"), "3: sleep"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("std::stoi(x);"), "3: stoi"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("return gettid();"), "3: glibc"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\nvolatile int v;\n', "2: volatile"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n#include <immintrin.h>\n', "2: intrinsics"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\nstd::chrono::steady_clock c;\n', "2: clock"),
        ("python/muster/__init__.py", "import pickle\npickle.loads(b)\n", "2: pickle"),
        ("tests/python/test_x.py", "import time\ntime.sleep(1)\n", "2: sleep"),
        ("tests/python/test_x.py", "run(c, shell" + "=True)\n", "1: shell"),
        ("README.md", "docs/testing.md: see /ho" + "me/me/x\n", "1: machine"),
        ("README.md", "docs/testing.md: https://pypi" + ".org/x\n", "1: machine"),
        ("README.md", "docs/testing.md TO" + "DO\n", "1: todo"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + body("g();", 70), "2: length"),
        ("src/muster/base/a.cpp", '#include "muster/base/a.h"\n' + "int x;\n" * 500, "1: length"),
        ("tests/python/test_x.py", "def test_x():\n" + "    pass\n" * 70, "1: length"),
    ],
)  # fmt: skip
def test_each_rule_finds_its_violation(tmp_path: Path, path: str, text: str, expected: str) -> None:
    assert tidy(tmp_path, {**CLEAN, path: text}) == [f"{path}:{expected}"]


def test_environment_variables_match_the_docs(tmp_path: Path) -> None:
    code = '#include "muster/base/a.h"\nconst char* name = "MUSTER_NEW";\n'
    documents = {"README.md": "[testing](docs/testing.md), [variables](docs/reference/environment.md)\n"}
    files = {**CLEAN, **documents, "src/muster/base/a.cpp": code}
    assert tidy(tmp_path / "a", {**files, "docs/reference/environment.md": "`MUSTER_NEW`\n"}) == []
    assert tidy(tmp_path / "b", {**files, "docs/reference/environment.md": "`MUSTER_OLD`\n"}) == [
        "docs/reference/environment.md:1: stale",
        "src/muster/base/a.cpp:2: undocumented",
    ]


def test_two_types_of_one_name_are_found(tmp_path: Path) -> None:
    def source(namespace: str) -> str:
        return f"namespace muster {{\n{namespace} {{\nstruct Request {{\n}};\n}}  // namespace\n}}\n"

    first = {**CLEAN, "src/muster/base/a.h": "#pragma once\n" + source("namespace detail")}
    assert tidy(tmp_path / "a", {**first, "src/muster/io/b.cpp": source("namespace")}) == []
    again = {**first, "src/muster/io/b.cpp": source("namespace detail")}
    assert tidy(tmp_path / "b", again) == ["src/muster/io/b.cpp:3: one-definition"]


def test_comments_and_strings_are_not_code(tmp_path: Path) -> None:
    text = '#include "muster/base/a.h"\n// throw rand()\nconst char* s = "throw";  /* assert(x) */\n'
    assert tidy(tmp_path, {**CLEAN, "src/muster/base/a.cpp": text}) == []


def test_an_allow_comment_needs_a_reason(tmp_path: Path) -> None:
    let_off = '#include "muster/base/a.h"\nint f() {\n  // tidy: allow(sleep) the peer is not ours\n  usleep(3);\n}\n'
    assert tidy(tmp_path / "a", {**CLEAN, "src/muster/base/a.cpp": let_off}) == []
    bare = let_off.replace(" the peer is not ours", "")
    assert tidy(tmp_path / "b", {**CLEAN, "src/muster/base/a.cpp": bare}) == ["src/muster/base/a.cpp:4: sleep"]


LONG = '#include "muster/base/a.h"\n' + body("g();", 80)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ("src/muster/base/a.cpp f 82\n", []),
        ("src/muster/base/a.cpp f 90\n", ["tools/tidy_lengths.txt:1: ratchet"]),
        ("src/muster/base/a.cpp f 75\n", ["src/muster/base/a.cpp:2: length"]),
        ("src/muster/base/a.cpp f 82\nsrc/muster/io/b.cpp g 90\n", ["tools/tidy_lengths.txt:2: ratchet"]),
    ],
)
def test_the_length_ratchet_only_shrinks(tmp_path: Path, counts: str, expected: list[str]) -> None:
    assert tidy(tmp_path, {**CLEAN, "src/muster/base/a.cpp": LONG, "tools/tidy_lengths.txt": counts}) == expected


def test_each_function_is_measured_separately(tmp_path: Path) -> None:
    inner = "  g();\n" * 30
    text = (
        '#include "muster/base/a.h"\nnamespace muster {\nnamespace {\nstruct Big {\n'
        + f"  int f() {{\n{inner}  }}\n" * 4
        + "};\n}\n"
        + f"template <class T>\n  requires(sizeof(T) > 1)\nint h(T x) {{\n  auto l = [&] {{\n{inner}{inner}  }};\n}}\n"
        + "const int table[] = {\n"
        + "  1,\n" * 80
        + "};\n}\n"
    )
    assert tidy(tmp_path, {**CLEAN, "src/muster/base/a.cpp": text}) == []


SUBJECTS = {
    "group: watch no process of another host": True,
    "ddp, docs: name the hooks": True,
    "store: alias a key": True,
    "group: " + "x" * 66: False,
    "Watch no process of another host": False,
    "group: watch no process of another host.": False,
    "Group: watch no process": False,
    "group: watched no process": False,
    "group: watches no process": False,
    "group: watching no process": False,
}


@pytest.mark.parametrize("year", [2026, 2099])
def test_commit_subjects_are_checked(tmp_path: Path, year: int) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    when = f"{year}-01-01T00:00:00Z"
    environment = {**os.environ, "GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when}
    own = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    commit = ["git", "-C", str(tmp_path), *own, "commit", "-q", "--allow-empty", "-m"]
    for subject in SUBJECTS:
        subprocess.run([*commit, subject], check=True, env=environment)
    found = [finding.partition(": ")[2] for finding in tidy(tmp_path, CLEAN)]
    assert found == ["commit-subject"] * (list(SUBJECTS.values()).count(False) if year == 2099 else 0)
