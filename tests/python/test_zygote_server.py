"""Tests the part of a zygote that forks workers and waits for them, without `muster run`."""

import subprocess
import sys
from pathlib import Path

from launching import TIMEOUT

# Imports the zygote's package alone, as the zygote does, without muster.
FAILED_FORK = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from _zygote.preload import ImportedPackages
from _zygote.server import Server
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = Server(theirs, ImportedPackages(frozenset()))
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


def test_a_failed_fork_leaks_no_descriptor(tmp_path: Path, root: Path) -> None:
    words = [sys.executable, "-c", FAILED_FORK, str(root / "python" / "muster"), str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "failed 7 cannot fork a worker: no more processes\n" * 2


# Two workers have ended when the zygote checks. One of them failed because the other one was killed.
ENDED_AT_ONCE = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from _zygote.preload import ImportedPackages
from _zygote.server import Server
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = Server(theirs, ImportedPackages(frozenset()))
pids = []
for fate in ('exit', 'kill'):
    pid = os.fork()
    if pid == 0:
        if fate == 'exit': os._exit(1)
        os.kill(os.getpid(), 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    pids.append(pid)
server._workers.update(pids)
server._has_children = True
server._check_children()
reports = [ours.recv(4096).decode() for _ in range(3)]
assert reports == [f'ended {pids[1]} 9', f'ended {pids[0]} 256', 'empty'], reports
"""


def test_killed_workers_are_reported_before_failed_ones(root: Path) -> None:
    words = [sys.executable, "-c", ENDED_AT_ONCE, str(root / "python" / "muster")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


# The child of a worker is in its process group, but gets no forwarded signal. The zygote ignores such signals.
FORWARDED = """
import os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from _zygote.preload import ImportedPackages
from _zygote.processes import adopt_orphans
from _zygote.server import Server
adopt_orphans()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = Server(theirs, ImportedPackages(frozenset()))
os.kill(os.getpid(), signal.SIGUSR1)
for verb, number in (('signal', signal.SIGUSR1), ('term', signal.SIGHUP)):
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        signal.signal(number, signal.SIG_DFL)
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, {number, signal.SIGTERM})
            ours.send(str(os.getpid()).encode())
            os._exit(signal.sigwait({number, signal.SIGTERM}))
        signal.pause()
    child = int(theirs.recv(4096))
    server._workers.add(worker)
    ours.send(f'{verb} {int(number)}'.encode())
    server._receive()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -number
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == signal.SIGTERM
    server._workers.clear()
"""


def test_forwarded_signals_reach_only_the_workers(root: Path) -> None:
    words = [sys.executable, "-c", FORWARDED, str(root / "python" / "muster")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
