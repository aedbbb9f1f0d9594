"""Tests what `cmake --install` gives C++ users: muster::core without torch, muster::torch with it."""

import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]

CORE_CMAKE = """
cmake_minimum_required(VERSION 3.22)
project(core_user LANGUAGES CXX)
find_package(muster REQUIRED COMPONENTS core)
if(Torch_FOUND OR TARGET torch OR TARGET muster::torch)
  message(FATAL_ERROR "muster::core dragged torch in")
endif()
add_executable(core_user main.cpp)
target_link_libraries(core_user PRIVATE muster::core)
"""
CORE_MAIN = """
#include <muster/group/group.h>
#include <muster/store/store.h>

#include <cstdio>

int main() {
  const auto deadline = muster::Deadline::after(std::chrono::seconds(60));
  auto store = muster::memory_store();
  auto group = muster::Group::form(*store, {.rank = 0, .size = 1}, {});
  if (!group) return std::printf("%s\\n", group.error().to_string().c_str()), 1;
  float data[3] = {1, 2, 3};
  auto work = (*group)->all_reduce({data, 3, muster::Dtype::kFloat32}, muster::ReduceOp::kSum);
  if (!work.wait(deadline)) return 2;
  std::printf("sum %g\\n", data[0] + data[1] + data[2]);
}
"""


# Uses ccache if there is one. A second run finds the objects of the first one, because the prefix is always the same.
LAUNCHER = ["ccache"] if shutil.which("ccache") else []


@pytest.fixture(scope="module")
def prefix(release_build: Path, run: Run) -> Path:
    folder = release_build / "test-prefix"
    shutil.rmtree(folder, ignore_errors=True)
    run(["cmake", "--install", release_build, "--prefix", folder])
    return folder


def build(run: Run, source: Path, folder: Path, prefix_path: str) -> None:
    launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={program}" for program in LAUNCHER]
    run(["cmake", "-G", "Ninja", "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix_path}", *launcher])
    run(["cmake", "--build", folder], timeout=900)


