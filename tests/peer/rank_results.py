"""Runs PyTorch's test cases in ranks that a launcher has started, and reads what they print."""

from __future__ import annotations

import json
import re
import sys
import unittest
from typing import Any

import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS


def run(case: type[unittest.TestCase], pattern: str) -> None:
    """Runs the tests of `case` whose names match, at this rank. Prints a line of JSON for each test and rank: its name,
    its result, and the reason or the traceback.
    """
    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    for name in filter(re.compile(pattern).fullmatch, unittest.defaultTestLoader.getTestCaseNames(case)):
        outcome = unittest.TestResult()
        unittest.TestSuite([case(name)]).run(outcome)
        failed = [text for _, text in outcome.failures + outcome.errors]
        skipped = [text for _, text in outcome.skipped]
        result = "failed" if failed else "skipped" if skipped else "passed"
        text = "".join(failed or skipped)
        ended = re.search(r"\nSystemExit: (\d+)\n$", text)  # how some tests skip themselves
        if ended is not None:
            result, text = "skipped", reasons[int(ended[1])]
        for rank in range(dist.get_world_size()):  # one after the other, because lines of ranks may mix
            dist.barrier()
            if rank == dist.get_rank():
                sys.stdout.write(json.dumps({"test": name, "rank": rank, "result": result, "text": text}) + "\n")
                sys.stdout.flush()


def passed(output: str) -> set[str]:
    """The names of the tests that passed at rank 0. Fails if one failed at any rank."""
    lines = re.findall(r'{"test": .*}$', output, re.MULTILINE)
    results: list[dict[str, Any]] = [json.loads(line) for line in lines]
    failed = [each for each in results if each["result"] == "failed"]
    assert not failed, "\n".join(f"{each['test']}, rank {each['rank']}: {each['text']}" for each in failed)
    return {each["test"] for each in results if each["result"] == "passed" and each["rank"] == 0}
