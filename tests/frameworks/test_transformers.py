"""The Trainer of transformers over muster."""

from sections import compare_with_gloo, needs

pytestmark = needs("transformers", "accelerate")


def test_transformers_trains_as_over_gloo() -> None:
    compare_with_gloo("Trainer of Hugging Face")
