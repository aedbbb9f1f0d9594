"""What torch has above process groups: pipelines with tensor parallelism, and distributed checkpoints."""

import pytest
from sections import REPLACED, compare_with_gloo, losses, run_section


@pytest.mark.parametrize("heading", ["FSDP2, tensor parallelism and pipelines", "Distributed checkpoints"])
def test_torch_computes_as_over_gloo(heading: str) -> None:
    compare_with_gloo(heading)


def test_the_process_for_checkpoints_uses_muster() -> None:
    """It asks for Gloo in a group of its own. So the line appears in the job and in that process."""

    def replaced(code: str) -> str:
        return code.replace('"muster"', '"gloo"').replace("muster run", "muster run --replace gloo")

    output = run_section("Distributed checkpoints", replaced)
    assert output.count(REPLACED) == 2, output
    assert len(losses(output)) == 6
