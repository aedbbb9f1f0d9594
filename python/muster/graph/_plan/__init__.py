"""The order in which the kernels and collectives of a compiled graph run."""

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "muster")  # of the operators of collectives
BLOCKING = "all_reduce_"  # where its wait comes next, compiled code makes one call of both (blocking.py)
