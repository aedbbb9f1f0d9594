#!/usr/bin/env python3
"""Runs the soak tests one after the other, for a given time in total, and shows the figures that they print.

    tools/soak.py --seconds N [--build FOLDER] [--list]

Soak tests are all tests of tests/python/test_soak_*.py, and the C++ tests whose suite has Soak in its name. Each reads
its share of the time from MUSTER_SOAK_SECONDS, is short without it, and prints a line of figures that begins with
"soak:". All other output goes to build/log/soak.txt.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN_ON_FAILURE = 150


@dataclass
class SoakTest:
    name: str
    command: list[str]


def python_tests() -> list[SoakTest]:
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/python/test_soak_*.py"))
    if not files:
        return []
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    listing = subprocess.run([*pytest, "--collect-only", *files], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        sys.exit(f"soak: pytest cannot list the tests:\n{listing.stdout}{listing.stderr}")
    names = [line for line in listing.stdout.splitlines() if "::" in line]
    return [SoakTest(name, [*pytest, "-s", name]) for name in names]


def core_tests(build: Path) -> list[SoakTest]:
    tests = []
    for program in sorted(build.glob("tests/*/*_test")):
        listing = subprocess.run(
            [program, "--gtest_list_tests", "--gtest_filter=*Soak*"], capture_output=True, text=True
        )
        suite = ""
        for line in listing.stdout.splitlines():
            if not line.startswith(" "):
                suite = line.split()[0]
            elif "Soak" in suite:
                name = suite + line.split()[0]
                tests.append(SoakTest(name, [str(program), f"--gtest_filter={name}"]))
    return tests


def run(test: SoakTest, share: float, log: Path) -> bool:
    """Runs one test and shows its figures as they arrive. A test without figures has failed or was skipped."""
    print(f"{test.name} ({share:.0f} s)", flush=True)
    environment = {**os.environ, "MUSTER_SOAK_SECONDS": str(share)}
    said: list[str] = []
    began = time.monotonic()
    with (
        log.open("a") as out,
        subprocess.Popen(
            test.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            said.append(line)
            if line.startswith("soak:"):
                print(f"  {line.rstrip()}", flush=True)
    if process.returncode == 0:
        if not any(line.startswith("soak:") for line in said):
            print("  no figures: " + (next((line.strip() for line in said if "SKIP" in line), "it prints none")))
        return True
    print("".join(said[-SHOWN_ON_FAILURE:]))
    print(f"{test.name} FAILED ({process.returncode}) after {time.monotonic() - began:.0f} s; all of it is in {log}")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--list", action="store_true", help="only say which tests there are")
    arguments = parser.parse_args()

    tests = [*core_tests(arguments.build.resolve()), *python_tests()]
    if arguments.list:
        print("\n".join(test.name for test in tests))
        return 0
    log = ROOT / "build/log/soak.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    share = arguments.seconds / len(tests)
    failed = [test.name for test in tests if not run(test, share, log)]
    print(
        f"soak: {len(tests) - len(failed)} of {len(tests)} tests passed" + "".join(f"\n  failed: {n}" for n in failed)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
