"""Tests what tools/docs_*.py make of headers, docstrings and help texts. `make docs` runs all of it, with mkdocs."""

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = """#pragma once
#include <string>

namespace muster {

class Forward;

/// Counts, from *zero* on.
///   counter.add(1);
class Counter {
 public:
  explicit Counter(int start) : value_(start) {}
  /// What was counted, an Result<int>.
  int value() const { return value_; }

 private:
  int value_ = 0;
};

struct Options {
  int limit = 3;  ///< at most
};

/// Adds them up.
inline int sum(int a, int b) {
  return a + b;
}
int undocumented();

namespace detail {
/// Not for users.
int hidden();
}  // namespace detail

}  // namespace muster

/// Returns the error.
#define MUSTER_TEST_TRY(expression) \\
  do {                              \\
  } while (false)
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.fixture
def docs_cpp(tools: None) -> ModuleType:
    import docs_cpp

    return docs_cpp


@pytest.fixture
def docs_site(tools: None) -> ModuleType:
    import docs_site

    return docs_site


def test_headers_show_documented_public_declarations(docs_cpp: ModuleType) -> None:
    found = {docs_cpp.name_of(code): (comment, code) for comment, code in docs_cpp.declarations(HEADER)}
    assert list(found) == ["Counter", "Options", "sum", "MUSTER_TEST_TRY"]
    counter = found["Counter"][1]
    assert counter.splitlines() == [
        "class Counter {",
        " public:",
        "  explicit Counter(int start);",
        "  /// What was counted, an Result<int>.",
        "  int value() const;",
        "};",
    ]
    assert found["sum"][1] == "inline int sum(int a, int b);\nint undocumented();"
    assert found["MUSTER_TEST_TRY"][1] == "#define MUSTER_TEST_TRY(expression)"
    assert docs_cpp.as_markdown(found["Counter"][0]) == "Counts, from \\*zero\\* on.\n\n      counter.add(1);"


def test_every_layer_has_a_page_of_its_headers(docs_cpp: ModuleType) -> None:
    for layer in docs_cpp.layers(ROOT):
        assert f"#include <muster/{layer}/" in docs_cpp.page(ROOT, layer)
    group = docs_cpp.page(ROOT, "group")
    assert "  Work all_reduce(BufferView data, ReduceOp op" in group
    assert " private:" not in group


def test_python_reference_has_native_and_other_signatures(tools: None) -> None:
    import docs_python

    page = docs_python.page("muster")
    assert "all_reduce(tensor, op='sum', async_op=False, timeout=None)\n```\n\nCombines" in page
    assert "muster.transport(group: ProcessGroup | None = None) -> str\n" in page
    assert "class muster.PeerLostError(Error)\n" in page
    assert "### StepReport.save\n" in page


def test_options_become_tables_and_links_stay_in_the_site(docs_site: ModuleType) -> None:
    table = docs_site.option_tables(
        "Nodes:\n  --nnodes N|MIN:MAX=1  number of nodes\n  --long-option WORD\n" + " " * 30 + "next line\n"
    )
    assert "### Nodes" in table
    assert "| `--nnodes N|MIN:MAX=1` | number of nodes |" in table
    assert "| `--long-option WORD` | next line |" in table
    assert docs_site.page_of("README.md") == "index.md"
    assert docs_site.page_of("docs/howto/ddp.md") == "howto/ddp.md"
    assert docs_site.page_of("src/muster/group/group.h") == "reference/cpp/group.md#group-group-h"
    assert docs_site.page_of("src/muster/group/group.cpp") == "source/src/muster/group/group.cpp.md"
    assert docs_site.page_of("examples/cpp") == ""
