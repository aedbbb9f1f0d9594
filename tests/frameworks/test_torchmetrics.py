"""torchmetrics over muster."""

from sections import compare_with_gloo, needs

pytestmark = needs("torchmetrics")


def test_torchmetrics_trains_as_over_gloo() -> None:
    compare_with_gloo("torchmetrics")
