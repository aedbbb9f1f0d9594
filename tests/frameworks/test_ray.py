"""Ray Train over muster."""

from sections import compare_with_gloo, compare_with_replaced, needs

pytestmark = needs("ray")


def test_ray_trains_as_over_gloo() -> None:
    compare_with_gloo("Ray Train")


def test_ray_trains_in_groups_that_ask_for_gloo() -> None:
    compare_with_replaced("Ray Train")
