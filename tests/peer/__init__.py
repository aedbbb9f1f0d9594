"""Runs PyTorch's own tests of c10d, as they are in its wheel, over muster."""
