"""elastic_launch(): `muster run` for a Python function."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster._programs import find_program
from muster.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

WORKER = "muster._launch_worker"


def elastic_launch(config: LaunchConfig, entrypoint: Callable[..., Any]) -> Callable[..., dict[int, Any]]:
    """torch.distributed.launcher.api.elastic_launch() over `muster run`: `elastic_launch(config, fn)(*args)` calls
    fn(*args) in `config.nproc_per_node` processes and returns the results of this node by rank.

    On several nodes each node makes the same call. fn and args are pickled: fn is at the top of a module or of the
    script, which needs `if __name__ == "__main__":`, as with multiprocessing's start method "spawn".

    config: torch's LaunchConfig. With max_nodes=1 nothing of the rendezvous is used. start_method, monitor_interval,
        log_line_prefix_template and metrics_cfg have no effect: processes are as clean as spawned ones, and the end of
        one is noticed at once.

    Raises TypeError if fn or args cannot be pickled, and muster.LaunchError with the traceback of each rank that
    failed. If the calling process dies, the job ends.
    """
    if not callable(entrypoint):
        raise TypeError(f"entrypoint must be a function, got {entrypoint!r}: start programs with `muster run`")
    return functools.partial(_launch, options_of(config), entrypoint)


def _pickled(entrypoint: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((entrypoint, args))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"workers get the entrypoint and its arguments by pickle, which refuses them: {error}"
        ) from error


def _launch(options: list[str], entrypoint: Callable[..., Any], *args: Any) -> dict[int, Any]:
    with tempfile.TemporaryDirectory(prefix="muster-launch-") as name:
        folder = Path(name)
        main = spawn.get_preparation_data("MainProcess")
        del main["authkey"]  # a secret, which no worker needs
        (folder / "call").write_bytes(pickle.dumps(main) + _pickled(entrypoint, args))
        error_file = folder / "error.json"
        environment = {"MUSTER_PYTHON": sys.executable, "TORCHELASTIC_ERROR_FILE": str(error_file)}
        command = [find_program("muster"), "run", "--until-stdin-ends", *options, "-m", WORKER, name]
        # If this process dies, the end of the pipe ends the job.
        with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **environment}) as process:
            assert process.stdin is not None
            try:
                status = process.wait()
            except BaseException:  # such as KeyboardInterrupt: the workers must not outlive the folder
                process.stdin.close()
                process.wait()
                raise
        if status != 0:
            failures = {rank: path.read_text() for rank, path in _of_last_generation(folder, "failure").items()}
            raise LaunchError(_report(status, failures, error_file), status, failures)
        results = _of_last_generation(folder, "result")
        # tidy: allow(pickle) from a folder that only this user can write
        return {rank: pickle.loads(path.read_bytes()) for rank, path in results.items()}


def _of_last_generation(folder: Path, kind: str) -> dict[int, Path]:
    """The files `KIND.GENERATION.RANK` of the workers, by rank. Before a restart, ranks may have left some too."""
    last = max((generation for generation, _ in _files(folder, "started")), default=0)
    return {rank: path for (generation, rank), path in sorted(_files(folder, kind).items()) if generation == last}


def _files(folder: Path, kind: str) -> dict[tuple[int, int], Path]:
    return {(int(path.suffixes[0][1:]), int(path.suffixes[1][1:])): path for path in folder.glob(f"{kind}.*.*")}


def _report(status: int, failures: dict[int, str], error_file: Path) -> str:
    if failures:
        return "\n".join(f"rank {rank} failed:\n{text}" for rank, text in failures.items())
    try:
        # What `muster run` reports: a rank that was killed, or that failed on another node.
        return str(json.loads(error_file.read_text())["message"]["message"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"`muster run` ended with status {status}"


def options_of(config: LaunchConfig) -> list[str]:
    """The options of `muster run`. Some fields are missing in older releases of torch."""
    given: dict[str, Any] = {
        "--nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "--nproc-per-node": config.nproc_per_node,
        "--role": config.role,
        "--max-restarts": config.max_restarts,
        "--local-addr": config.local_addr,
        "--event-log-handler": config.event_log_handler,
        "--signals-to-handle": getattr(config, "signals_to_handle", None),
        "--shutdown-timeout": getattr(config, "shutdown_timeout", None),
        "--log-line-prefix-template": config.log_line_prefix_template,
        "--duplicate-stdout-filters": _joined(getattr(config, "duplicate_stdout_filters", None)),
        "--duplicate-stderr-filters": _joined(getattr(config, "duplicate_stderr_filters", None)),
        **_logs(config.logs_specs),
    }
    if config.max_nodes > 1:
        given["--rdzv-backend"] = config.rdzv_backend
        given["--rdzv-endpoint"] = config.rdzv_endpoint or None
        given["--rdzv-id"] = config.run_id or None
        given["--rdzv-conf"] = _joined(f"{name}={value}" for name, value in config.rdzv_configs.items())
    numa = getattr(config, "numa_options", None)
    if numa is not None:
        given["--numa-binding"] = numa.affinity_mode.value
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    if config.max_nodes == 1:
        words[0] = "--standalone"
    if getattr(config, "virtual_local_rank", False):
        words.append("--virtual-local-rank")
    return words


def _joined(words: Any) -> str | None:
    return ",".join(words or []) or None


def _logs(specs: Any) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    if type(specs) is not DefaultLogsSpecs:
        raise TypeError(f"logs_specs must be a DefaultLogsSpecs, got {specs!r}")
    ranks = specs._local_ranks_filter
    return {
        "--log-dir": specs._root_log_dir,
        "--redirects": _streams(specs._redirects),
        "--tee": _streams(specs._tee),
        "--local-ranks-filter": _joined(map(str, sorted(ranks or []))),
    }


def _streams(given: Any) -> str | None:
    """torch's Std, or one for each local rank."""
    if isinstance(given, dict):
        return _joined(f"{rank}:{int(streams)}" for rank, streams in given.items())
    return str(int(given)) if given else None
