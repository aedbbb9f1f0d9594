"""The zygote: imports torch once and forks a node's workers from it. Run by `muster run` and `muster warm`.

The `muster` program carries the text of this package, so that it needs nothing but torch in the Python that it starts;
what it and the zygote tell each other heads src/muster/launch/workers/zygote.cpp.
"""
