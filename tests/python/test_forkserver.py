"""Tests muster.forkserver: processes that are as clean as spawned ones, and that nothing outlives its parent."""

from __future__ import annotations

import concurrent.futures
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from forkserver_program import FACTS, MATCH, differences
from launching import TIMEOUT, Job, is_gone, wait_until, write_module_that_opens_a_device

from muster import forkserver

CONTEXT = forkserver.get_context()
pytestmark = pytest.mark.usefixtures("without_users_zygote")


def run_in_child(body: Callable[..., Any], *arguments: Any) -> Any:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=CONTEXT) as executor:
        return executor.submit(body, *arguments).result(TIMEOUT)


def test_the_context_needs_no_import() -> None:
    code = (
        "import multiprocessing as m, torch.multiprocessing as t; c = m.get_context('muster'); "
        "t.set_start_method('muster'); print(c is t.get_context(), m.get_start_method(), c.Process.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout == "True muster muster.forkserver\n", done.stderr


def test_spawn_takes_what_torch_s_spawn_takes() -> None:
    ours, theirs = (inspect.signature(spawn).parameters for spawn in (forkserver.spawn, torch.multiprocessing.spawn))
    assert list(ours) == list(theirs)
    assert {name for name in ours if ours[name].default != theirs[name].default} == {"start_method"}


@pytest.mark.parametrize("settings", ["{}", '{"OMP_NUM_THREADS": "1"}'])
def test_a_process_matches_a_spawned_one(program: Callable[..., Job], settings: str) -> None:
    job = program(MATCH, FACTS, SETTINGS=settings)
    assert differences(job) == set()
    drawn = [line.split()[1:] for line in job.out.splitlines() if line.startswith("random")]
    assert len({word for words in drawn for word in words}) == 12, drawn


def echo(inbox: Any, outbox: Any, lock: Any) -> None:
    with lock:
        outbox.send(inbox.get(timeout=TIMEOUT).tolist())


def test_queues_pipes_and_locks() -> None:
    queue, lock = CONTEXT.Queue(), CONTEXT.Lock()
    receiving, sending = CONTEXT.Pipe(duplex=False)
    with lock:
        process = CONTEXT.Process(target=echo, args=(queue, sending, lock))
        process.start()
        queue.put(torch.arange(3))
        assert not receiving.poll(0) and process.is_alive() and process.exitcode is None
    assert receiving.poll(TIMEOUT)
    assert receiving.recv() == [0, 1, 2]
    process.join(TIMEOUT)
    assert process.exitcode == 0 and not process.is_alive()
    assert multiprocessing.connection.wait([process.sentinel], 0) == [process.sentinel]
    process.close()


def test_pools_and_executors() -> None:
    with CONTEXT.Pool(2) as pool:
        assert pool.map(abs, [-1, 2, -3]) == [1, 2, 3]
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=CONTEXT) as executor:
        assert list(executor.map(abs, [-1, 2, -3])) == [1, 2, 3]
        with pytest.raises(concurrent.futures.process.BrokenProcessPool):
            executor.submit(os._exit, 3).result(TIMEOUT)


def wait_for(event: Any) -> None:
    event.wait(TIMEOUT)


