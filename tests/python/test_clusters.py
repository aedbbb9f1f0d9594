"""Checks examples/clusters: the manifests against the schemas of their kinds, and that their commands make one job of
several hosts, in the environment that Kubernetes, Kubeflow's operator or Slurm would give them."""

import contextlib
import functools
import importlib
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hosts import hosts_on_a_switch
from launching import TIMEOUT, Job, free_port

CLUSTERS = Path(__file__).resolve().parents[2] / "examples/clusters"
SECRET = secrets.token_hex(32)
HELLO = [f"[rank {rank}] rank {rank} of 4: the sum is 6" for rank in range(4)]

# The models of the kinds, in kubeflow-trainer-api. They are made from the schemas of Kubernetes and JobSet.
MODELS = {"Service": "IoK8sApiCoreV1Service", "Job": "IoK8sApiBatchV1Job", "JobSet": "JobsetV1alpha2JobSet"}


@functools.cache
def documents(name: str) -> list[dict[str, Any]]:
    return list(importlib.import_module("yaml").safe_load_all((CLUSTERS / f"{name}.yaml").read_text()))


def as_parsed(manifest: dict[str, Any], kind: str) -> Any:
    """The manifest after it went through the model of its kind: without unknown fields. Wrong types and missing fields
    are errors."""
    if kind == "PyTorchJob":
        client = importlib.import_module("kubeflow.training").ApiClient()
        reply = SimpleNamespace(data=json.dumps(manifest))
        return client.sanitize_for_serialization(client.deserialize(reply, "KubeflowOrgV1PyTorchJob"))
    model = getattr(importlib.import_module("kubeflow_trainer_api.models"), MODELS[kind])
    return model.from_dict(manifest).to_dict()


@pytest.mark.parametrize("name", ["job", "jobset", "pytorchjob"])
def test_manifests_fit_their_schemas(name: str) -> None:
    for manifest in documents(name):
        assert as_parsed(manifest, manifest["kind"]) == manifest


def change(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the manifest in which the field at this path is set, or removed if the value is None."""
    copy: dict[str, Any] = json.loads(json.dumps(manifest))
    *outer, last = path.split(".")
    place: Any = copy
    for word in outer:
        place = place[int(word)] if word.isdigit() else place[word]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return copy


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("job", "spec.completionmode", "Indexed"),
        ("job", "spec.completions", "two"),
        ("job", "spec.template.spec.containers", None),
        ("jobset", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.comand", ["x"]),
        ("jobset", "spec.replicatedJobs.0.name", None),
        ("pytorchjob", "spec.pytorchReplicaSpecs.Worker.restartpolicy", "Never"),
        ("pytorchjob", "spec.pytorchReplicaSpecs", None),
    ],
)
def test_the_schemas_refuse_mistakes(name: str, path: str, value: Any) -> None:
    manifest = change(documents(name)[-1], path, value)
    try:
        parsed = as_parsed(manifest, manifest["kind"])
    except ValueError:
        return
    assert parsed != manifest


class Pod:
    """A pod as the cluster would start it: its host name, its name for other pods, its command and environment."""

    def __init__(self, hostname: str, dns_name: str, template: dict[str, Any], labels: dict[str, str], **env: str):
        (container,) = template["spec"]["containers"]
        self.dns_name, self.command = dns_name, container["command"]
        own = {entry["name"]: value_of(entry, labels) for entry in container["env"]}
        self.env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": hostname, **env, **own}


def value_of(entry: dict[str, Any], labels: dict[str, str]) -> str:
    if "value" in entry:
        return str(entry["value"])
    (source,) = entry["valueFrom"].items()
    if source == ("secretKeyRef", {"name": "muster", "key": "secret"}):
        return SECRET
    path = re.fullmatch(r"metadata\.labels\['(.+)'\]", source[1]["fieldPath"])
    assert source[0] == "fieldRef" and path, source
    return labels[path[1]]


def pods_of_a_job() -> list[Pod]:
    service, job = documents("job")
    name, spec, template = job["metadata"]["name"], job["spec"], job["spec"]["template"]
    labels = {"batch.kubernetes.io/job-name": name}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    # Without these the pods would have no names.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == labels
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    return [
        Pod(f"{name}-{i}", f"{name}-{i}.{service['metadata']['name']}", template, labels, JOB_COMPLETION_INDEX=str(i))
        for i in range(spec["completions"])
    ]


def pods_of_a_jobset() -> list[Pod]:
    (jobset,) = documents("jobset")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    name, spec = jobset["metadata"]["name"], replicated["template"]["spec"]
    assert replicated["replicas"] == 1 and spec["completions"] == spec["parallelism"]
    labels = {"jobset.sigs.k8s.io/jobset-name": name}
    hostnames = [f"{name}-{replicated['name']}-0-{i}" for i in range(spec["completions"])]
    return [
        Pod(hostname, f"{hostname}.{name}", spec["template"], labels, JOB_COMPLETION_INDEX=str(i))
        for i, hostname in enumerate(hostnames)
    ]


def pods_of_a_pytorchjob() -> list[Pod]:
    (job,) = documents("pytorchjob")
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    kinds = [(kind, i) for kind in ("Master", "Worker") for i in range(replicas[kind]["replicas"])]
    pods = []
    for rank, (kind, index) in enumerate(kinds):
        hostname, master, port = f"{name}-{kind.lower()}-{index}", f"{name}-master-0", "23456"
        env = {
            "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"], "PET_NNODES": str(len(kinds)),
            "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": master, "PET_MASTER_PORT": port,
            "MASTER_ADDR": master, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "4",
        }  # fmt: skip
        pods.append(Pod(hostname, hostname, replicas[kind]["template"], {}, **env))
    return pods


@pytest.fixture
def path(muster: str, tmp_path: Path) -> str:
    """A PATH with this muster and this Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/muster").symlink_to(muster)
    return f"{tmp_path}/bin:{os.environ['PATH']}"


@pytest.mark.parametrize("pods_of", [pods_of_a_job, pods_of_a_jobset, pods_of_a_pytorchjob])
def test_the_pods_of_a_manifest_are_one_job(
    root: Path, path: str, monkeypatch: pytest.MonkeyPatch, pods_of: Callable[[], list[Pod]]
) -> None:
    monkeypatch.chdir(root / "examples/python")  # as the image's working directory
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):  # torch's own tests set them in this process
        monkeypatch.delenv(name, raising=False)
    pods = pods_of()
    with hosts_on_a_switch(len(pods), [pod.dns_name for pod in pods]) as hosts:
        running = [
            host.start(pod.command, {**pod.env, "PATH": path, "MUSTER_PYTHON": sys.executable})
            for host, pod in zip(hosts, pods, strict=True)
        ]
        try:
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):  # the assertion below then shows all output
                    process.wait(2 * TIMEOUT)
        finally:
            for process in running:
                process.kill()
        text = "".join(process.communicate(timeout=TIMEOUT)[0] for process in running)
    assert [process.returncode for process in running] == [0] * len(pods), text
    assert sorted(re.findall(r"\[rank \d\] rank .*", text)) == HELLO, text


