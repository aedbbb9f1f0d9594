"""Changes to the graph of a compiled program, before its kernels and collectives are put in order."""
