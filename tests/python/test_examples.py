"""Runs the Python examples, except digits.py, which test_demo.py runs."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def example(root: Path, muster: str, run: Callable[..., str]) -> Callable[..., str]:
    """Runs one of examples/python at `ranks` ranks, and returns its output."""

    def start(ranks: int, name: str, *arguments: str | Path) -> str:
        return run([muster, "run", "--nproc-per-node", str(ranks), root / "examples/python" / name, *arguments])

    return start


def test_chars_resume_from_a_checkpoint_on_fewer_ranks(example: Callable[..., str], tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", tmp_path / "chars.pt"]
    first = example(2, "chars.py", "--steps", "50", *checkpoint)
    second = example(1, "chars.py", "--steps", "60", *checkpoint)
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", first + second)]
    assert re.findall(r"step +(\d+)/", first) == ["50"], first
    assert re.findall(r"step +(\d+)/", second) == ["60"], second
    # A uniform guess over the 70 characters has a loss of 4.2; a guess by their frequencies alone, 3.2.
    assert losses[1] < losses[0] < 3, first + second
    assert len(second[second.index("60/60") :]) > 300, "it wrote no lines"


def test_chars_gives_every_rank_data(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chars = runpy.run_path(str(root / "examples/python/chars.py"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 40)
    for rank in (0, 39):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert chars["training_batch"](torch.arange(1000), 1).shape == (1, chars["CONTEXT"] + 1)


@pytest.mark.parametrize("options", ["--hook all_reduce", "--hook int8", "--outer diloco --hook int8"])
def test_digits_reach_97_percent_over_slow_links(example: Callable[..., str], options: str) -> None:
    output = example(2, "slow_links.py", *options.split())
    accuracies = [float(number) for number in re.findall(r"held-out accuracy +([\d.]+)%", output)]
    assert len(accuracies) == 12, output
    assert max(accuracies) >= 97, output


def test_hello_adds_up_the_ranks(example: Callable[..., str]) -> None:
    output = example(3, "hello.py")
    assert sorted(re.findall(r"rank (\d) of 3: the sum is 3", output)) == ["0", "1", "2"], output


def test_group_reduces_without_the_dispatcher(example: Callable[..., str]) -> None:
    assert re.search(r"torch.distributed [\d.]+ us, muster.Group [\d.]+ us", example(2, "group.py"))


def test_fsdp2_trains_on_shards(example: Callable[..., str]) -> None:
    output = example(2, "fsdp2.py")
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", output))
    assert last < first / 2, output
    shards = [int(count) for count in re.findall(r"keeps (\d+) of 2177", output)]
    assert sum(shards) == 2177 and max(shards) < 2177, output


def test_elastic_resumes_from_its_checkpoint(root: Path, muster: str, run: Callable[..., str], tmp_path: Path) -> None:
    script = [root / "examples/python/elastic.py", "--checkpoint", tmp_path / "elastic.pt", "--fail-at", "5"]
    output = run([muster, "run", "--nproc-per-node", "2", "--max-restarts", "3", *script])
    assert re.findall(r"restart (\d): begins at step (\d+)", output) == [("0", "0"), ("1", "5")], output
    assert "step 10: weights [30.0, 30.0, 30.0, 30.0]" in output, output


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_parameter_server_learns_the_digits(example: Callable[..., str], mode: str) -> None:
    output = example(4, "parameter_server.py", "--mode", mode)
    accuracy = re.search(rf"{mode}: held-out accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy.group(1)) > 93, output


def losses_of(output: str) -> dict[int, str]:
    """The held-out loss of embeddings.py at each step that it reports."""
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)\S* .*held-out loss ([\d.]+)", output)}


def test_embeddings_go_on_from_a_checkpoint_on_other_servers(example: Callable[..., str], tmp_path: Path) -> None:
    options = ["--round", "20", "--checkpoint", tmp_path / "table"]
    first = example(4, "embeddings.py", "--steps", "40", *options)
    second = example(5, "embeddings.py", "--steps", "60", "--servers", "3", *options)
    assert "begins at step 0" in first and "begins at step 40" in second, first + second
    # The same trainers compute the same gradients, whichever server has a row.
    straight = losses_of(example(3, "embeddings.py", "--steps", "60", "--round", "20"))
    assert losses_of(first)[40] == losses_of(second)[40] == straight[40], first + second
    assert losses_of(second)[60] == straight[60], second
    # A uniform guess over the 68 characters has a loss of 4.2; a guess by their frequencies alone, 3.2.
    assert straight[0] == "4.2195" and float(straight[60]) < 3, straight
    assert [path.name for path in sorted((tmp_path / "table").iterdir())] == ["60", "latest"]


def test_embeddings_go_on_after_a_server_has_died(
    root: Path, muster: str, run: Callable[..., str], tmp_path: Path
) -> None:
    script = [root / "examples/python/embeddings.py", "--mode", "async", "--steps", "60", "--round", "20"]
    restarting = [muster, "run", "--nproc-per-node", "4", "--max-restarts", "1", "--restart-delay", "0"]
    output = run([*restarting, *script, "--checkpoint", tmp_path / "table", "--fail-at", "50"])
    assert re.findall(r"begins at step (\d+)", output) == ["0", "40"], output
    losses = losses_of(output)
    assert float(losses[60]) < float(losses[20]) < 3.5, output


def test_a_learner_and_its_actors_balance_a_pole(example: Callable[..., str]) -> None:
    output = example(3, "actor_learner.py", "--updates", "100")
    returns = [float(mean) for mean in re.findall(r"mean return ([\d.]+)", output)]
    # Chance alone has a return of 22.
    assert len(returns) == 5 and returns[0] < 100 and max(returns[1:]) > 120, output


@pytest.mark.slow  # it compiles
def test_counters_are_in_c_plus_plus(
    example: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    output = example(3, "counters.py")
    assert "in all 100.0" in output, output
    assert max(map(float, re.findall(r"worker\d has seen ([\d.]+)", output))) == 100, output
