"""Ray Train over muster."""

from sections import compare_with_gloo, needs

pytestmark = needs("ray")


def test_ray_trains_as_over_gloo() -> None:
    compare_with_gloo("Ray Train")
