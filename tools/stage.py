#!/usr/bin/env python3
"""Runs one stage of the Makefile. Prints one line, and writes all other output to build/log/<name>.txt.

    tools/stage.py NAME [--summary REGEX] -- COMMAND ...

On success it then prints the lines of the log that match REGEX. On failure it prints the end of the log, and last the
first failed checks of GoogleTest, because many tests may have run after them.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

LOG_FOLDER = Path(__file__).resolve().parent.parent / "build/log"
SHOWN_ON_FAILURE = 150
FAILED_CHECK = re.compile(r":\d+: Failure$")
SHOWN_CHECKS, LINES_OF_CHECK = 3, 5


def failed_checks(lines: list[str]) -> list[str]:
    """The lines of the first failed checks of GoogleTest in a log."""
    at = [number for number, line in enumerate(lines) if FAILED_CHECK.search(line)]
    return [line for number in at[:SHOWN_CHECKS] for line in lines[number : number + LINES_OF_CHECK]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--summary", metavar="REGEX", help="lines of the output to repeat at the end")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()

    LOG_FOLDER.mkdir(parents=True, exist_ok=True)
    log = LOG_FOLDER / f"{arguments.name.replace(' ', '-')}.txt"
    print(f"{arguments.name:<20} ", end="", flush=True)
    began = time.monotonic()
    with log.open("wb") as out:
        try:
            status = subprocess.run(arguments.command, stdout=out, stderr=subprocess.STDOUT).returncode
        except OSError as error:
            out.write(f"{error}\n".encode())
            status = 127
    seconds = time.monotonic() - began
    print(f"{'ok' if status == 0 else f'FAILED ({status})':<8} {seconds:7.1f} s", flush=True)

    lines = log.read_text(errors="replace").splitlines()
    if status != 0:
        print("\n".join(lines[-SHOWN_ON_FAILURE:]))
        print("\n".join([f"{arguments.name} failed; the whole log is {log}", *failed_checks(lines)]), flush=True)
    elif arguments.summary:
        print("\n".join(f"  {line}" for line in lines if re.search(arguments.summary, line)), flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
