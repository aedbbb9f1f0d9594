"""DeepSpeed over muster."""

from sections import compare_with_gloo, needs

pytestmark = needs("deepspeed")


def test_deepspeed_trains_as_over_gloo() -> None:
    compare_with_gloo("DeepSpeed")
