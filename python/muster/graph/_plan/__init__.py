"""The order in which the kernels and collectives of a compiled graph run."""
