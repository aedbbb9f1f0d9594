"""Accelerate over muster."""

from sections import compare_with_gloo, needs

pytestmark = needs("accelerate")


def test_accelerate_trains_as_over_gloo() -> None:
    compare_with_gloo("Accelerate")
