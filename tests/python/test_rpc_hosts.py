"""Remote calls between two hosts, each with a process namespace, a boot id and a network of its own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, run_on, two_hosts


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def test_trainers_of_two_hosts_share_a_parameter_server(
    hosts: tuple[Host, Host], root: Path, release_build: Path
) -> None:
    script: list[str | Path] = [root / "examples/python/parameter_server.py", "--steps", "200"]
    (status, output), (other_status, other_output) = run_on(hosts, release_build / "src/muster/cli/muster", script)
    assert (status, other_status) == (0, 0), output + other_output
    accuracy = re.search(r"held-out accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) > 90, output
    assert output.count("the loss of the last batch") == 3, output


PIPELINE = """
import os

import torch
from torch import nn

from muster import rpc
from muster.rpc import autograd

rank = int(os.environ["RANK"])

rpc.init_rpc(f"worker{rank}")
if rank == 0:
    torch.manual_seed(0)
    stages = [rpc.RemoteModule(f"worker{each}", nn.Linear, args=(4, 4)) for each in (1, 2, 3)]
    here = nn.Sequential(*(stage.get_module_rref().to_here() for stage in stages))
    params = [param for stage in stages for param in stage.remote_parameters()]
    optimizer = rpc.optim.DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    local = torch.optim.SGD(here.parameters(), lr=0.1)
    for step in range(5):
        inputs = torch.rand(8, 4)
        with autograd.context() as context_id:
            outputs = inputs
            for stage in stages:
                outputs = stage(outputs)
            autograd.backward(context_id, [outputs.square().mean()])
            optimizer.step(context_id)
        local.zero_grad()
        here(inputs).square().mean().backward()
        local.step()
    for param, wanted in zip(params, here.parameters()):
        torch.testing.assert_close(param.to_here(), wanted)
    print("the parameters are right", flush=True)
rpc.shutdown()
"""


def test_gradients_cross_hosts(hosts: tuple[Host, Host], release_build: Path, tmp_path: Path) -> None:
    """The stages are at worker 1, of the first host, and workers 2 and 3, of the second one."""
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE)
    (status, output), (other_status, other_output) = run_on(hosts, release_build / "src/muster/cli/muster", [script])
    assert (status, other_status) == (0, 0), output + other_output
    assert "the parameters are right" in output


def test_a_pipeline_crosses_hosts(hosts: tuple[Host, Host], root: Path, release_build: Path) -> None:
    """Stages 0 and 1 are on the first host, stages 2 and 3 on the second one."""
    script: list[str | Path] = [root / "examples/python/pipeline/train.py", "--engines=p2p,rpc", "--steps=2"]
    (status, output), (other_status, other_output) = run_on(hosts, release_build / "src/muster/cli/muster", script)
    assert (status, other_status) == (0, 0), output + other_output
    rows = re.findall(r"(\S+) +(?:p2p|rpc) +(\d\.\d{4})  (\d\.\d{4}) ", output)
    assert len(rows) == 8, output
    assert len({(first, last) for _, first, last in rows}) == 1, output  # all schedules train the same model