def test_the_core_builds_and_runs_without_torch(prefix: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(CORE_CMAKE)
    (tmp_path / "main.cpp").write_text(CORE_MAIN)
    build(run, tmp_path, tmp_path / "build", str(prefix))
    assert "sum 6" in run([tmp_path / "build/core_user"])
    libraries = run(["ldd", tmp_path / "build/core_user"])
    assert not re.search(r"libtorch|libc10|libpython", libraries)


def test_the_core_example_joins_a_job_without_torch(prefix: Path, run: Run, root: Path, tmp_path: Path) -> None:
    build(run, root / "examples/cpp_core", tmp_path / "build", str(prefix))
    program = tmp_path / "build/pi"
    output = run([prefix / "bin/muster", "run", "--nproc-per-node", "3", "--no-python", program])
    assert sorted(re.findall(r"rank (\d) of 3: pi is 3.141593", output)) == ["0", "1", "2"], output
    alone = subprocess.run([program], capture_output=True, text=True, timeout=60)
    message = "error: invalid argument: RANK is not set: start this program with `muster run`\n"
    assert (alone.returncode, alone.stderr) == (1, message)


def test_the_parameter_server_runs_without_torch(prefix: Path, run: Run, root: Path, tmp_path: Path) -> None:
    build(run, root / "examples/cpp_rpc", tmp_path / "build", str(prefix))
    program = tmp_path / "build/parameter_server"
    output = run([prefix / "bin/muster", "run", "--nproc-per-node", "4", "--no-python", program])
    assert "slope 3.0, intercept -1.0" in output


def test_missing_torch_component_is_reported(prefix: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(CORE_CMAKE.replace("COMPONENTS core", "COMPONENTS core torch"))
    (tmp_path / "main.cpp").write_text(CORE_MAIN)
    with pytest.raises(pytest.fail.Exception, match="Torch"):
        run(["cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"])


CUDA_CMAKE = """
cmake_minimum_required(VERSION 3.22)
project(cuda_user LANGUAGES CXX)
find_package(muster REQUIRED COMPONENTS core torch)
if(NOT TARGET muster::torch)
  message(FATAL_ERROR "there is no muster::torch")
endif()
add_executable(cuda_user main.cpp)
set_target_properties(cuda_user PROPERTIES CXX_STANDARD 20)
target_link_libraries(cuda_user PRIVATE muster::libtorch)
"""
CUDA_MAIN = """
#include <ATen/Parallel.h>

#include <cstdio>

int main() { std::printf("threads %d\\n", at::get_num_threads() > 0); }
"""


def cuda_torch(folder: Path, torch_prefix: str) -> Path:
    """This torch, with a CMake package like that of a CUDA build, which fails when it is found."""
    real = Path(torch_prefix).parents[1]
    config = folder / "share/cmake/Torch"
    config.mkdir(parents=True)
    (config / "TorchConfig.cmake").write_text('message(FATAL_ERROR "Your installed Caffe2 version uses CUDA")\n')
    shutil.copy(Path(torch_prefix, "Torch/TorchConfigVersion.cmake"), config)
    (folder / "include").symlink_to(real / "include")
    (folder / "lib").mkdir()
    for library in (real / "lib").glob("lib*.so*"):
        (folder / "lib" / library.name).symlink_to(library)
    (folder / "lib/libtorch_cuda.so").touch()
    return folder / "share/cmake"


def test_a_torch_for_cuda_needs_no_cuda_toolkit(prefix: Path, run: Run, torch_prefix: str, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(CUDA_CMAKE)
    (tmp_path / "main.cpp").write_text(CUDA_MAIN)
    cuda = cuda_torch(tmp_path / "torch", torch_prefix)
    build(run, tmp_path, tmp_path / "build", f"{prefix};{cuda}")
    assert "threads 1" in run([tmp_path / "build/cuda_user"])


@pytest.fixture(scope="module")
def built_examples(
    prefix: Path, run: Run, root: Path, torch_prefix: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    build(run, root / "examples/cpp", folder, f"{prefix};{torch_prefix}")
    return folder


@pytest.fixture(scope="module")
def examples(prefix: Path, run: Run, built_examples: Path) -> Callable[..., str]:
    """Runs one of examples/cpp at two ranks, and returns its output."""

    def start(name: str, *arguments: str | Path, ranks: int = 2) -> str:
        program = built_examples / name
        return run([prefix / "bin/muster", "run", f"--nproc-per-node={ranks}", "--no-python", program, *arguments])

    return start


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("digits --epochs 3", "error: takes no options, not --epochs"),
        ("chars --steps ten", "error: --steps takes a number, not ten"),
        ("chars --epochs 3", "error: takes --steps N, --checkpoint FILE and --hook bf16|int8, not --epochs 3"),
        ("distributed_autograd --epochs 3", "error: takes no options, not --epochs"),
        (
            "pipeline --epochs 3",
            "error: takes --schedules NAMES, --steps N and --microbatches N, not --epochs 3",
        ),
        ("pipeline --steps 0", "error: --steps takes a number from 1 on, not 0"),
        ("actor_learner --updates ten", "error: takes --updates N, not --updates ten"),
        ("decoder out --characters ten", "error: takes FOLDER [--characters N]"),
        (
            "embeddings --mode none",
            "error: takes --steps N, --mode sync|async and --checkpoint FOLDER, not --mode none",
        ),
        ("chars --steps", "error: takes --steps N, --checkpoint FILE and --hook bf16|int8, not --steps "),
    ],
)
def test_cpp_examples_refuse_unknown_options(built_examples: Path, command: str, message: str) -> None:
    name, *arguments = command.split()
    refused = subprocess.run([built_examples / name, *arguments], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stderr) == (1, message + "\n")


def test_cpp_digits_build_and_reach_97_percent(examples: Callable[..., str]) -> None:
    output = examples("digits")
    accuracies = [float(number) for number in re.findall(r"held-out accuracy +([\d.]+)%", output)]
    assert len(accuracies) == 12, output
    assert accuracies[-1] >= 97, output


def test_chars_learn_and_resume_from_a_checkpoint(examples: Callable[..., str], tmp_path: Path) -> None:
    arguments = ["--checkpoint", tmp_path / "chars.pt"]
    first = examples("chars", "--steps", "50", *arguments)
    second = examples("chars", "--steps", "100", "--hook", "int8", *arguments)
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+)/\d+ .*held-out loss ([\d.]+)", second)]
    assert re.findall(r"step +(\d+)/", first) == ["50"], first
    assert [step for step, _ in steps] == [100], second
    # A uniform guess over the 70 characters has a loss of 4.2; a guess by their frequencies alone, 3.2.
    assert steps[0][1] < 3, second
    assert len(second[second.index("100/100") :]) > 300, "it wrote no lines"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_embeddings_learn_and_go_on_from_a_checkpoint(examples: Callable[..., str], tmp_path: Path, mode: str) -> None:
    """Two servers, each with half of the rows, and two trainers."""
    arguments = ["--mode", mode, "--checkpoint", tmp_path]
    first = examples("embeddings", "--steps", "200", *arguments, ranks=4)
    second = examples("embeddings", "--steps", "300", *arguments, ranks=4)
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", first + second)]
    assert "begins at step 0" in first and "begins at step 200" in second
    assert len(losses) == 3 and losses[-1] < 2.6, first + second  # a uniform guess over 70 characters: 4.2


def test_layers_at_several_workers_learn(examples: Callable[..., str]) -> None:
    output = examples("distributed_autograd", ranks=4)
    accuracies = [float(number) for number in re.findall(r"held-out accuracy +([\d.]+)%", output)]
    assert len(accuracies) == 8 and accuracies[-1] >= 93, output


PIPELINE_ROW = re.compile(r"(\S+) +(p2p|rpc) +(\d\.\d{4})  (\d\.\d{4}) +[\d.]+ ms +(\S+)%  +(\S+)%")
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_cpp_pipelines_train_the_same_model(examples: Callable[..., str], root: Path, ranks: int) -> None:
    alone = PIPELINE_ROW.findall(examples("pipeline", "--schedules", "gpipe", "--steps", "3", ranks=1))
    output = examples("pipeline", "--steps", "3", ranks=ranks).replace("[rank 0] ", "")
    rows = PIPELINE_ROW.findall(output)
    assert [row[:2] for row in rows] == [(name, messages) for name in SCHEDULES for messages in ("p2p", "rpc")], output
    schedules = runpy.run_path(str(root / "examples/python/pipeline/schedules.py"))
    for name, _, first, last, bubble, formula in rows:
        assert float(first) == pytest.approx(float(alone[0][2]), abs=1e-3), output
        assert float(last) == pytest.approx(float(alone[0][3]), abs=1e-3), output
        expected = schedules["make"](name, ranks, 8)
        assert float(formula) == pytest.approx(100 * expected.expected_bubble(), abs=0.1), output
        assert 0 < float(bubble) < 100, output
    pictures = re.split(rf"^({'|'.join(SCHEDULES)})\n", output.split("by formula\n")[1], flags=re.MULTILINE)[1:]
    assert pictures[::2] == SCHEDULES, output
    for name, picture in zip(SCHEDULES, pictures[1::2], strict=True):
        lines = re.findall(r"^rank (\d)  ([FBW.]{100})$", picture, re.MULTILINE)
        assert [int(rank) for rank, _ in lines] == list(range(ranks)), output
        assert all({"F", "B"} < set(line) and ("W" in line) == (name == "zero-bubble") for _, line in lines), output


def test_actors_and_a_learner_balance_a_pole(examples: Callable[..., str]) -> None:
    output = examples("actor_learner", ranks=3)
    returns = [float(number) for number in re.findall(r"mean return ([\d.]+)", output)]
    assert len(returns) == 15 and max(returns) > 200, output  # a policy that knows nothing: about 22


def test_a_decoder_in_two_parts_serves_clients(
    examples: Callable[..., str], muster: str, run: Run, root: Path, tmp_path: Path
) -> None:
    python = [muster, "run", "--nproc-per-node=2"]
    checkpoint = tmp_path / "chars.pt"
    run([*python, root / "examples/python/chars.py", "--steps", "50", "--checkpoint", checkpoint])
    # It compares the two parts with the whole model.
    run([*python, root / "examples/python/decoder.py", checkpoint, tmp_path / "parts"], timeout=400)
    output = examples("decoder", tmp_path / "parts", "--characters", "100", ranks=4)
    for client, prompt in ((2, "ROSALIND\t"), (3, "ORLANDO\t")):
        lines = re.findall(rf"^\[rank {client}\] (.*\n)", output, flags=re.MULTILINE)
        written, speed = "".join(lines[:-1]), lines[-1]
        assert written.startswith(prompt) and len(written) == len(prompt) + 100 + 1, output
        assert re.fullmatch(r"\(\d+ characters per second\)\n", speed), output


def test_installed_headers_of_the_core_compile(prefix: Path, run: Run, root: Path, tmp_path: Path) -> None:
    headers = sorted(path.relative_to(prefix / "include").as_posix() for path in prefix.glob("include/muster/**/*.h"))
    core = [header for header in headers if not header.startswith("muster/torch/")]
    assert "muster/group/group.h" in core
    assert "muster/torch/collectives.h" in headers
    assert not any(header.startswith(("muster/launch/", "muster/cli/")) for header in headers)
    # A header with a source is the first include of that source, so the build has compiled it alone.
    alone = [header for header in core if not (root / "src" / header).with_suffix(".cpp").exists()]
    sources = {"all.cpp": core} | {header.replace("/", "_") + ".cpp": [header] for header in alone}
    for source, included in sources.items():  # a name for each header, because ccache uses the file's name
        (tmp_path / source).write_text("".join(f"#include <{header}>\n" for header in included))
        command = [*LAUNCHER, "c++", "-std=c++20", "-I", prefix / "include", "-c", source, "-o", f"{source}.o"]
        run(command, cwd=tmp_path)
