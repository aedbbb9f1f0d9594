"""The zygote imports torch once and forks a node's workers. `muster run` and `muster warm` start it. muster.forkserver
starts the same for the processes of one program (forks.py).

The `muster` program contains the text of this package, so the Python that it starts needs nothing but torch. Their
protocol is described at the top of src/muster/launch/workers/zygote.cpp.
"""
