"""PyTorch's own tests of c10d, as they ship in its wheel, over muster."""
