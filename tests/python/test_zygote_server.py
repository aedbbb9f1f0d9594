"""The part of a zygote that forks workers and waits for them, without a run around it."""

import subprocess
import sys
from pathlib import Path

from launching import PATIENCE

# The package as the zygote has it, without muster around it.
FAILED_FORK = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from _zygote.preload import Tops
from _zygote.server import Server
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = Server(theirs, Tops(frozenset()))
def fork(): raise BlockingIOError(11, 'no more processes')
os.fork = fork
before = sorted(os.listdir('/proc/self/fd'))
for module in ('platform', sys.argv[2]):
    fds = [os.memfd_create('payload'), *os.pipe(), os.open('/dev/null', os.O_RDONLY)]
    os.write(fds[0], '\\0'.join(['', '4', sys.executable, '-u', module, 'x', '']).encode())
    socket.send_fds(ours, [b'start 7'], fds)
    for fd in fds: os.close(fd)
    assert not server._start(server._receive())
    print(ours.recv(4096).decode())
    assert sorted(os.listdir('/proc/self/fd')) == before, os.listdir('/proc/self/fd')
"""


def test_a_worker_that_cannot_be_forked_costs_no_descriptor(tmp_path: Path, root: Path) -> None:
    words = [sys.executable, "-c", FAILED_FORK, str(root / "python" / "muster"), str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "failed 7 cannot fork a worker: no more processes\n" * 2
