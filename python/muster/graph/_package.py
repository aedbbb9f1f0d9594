"""Models that are compiled ahead of time, for muster::graph::Runner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from muster.graph._backend import Config, groups_of, options_of


def package(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    groups: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> str:
    """Compiles a model with AOTInductor into a file (.pt2), which C++ programs run without Python (Runner in
    muster/torch/graph/runner.h). All ranks must call it, each with a path of its own: a rank's file has its parameters.

    Args:
        inputs: an example of forward's arguments, with the shapes that the model will have.
        groups: the groups of the model's collectives, by the names that the C++ program uses for them. The default is
            {"world": torch.distributed.group.WORLD}.

    Returns the path. Raises ValueError if the model uses a group that has no name.
    """
    groups = {"world": dist.group.WORLD} if groups is None else groups
    names = {group.group_name: name for name, group in groups.items()}
    if unfit := [name for name in groups if not name or any(letter.isspace() for letter in name)]:
        raise ValueError(f"a group's name must be one word, not {unfit[0]!r}")
    exported = torch.export.export(model, inputs, strict=True)  # strict: calls are traced as torch.compile does
    used = groups_of(exported.graph_module)
    for group in used:
        if group.group_name not in names:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(f"the model uses a group of ranks {ranks}, which `groups` does not name")
    lines = [f"{names[group.group_name]} {group.group_name} {group.rank()} {group.size()}" for group in used]
    options = options_of(used, config or Config(), exported.graph_module) if used else {}
    metadata = {"aot_inductor.metadata": {"muster_groups": "\n".join(lines)}}
    # torch names its folder after a hash of the code. Ranks have the same code, and would overwrite each other's files.
    with (
        tempfile.TemporaryDirectory(prefix="muster_graph_") as folder,
        torch._inductor.config.patch({"aot_inductor.output_path": folder}),
    ):
        return torch._inductor.aoti_compile_and_package(
            exported, package_path=os.fspath(path), inductor_configs={**options, **metadata}
        )
