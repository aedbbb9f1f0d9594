"""Lightning's Trainer and Fabric over muster."""

from sections import compare_with_gloo, needs

pytestmark = needs("lightning")


def test_lightning_trains_as_over_gloo() -> None:
    compare_with_gloo("Lightning")