def test_a_signal_during_the_start_is_not_lost() -> None:
    """The fork server ignores SIGTERM, and so does a process that it has just forked."""
    for _ in range(100):
        process = CONTEXT.Process(target=time.sleep, args=(TIMEOUT,))
        process.start()
        process.terminate()
        process.join(10)
        assert process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("end", "exitcode"), [("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)], ids=["terminate", "kill"]
)
def test_a_process_can_be_ended(end: str, exitcode: int) -> None:
    event = CONTEXT.Event()  # the child opens it by a name, which ends with this object
    process = CONTEXT.Process(target=wait_for, args=(event,))
    process.start()
    process.join(0.01)
    assert process.exitcode is None
    getattr(process, end)()
    process.join(TIMEOUT)
    assert process.exitcode == exitcode
    getattr(process, end)()  # does nothing
    assert is_gone(process.pid or 0)


def fail() -> None:
    raise ValueError("as planned")


def test_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    processes = [CONTEXT.Process(target=fail), CONTEXT.Process(target=sys.exit, args=(3,))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    assert [process.exitcode for process in processes] == [1, 3]
    assert "ValueError: as planned" in capfd.readouterr().err


ENDING = """
def ending():
    import atexit, ctypes, weakref
    class Thing: pass
    global thing
    thing = Thing()
    weakref.finalize(thing, print, 'finalized')
    atexit.register(print, 'at exit')
    ctypes.CDLL(None).printf(b'from C\\n')
    print('from Python')
    threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()
"""


def test_the_end_of_a_process_loses_no_output(program: Callable[..., Job]) -> None:
    text = "process = start(ending); process.join(); sys.exit(process.exitcode)"
    job = program(text, ENDING, PYTHONUNBUFFERED="")
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == ["at exit", "finalized", "from C", "from Python", "thread"]


def size_of(data: bytes, tensors: list[torch.Tensor]) -> tuple[int, float]:
    return len(data), sum(float(tensor) for tensor in tensors)


def check_sizes(data: bytes, tensors: list[torch.Tensor]) -> None:
    assert size_of(data, tensors) == (100 << 20, 300)


def test_large_arguments_and_many_descriptors() -> None:
    process = CONTEXT.Process(target=check_sizes, args=(bytes(100 << 20), [torch.ones(1) for _ in range(300)]))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 0


def test_an_argument_that_cannot_be_pickled() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        CONTEXT.Process(target=lambda: None).start()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert run_in_child(abs, -3) == 3


def exit_with(index: int, how: str) -> None:
    if how == "return":
        return
    if index == 1:
        if how == "raise":
            raise ValueError("rank 1 fails")
        if how == "exit":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_spawn_has_the_errors_of_torch() -> None:
    forkserver.spawn(exit_with, ("return",), nprocs=3)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="ValueError: rank 1 fails") as raised:
        forkserver.spawn(exit_with, ("raise",), nprocs=2)
    assert raised.value.error_index == 1
    for how, pattern in (("exit", "exit code 7"), ("kill", "signal SIGKILL")):
        with pytest.raises(torch.multiprocessing.ProcessExitedException, match=pattern):
            forkserver.spawn(exit_with, (how,), nprocs=2)
    context = forkserver.spawn(exit_with, ("return",), nprocs=2, join=False, daemon=True)
    while not context.join(TIMEOUT):
        pass


def test_the_end_of_the_thread_that_started_a_process() -> None:
    """The kernel's signal for a parent's death comes when the parent's thread ends."""
    event, started = CONTEXT.Event(), []

    def start() -> None:
        started.append(CONTEXT.Process(target=wait_for, args=(event,)))
        started[0].start()

    threads = [threading.Thread(target=start), threading.Thread(target=run_in_child, args=(abs, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert started[0].is_alive()
    event.set()
    started[0].join(TIMEOUT)
    assert started[0].exitcode == 0


def test_an_unsafe_preload_is_refused(program: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    device = write_module_that_opens_a_device(tmp_path)
    for name, reason in (
        ("starts_a_thread", "starts a thread (python"),
        ("opens_a_device", f"opens {device}, whose context no forked worker can use"),
        ("no_such_module", "cannot be imported: ModuleNotFoundError"),
    ):
        job = program(f"forkserver.preload({name!r})\nstart(print)")
        assert job.finish() == 1
        error = job.err.strip().splitlines()[-1]
        assert f"ForkServerError: the fork server cannot start: the module {name} {reason}" in error
        assert job.left_behind() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_processes_of_a_parent_that_uses_cuda() -> None:
    assert torch.ones(1, device="cuda").item() == 1
    assert run_in_child(_sum_on_gpu) == 3


def _sum_on_gpu() -> float:
    return torch.ones(3, device="cuda").sum().item()


def test_a_preloaded_module_is_found_imported(program: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import os; where = os.getpid()")
    check = "\ndef check():\n    import slow_module\n    say(slow_module.where == os.getppid())\n"
    job = program("forkserver.preload('slow_module'); start(check).join()", check)
    assert job.finish() == 0, job.err
    assert job.out == "True\n"


def test_a_shadowing_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_in_child(abs, -1) == 1
    (tmp_path / "calendar.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"calendar\.py comes before a module that the fork server has imported"):
        CONTEXT.Process(target=abs, args=(1,)).start()
    monkeypatch.undo()
    assert run_in_child(abs, -1) == 1


def test_the_next_process_replaces_a_lost_server(program: Callable[..., Job]) -> None:
    text = """
first = start(pause)
server = int(sys.stdin.readline())
os.kill(server, signal.SIGKILL)
first.join()
say('exit code', first.exitcode)
second = start(pause)
assert second.pid != first.pid
second.kill(); second.join()
say('exit code', second.exitcode)
"""
    ours, theirs = os.pipe()
    job = program(text)
    job.close()
    path = Path(job.process.args[1])  # type: ignore[index, arg-type]
    job = Job([sys.executable, path], stdin=ours)
    try:
        os.close(ours)
        pid, server = map(int, job.expect(r"child (\d+) (\d+)")[0].groups())
        os.write(theirs, b"%d\n" % server)
        assert job.finish() == 0, job.err
        assert job.out.count("exit code -9") == 2
        assert f"the fork server has ended, and so process {pid} was killed" in job.err
        assert is_gone(pid)
        assert job.left_behind() == []
    finally:
        os.close(theirs)
        job.close()


FAMILY = """
def family():
    start(pause)
    subprocess.Popen([sys.executable, '-c', "import os; os.write(1, b'child %d 0' % os.getpid()); input()"],
                     stdin=subprocess.PIPE, start_new_session=True)
    pause()
"""


@pytest.mark.parametrize("victim", ["parent", "child", "server"])
def test_nothing_outlives_a_killed_parent(program: Callable[..., Job], victim: str) -> None:
    job = program("start(family)\nif os.fork() == 0: pause()\nsignal.pause()", FAMILY)
    found = {int(match[1]): int(match[2]) for match in job.expect(r"child (\d+) (\d+)", 4)}
    (server,) = {parent for parent in found.values() if parent not in (0, job.process.pid)}
    forked = [pid for pid, parent in found.items() if parent == server]
    (copy,) = (pid for pid, parent in found.items() if parent == job.process.pid)
    assert len(forked) == 2
    child = min(forked)
    os.kill({"parent": job.process.pid, "child": child, "server": server}[victim], signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, forked)))
    assert not is_gone(copy)  # a copy made by os.fork() keeps no process alive, and is not ended
    os.kill(copy, signal.SIGKILL)
    job.process.kill()
    assert job.left_behind() == []


def test_a_copy_of_the_program_starts_processes(program: Callable[..., Job]) -> None:
    text = """
start(say, 'one').join()
if os.fork() == 0:
    process = start(say, 'two')
    process.join()
    os._exit(process.exitcode)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    job = program(text)
    assert job.finish() == 0, job.err
    assert job.out == "one\ntwo\n"


def test_copies_of_a_program_wait_for_the_same_server(program: Callable[..., Job]) -> None:
    text = """
forkserver.ensure_running()
copy = os.fork()
process = start(say, 'started')
process.join()
if copy == 0:
    os._exit(process.exitcode)
sys.exit(process.exitcode or os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
"""
    job = program(text)
    assert job.finish() == 0, job.err
    assert job.out == "started\nstarted\n"


def nested(depth: int) -> tuple[int, ...]:
    return (os.getppid(), *(run_in_child(nested, depth - 1) if depth else ()))


def test_a_process_starts_processes() -> None:
    servers = run_in_child(nested, 2)
    assert len(servers) == 3 and len(set(servers)) == 1


def test_an_interrupt_reaches_all_processes(program: Callable[..., Job]) -> None:
    job = program("os.setsid()\nfirst, second = start(pause), start(pause)\nfirst.join()\n")
    job.expect(r"child", 2)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish() in (1, -signal.SIGINT)
    assert job.err.count("KeyboardInterrupt") == 3, job.err
    assert job.left_behind() == []


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import torch.multiprocessing as mp\np = mp.get_context('muster').Process(target=print)\np.start()\n"
    )
    job = Job([sys.executable, path])
    try:
        assert job.finish() == 0
        assert "if __name__ == '__main__':" in job.err
    finally:
        job.close()


def test_closed_standard_streams(program: Callable[..., Job]) -> None:
    read, write = os.pipe()
    text = f"""
os.close(0); os.close(1)
process = start(os.write, {write}, b'x')
process.join()
sys.exit(process.exitcode)
"""
    job = program(text)
    os.close(write)
    os.close(read)
    assert job.finish() == 1, job.err  # the child has no such descriptor
    assert "Bad file descriptor" in job.err


def test_the_context_is_loaded_when_it_is_asked_for() -> None:
    code = """
import multiprocessing, sys, torch
print([name for name in sys.modules if "forkserver" in name and "muster" in name])
print(type(multiprocessing.get_context("muster")).__name__)
print([name for name in sys.modules if "forkserver" in name and "muster" in name])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout == "[]\nForkServerContext\n['muster.forkserver']\n", done.stderr