SLURM = CLUSTERS / "slurm.sh"
# Starts the command once for each node, as srun does, and passes signals on.
SRUN = """#!{python}
import os, signal, subprocess, sys
assert sys.argv[1].startswith("--cpus-per-task="), sys.argv
prefixes = {prefixes}
tasks = []
for node, prefix in enumerate(prefixes):
    env = {{**os.environ, **{step}, "SLURM_NODEID": str(node)}}
    tasks.append(subprocess.Popen([*prefix, *sys.argv[2:]], env=env))
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def sbatch(path: str, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """sbatch(nodelist, prefixes, words...) runs slurm.sh as Slurm would on the first node of a job. `prefixes` has the
    words that start a process on each node."""
    if shutil.which("openssl") is None:
        pytest.skip("the script makes the secret with openssl")
    jobs: list[Job] = []
    options = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=(\S+)$", SLURM.read_text()))

    def start(nodelist: str, prefixes: Sequence[Sequence[str]], *words: str | Path) -> Job:
        assert (int(options["nodes"]), options["ntasks-per-node"]) == (len(prefixes), "1")
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": nodelist, "SLURM_STEP_NUM_NODES": options["nodes"],
                "SLURM_STEP_NUM_TASKS": options["nodes"]}  # fmt: skip
        srun = tmp_path / "bin/srun"
        srun.write_text(SRUN.format(python=sys.executable, prefixes=[list(prefix) for prefix in prefixes], step=step))
        srun.chmod(stat.S_IRWXU)
        env = {"SLURM_JOB_ID": str(free_port()), "SLURM_CPUS_PER_TASK": options["cpus-per-task"], "PATH": path,
               "MUSTER_PYTHON": sys.executable}  # fmt: skip
        jobs.append(Job(["bash", SLURM, *words], env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_the_slurm_script_is_valid() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True, timeout=TIMEOUT)
    lines = SLURM.read_text().splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert directives and all(line.startswith("#") for line in lines[: directives[-1]]), "sbatch stops at a command"


def test_the_slurm_script_runs_a_job_on_several_hosts(sbatch: Callable[..., Job], root: Path) -> None:
    with hosts_on_a_switch(2) as hosts:
        nodelist = hosts[0].namespace.removesuffix("1") + "[1-2]"
        job = sbatch(nodelist, [host.prefix() for host in hosts], root / "examples/python/hello.py")
        assert job.finish() == 0, job.out + job.err
    assert sorted(job.out.splitlines()) == HELLO
    assert "taken from Slurm job" in job.err


def test_the_slurm_script_passes_the_signal_to_the_workers(
    sbatch: Callable[..., Job], script: Callable[[str], Path]
) -> None:
    handler = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3 + rank))\n"
    path = script(handler + "print('ready', flush=True)\nwhile True: signal.pause()\n")
    job = sbatch("localhost,other", [[], []], path)
    job.expect("ready", 4)
    job.send(signal.SIGUSR1)
    assert job.finish() in range(3, 7), job.err  # the status of the first worker that ended
    assert job.left_behind() == []
