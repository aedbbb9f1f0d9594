"""Checks the subjects of commits: `component: imperative summary`, 72 characters at most."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Commits before the rule are ignored. They are found by time, because a shallow clone lacks the history. The rule began
# right after 81593a4.
BEGAN = 1795366328
MAX_SUBJECT = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_.+/-]*(, [a-z][a-z0-9_.+/-]*)*: \S.*[^.\s]")
# "adds", "added", "adding", except for verbs that end in the same way.
NOT_IMPERATIVE = re.compile(r"\w+([^s]s|ed|ing)")
IMPERATIVE = {"alias", "bias", "bring", "embed", "exceed", "feed", "focus", "need", "ping", "proceed", "seed", "speed"}

Finding = tuple[str, int, str, str]  # path, line, rule, advice


def check(root: Path) -> Iterator[Finding]:
    command = ["git", "-C", str(root), "log", "--no-merges", "--format=%h %ct %s"]
    log = subprocess.run(command, capture_output=True, text=True)
    for line in log.stdout.splitlines():  # none if there are no commits
        commit, when, subject = line.split(" ", 2)
        if int(when) <= BEGAN:
            continue
        for advice in problems(subject):
            yield f"commit {commit}", 1, "commit-subject", advice


def problems(subject: str) -> Iterator[str]:
    if subject.startswith(("Revert ", "fixup! ", "squash! ", "amend! ")):
        return
    if len(subject) > MAX_SUBJECT:
        yield f"{len(subject)} characters: {MAX_SUBJECT} at most"
    if not SUBJECT.fullmatch(subject):
        yield 'write "component: imperative summary", without a full stop'
        return
    verb = subject.split(": ", 1)[1].split()[0].lower()
    if NOT_IMPERATIVE.fullmatch(verb) and verb not in IMPERATIVE:
        yield f'say what the commit does as an order, not "{verb}"'
