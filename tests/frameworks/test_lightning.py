"""Lightning's Trainer and Fabric over muster."""

from sections import compare_with_gloo, compare_with_replaced, needs

pytestmark = needs("lightning")


def test_lightning_trains_as_over_gloo() -> None:
    compare_with_gloo("Lightning")


def test_lightning_trains_in_groups_that_ask_for_gloo() -> None:
    compare_with_replaced("Lightning")
