"""Tests `muster run -c` and `muster run -`: programs on the command line and on standard input."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Launch


@pytest.fixture(params=["spawn", "zygote"])
def start_method(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "zygote":
        pytest.importorskip("torch")
    return {"PET_START_METHOD": request.param}


def test_code_runs_as_python_runs_it(launch: Launch, start_method: dict[str, str]) -> None:
    code = "import os, sys; print(os.environ['RANK'], sys.argv, repr(sys.path[0]), __name__)"
    job = launch("--nproc-per-node=2", "-c", code, "-x", "y", env=start_method)
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[rank {rank}] {rank} ['-c', '-x', 'y'] '' __main__" for rank in range(2)]


@pytest.fixture
def stdin(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """stdin(text) is a descriptor to read the text from."""
    opened: list[int] = []

    def open_text(text: str) -> int:
        read, write = os.pipe()
        opened.append(read)
        os.write(write, text.encode())
        os.close(write)
        return read

    yield open_text
    for descriptor in opened:
        os.close(descriptor)


def test_a_script_comes_from_standard_input(
    launch: Launch, stdin: Callable[[str], int], start_method: dict[str, str]
) -> None:
    code = "import os, sys\nprint(os.environ['RANK'], sys.argv, repr(sys.path[0]), __name__)\n"
    job = launch("--nproc-per-node=2", "-", "-x", stdin=stdin(code), env=start_method)
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[rank {rank}] {rank} ['-', '-x'] '' __main__" for rank in range(2)]
    assert job.left_behind() == []


def test_a_failure_in_standard_input_shows_the_line(launch: Launch, stdin: Callable[[str], int]) -> None:
    job = launch("-", stdin=stdin("number = 1\nassert number == 2, 'wrong number'\n"))
    assert job.finish() == 1
    assert "line 2, in <module>\n" in job.err and "assert number == 2, 'wrong number'\n" in job.err, job.err


def test_a_program_comes_from_standard_input(launch: Launch, stdin: Callable[[str], int]) -> None:
    job = launch("--nproc-per-node=2", "--no-python", "-", "x", stdin=stdin("#!/bin/sh\necho $RANK $1\n"))
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["[rank 0] 0 x", "[rank 1] 1 x"]
