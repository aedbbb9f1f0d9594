"""Makes a forked worker look like a separate Python process, and runs its program."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType

from .processes import PR_SET_CHILD_SUBREAPER, die_with, prctl, set_title, skip_destructors

OWN_FILE_PREFIX = "<muster zygote"  # begins the file name of all code of this package
FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # as in signals.h


class Request:
    """The program of a worker, decoded from NUL-terminated words. zygote.cpp describes the format."""

    def __init__(self, tag: str, payload: bytes, stdio: Sequence[int]):
        cpus, count, *words = payload.split(b"\0")[:-1]
        self.tag, self.stdio = tag, stdio
        self.cpus = [int(cpu) for cpu in cpus.split(b",") if cpu]
        self.command = [os.fsdecode(word) for word in words[: int(count)]]
        entries = (entry.partition(b"=") for entry in words[int(count) :])
        self.environment = {name: value for name, _, value in entries}

    @property
    def script(self) -> str:
        """The path of the script. It is an empty string for a module or -c."""
        return "" if self.command[2].startswith("-") else self.command[2]

    @property
    def folder(self) -> str:
        """The first entry of the worker's sys.path."""
        if not self.script:
            return os.getcwd()
        return self.script if os.path.isdir(self.script) else os.path.dirname(os.path.realpath(self.script))


def become_worker(request: Request, parent: int, unwanted: Sequence[int], own_group: bool = True) -> None:
    """Runs in the child. Sets up everything that exec would have set up. `unwanted`: descriptors of the parent.
    `own_group`: leads a process group.
    """
    if own_group:
        os.setpgid(0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 0)
    die_with(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *FORWARDED_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    for target, fd in enumerate(request.stdio):
        os.dup2(fd, target)
    for fd in {*unwanted, *request.stdio}:
        os.close(fd)
    if request.cpus:
        os.sched_setaffinity(0, request.cpus)
    replace_environment(request.environment)
    set_torch_threads()
    reseed()
    set_title(request.command)
    skip_destructors()
    # The interpreter does not free frozen objects at its exit. Triton would report its own as leaked.
    if "triton._C.libtriton" in sys.modules:
        atexit.register(gc.unfreeze)
    gc.enable()


def replace_environment(environment: dict[bytes, bytes]) -> None:
    """Writes only the variables that differ, because a write to a shared page copies the page."""
    for name in [name for name in os.environb if name not in environment]:
        del os.environb[name]
    for name, value in environment.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def threads_wanted(environment: Mapping[bytes, bytes], cpus: Sequence[int] = ()) -> int:
    """The value of OMP_NUM_THREADS, or else the number of CPUs."""
    number = environment.get(b"OMP_NUM_THREADS", b"").partition(b",")[0]
    return int(number) if number.isdigit() and int(number) else len(cpus or os.sched_getaffinity(0))


THREADS_AT_IMPORT = threads_wanted(os.environb)


def set_torch_threads() -> None:
    """Sets the threads again: torch read OMP_NUM_THREADS and the CPUs at import, and this process may have others."""
    now = threads_wanted(os.environb)
    if now != THREADS_AT_IMPORT:
        sys.modules["torch"].set_num_threads(now)


def set_blas_threads(number: int) -> None:
    """Must be called before the forks. OpenBLAS starts all of its threads here and lets them spin; a fork ends them."""
    with open("/proc/self/maps") as file:
        blas = re.search(r"/\S*openblas\S*\.so\S*", file.read())
    if blas is None:
        return
    library = ctypes.CDLL(blas.group())
    for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
        if hasattr(library, name):
            getattr(library, name)(number)
            return


def reseed() -> None:
    """Gives each worker its own random state. Imports in the zygote have drawn a state that all workers share."""
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
        vars(process).update(ORIGINAL_DIR=os.getcwd())
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch_random := sys.modules.get("torch.random")) is not None:
        torch_random.default_generator.seed()


def program(command: Sequence[str]) -> Callable[[], object]:
    """Returns a function that runs the program of `python -u <words>` as __main__, with its sys.argv and sys.path."""
    words = list(command[2:])
    sys.orig_argv[:] = command
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if words[0] == "-m":
        _set_path(os.getcwd())
        sys.argv[:] = ["-m", *words[2:]]
        return lambda: importlib.import_module("runpy")._run_module_as_main(words[1])
    if words[0] == "-c":
        _set_path("")
        sys.argv[:] = ["-c", *words[2:]]
        return lambda: exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
    sys.argv[:] = words
    importer = importlib.import_module("pkgutil").get_importer(words[0])
    if importer is not None:  # a directory or an archive with a __main__.py
        sys.path.insert(0, words[0])
        return lambda: importlib.import_module("runpy")._run_module_as_main("__main__", False)
    _set_path(os.path.dirname(os.path.realpath(words[0])))
    return lambda: exec(_load(words[0], main), main.__dict__)


def _set_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _load(path: str, main: ModuleType) -> CodeType:
    full = os.path.join(os.getcwd(), path)
    main.__dict__.update(__file__=full, __cached__=None)
    if path.endswith(".pyc"):
        sourceless = SourcelessFileLoader("__main__", full)
        main.__loader__ = sourceless
        code = sourceless.get_code("__main__")
        assert code is not None
        return code
    main.__loader__ = SourceFileLoader("__main__", full)
    with open(full, "rb") as file:
        return compile(file.read(), full, "exec", dont_inherit=True)


def run(command: Sequence[str]) -> None:
    """Runs the worker's program. Its exceptions reach the interpreter, which exits as usual: with the exit status,
    atexit functions, threads and output of the program.
    """
    try:
        program(command)()
    except SystemExit:
        raise
    except BaseException:
        _hide_own_frames()
        raise


def _hide_own_frames() -> None:
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = trace and trace.tb_next  # skips the command that loaded this package
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OWN_FILE_PREFIX):
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show
