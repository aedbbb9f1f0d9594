"""A plan in a file: the tasks of a compiled graph, what they are, and their order."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from muster.graph._plan.schedule import Kind, Task

_FORMAT = 2
_SOURCE = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARIES = Path(__file__).resolve().parents[2], Path(torch.__file__).parent
_numbers = itertools.count()


@dataclass(frozen=True)
class Label:
    name: str  # a collective, or the operators of a kernel
    source: str = ""  # "train.py:12"


@dataclass(frozen=True)
class SavedPlan:
    rank: int  # that saved it; all ranks of its groups have the same plan
    tasks: Sequence[Task]  # in the order that Inductor has without the plan
    labels: Sequence[Label]  # of the tasks
    order: Sequence[int]  # indices of tasks

    def save(self, folder: str | os.PathLike[str]) -> Path:
        path = Path(folder) / f"graph{next(_numbers)}-rank{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        tasks = [
            {**asdict(task), **asdict(label), "kind": task.kind.value, "needs": sorted(task.needs)}
            for task, label in zip(self.tasks, self.labels, strict=True)
        ]
        path.write_text(json.dumps({"plan": _FORMAT, "rank": self.rank, "order": list(self.order), "tasks": tasks}))
        return path

    @classmethod
    def load(cls, path: Path) -> SavedPlan:
        """Raises ValueError if the file is no plan."""
        try:
            content = json.loads(path.read_text())
            if content["plan"] != _FORMAT:
                raise ValueError(f"its format is {content['plan']}, and this muster reads format {_FORMAT}")
            tasks = [_task(each) for each in content["tasks"]]
            labels = [Label(str(each["name"]), str(each["source"])) for each in content["tasks"]]
            plan = cls(int(content["rank"]), tasks, labels, [int(index) for index in content["order"]])
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is not a plan of a compiled graph: {what}") from None
        _check(path, plan)
        return plan


def _task(content: dict[str, Any]) -> Task:
    return Task(
        Kind(content["kind"]),
        float(content["seconds"]),
        frozenset(int(need) for need in content["needs"]),
        int(content["start"]),
        int(content["bytes"]),
        int(content["chunks"]),
        float(content["computing"]),
    )


def _check(path: Path, plan: SavedPlan) -> None:
    """An order that runs each task once, after what it needs."""
    places = {index: place for place, index in enumerate(plan.order)}
    if sorted(plan.order) != list(range(len(plan.tasks))):
        raise ValueError(f"{path} is not a plan of a compiled graph: its order does not name each task once")
    for index, task in enumerate(plan.tasks):
        needs = task.needs | ({task.start} if task.kind is Kind.WAIT else set())
        if any(places.get(need, len(places)) >= places[index] for need in needs):
            raise ValueError(f"{path} is not a plan of a compiled graph: task {index} runs before a task that it needs")
        if task.kind is Kind.WAIT and plan.tasks[task.start].kind is not Kind.START:
            raise ValueError(f"{path} is not a plan of a compiled graph: task {index} waits for no collective")


def source_of(stack_trace: str | None) -> str:
    """The innermost line of the program, outside torch and muster: "train.py:12"."""
    found = [
        (file, line)
        for file, line in _SOURCE.findall(stack_trace or "")
        if not any(Path(file).is_relative_to(folder) for folder in _LIBRARIES)
    ]
    return f"{Path(found[-1][0]).name}:{found[-1][1]}" if found else ""
