"""DataParallel over any list of devices, also several replicas on the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

_ExceptionWrapper: Any = torch._utils.ExceptionWrapper  # Any: it is untyped
Device: TypeAlias = "int | str | torch.device"


class DataParallel(nn.Module):
    """Runs a module's forward on parts of the batch concurrently, with a replica and a thread for each device.

    Like torch.nn.DataParallel, but for any devices. `device_ids` is a list of devices ("cpu", torch.device("cuda", 1),
    or the index of an accelerator), which may repeat, or a number of replicas on the CPU. The default is all
    accelerators; without any, the module is called directly. Tensors among the arguments are split along `dim`, other
    arguments are passed to each replica. Outputs are concatenated along `dim` on `output_device` (default: the first
    of `device_ids`). With one device, the output of forward is returned unchanged. A batch smaller than the number of
    devices leaves some devices idle. The gradients of all replicas are summed in the module, whose parameters and
    buffers must be on the first device.

    Replicas on the module's device share its parameters. The first replica uses the module's buffers. The others use
    copies, which are discarded with their changes. On the CPU, each thread uses torch.get_num_threads() divided by the
    number of replicas. An error of a replica is raised with the replica's index.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: int | Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        self.dim = dim
        self.device_ids = _devices(device_ids)
        self.output_device = _device(output_device) if output_device is not None else next(iter(self.device_ids), None)
        if len(self.device_ids) == 1:
            self.module.to(self.device_ids[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            return _run(self.module, inputs, kwargs, self.device_ids, self.output_device, self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: int | Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Runs module(*inputs, **module_kwargs) like DataParallel. `inputs` is a tuple, or the only argument."""
    inputs = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return _run(module, inputs, module_kwargs or {}, _devices(device_ids), output_device, dim)


def _device(device: Device) -> torch.device:
    if not isinstance(device, int):
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator()
    if device < 0 or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, device)


def _devices(devices: int | Sequence[Device] | None) -> list[torch.device]:
    if devices is None:
        devices = list(range(torch.accelerator.device_count()))
    elif isinstance(devices, int):
        if devices < 1:
            raise ValueError(f"device_ids={devices}: a number must be a positive number of replicas on the CPU")
        devices = ["cpu"] * devices
    elif isinstance(devices, (str, torch.device)):
        raise TypeError(f"device_ids must be a list of devices or a number of replicas on the CPU, not {devices!r}")
    elif not devices:
        raise ValueError("device_ids is empty: name a device for each replica, or None for all accelerators")
    return [_device(each) for each in devices]


def _run(
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: list[torch.device],
    output_device: Device | None,
    dim: int,
) -> Any:
    if not devices:
        return module(*inputs, **kwargs)
    output = devices[0] if output_device is None else _device(output_device)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != devices[0]:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {devices[0]} (device_ids[0]) but {name} is on "
                f"device {tensor.device}: call module.to({str(devices[0])!r}) first"
            )
    if len(devices) == 1:
        ((args, options),) = _scatter((inputs, kwargs), devices, dim)
        return module(*args, **options)
    devices = devices[: _count_parts((inputs, kwargs), len(devices), dim)]
    parts = _scatter((inputs, kwargs), devices, dim)
    if len(parts) == 1:
        outputs = [module(*parts[0][0], **parts[0][1])]
    else:
        outputs = _apply([_replicate(module, device, index) for index, device in enumerate(devices)], parts, devices)
    return _gather(outputs, output, dim)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_tensors, value))
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_tensors, value.values()))


def _count_parts(arguments: tuple[tuple[Any, ...], dict[str, Any]], devices: int, dim: int) -> int:
    sizes = {tensor.size(dim) for tensor in _tensors(arguments) if tensor.dim() > 0}
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors given to this module have {sorted(sizes)} elements along dimension {dim}: they are split "
            f"there between {devices} replicas, and must all have as many"
        )
    if not sizes:
        return devices if any(arguments) else 1
    (size,) = sizes
    return max(1, -(-size // -(-size // devices))) if size else 1  # as many as Tensor.chunk() makes


def _like(value: Any, items: Iterable[Any]) -> Any:
    """Returns a sequence with the type of `value`."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _scatter(value: Any, devices: list[torch.device], dim: int) -> list[Any]:
    """Returns the value for each device. Tensors are split, other values are repeated."""
    if isinstance(value, Tensor):
        parts = value.chunk(len(devices), dim) if value.dim() > 0 else [value] * len(devices)
        return [part.to(device, non_blocking=True) for part, device in zip(parts, devices, strict=True)]
    if isinstance(value, (list, tuple)) and value:
        columns = [_scatter(item, devices, dim) for item in value]
        return [_like(value, row) for row in zip(*columns, strict=True)]
    if isinstance(value, dict) and value:
        columns = [_scatter(item, devices, dim) for item in value.values()]
        return [type(value)(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    return [value] * len(devices)


def _gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Joins the outputs of the replicas: concatenates tensors, and stacks scalars."""
    first = outputs[0]
    if isinstance(first, Tensor):
        moved = [each.to(device) for each in outputs]
        return torch.stack(moved) if first.dim() == 0 else torch.cat(moved, dim)
    if first is None:
        return None
    if isinstance(first, (list, tuple)):
        return _like(first, (_gather(items, device, dim) for items in zip(*outputs, strict=True)))
    if isinstance(first, dict):
        return type(first)((key, _gather([each[key] for each in outputs], device, dim)) for key in first)
    raise TypeError(
        f"the module's forward returned a {type(first).__name__}: replicas may return tensors and None, and lists, "
        "tuples and dicts of these"
    )


def _replicate(module: nn.Module, device: torch.device, index: int) -> Any:
    """Returns a copy of the module. It shares the parameters, or has copies through which gradients flow back."""
    copies: dict[int, Any] = {}  # by the id() of the original: modules and tensors may occur several times

    def copy(original: Any) -> Any:
        if id(original) not in copies:
            is_module = isinstance(original, nn.Module)
            copies[id(original)] = copy_module(original) if is_module else original.to(device, copy=True)
        return copies[id(original)]

    def copy_module(original: Any) -> Any:
        if isinstance(original, torch.jit.ScriptModule):
            raise RuntimeError("DataParallel cannot replicate a ScriptModule: give it the Python module")
        replica = original._replicate_for_data_parallel()
        for key, parameter in original._parameters.items():
            if parameter is None or parameter.device == device:
                replica._parameters[key] = parameter
            else:
                setattr(replica, key, copy(parameter))
        for key, buffer in original._buffers.items():
            replica._buffers[key] = buffer if buffer is None or index == 0 else copy(buffer)
        for key, child in original._modules.items():
            replica._modules[key] = None if child is None else copy(child)
        return replica

    return copy(module)


class _ThreadLocalState:
    """Holds the state that torch keeps per thread, as it is in the calling thread."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {device.type for device in devices}
        ]

    @contextlib.contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            if device.type != "cpu":
                stack.enter_context(torch.accelerator.device_index(device.index))
            yield


def _apply(replicas: list[nn.Module], parts: list[Any], devices: list[torch.device]) -> list[Any]:
    state = _ThreadLocalState(devices)

    def call(index: int) -> Any:
        inputs, kwargs = parts[index]
        try:
            with state.applied(devices[index]):
                return replicas[index](*inputs, **kwargs)
        except Exception:
            return _ExceptionWrapper(where=f"in replica {index} on device {devices[index]}")

    pool = _pool(os.getpid(), getattr(_thread, "depth", 0), len(replicas))
    outputs = list(pool.map(call, range(len(replicas))))
    for output in outputs:
        if isinstance(output, _ExceptionWrapper):
            output.reraise()
    return outputs


_thread = threading.local()  # .depth: how many DataParallels are around the replica that this thread runs


@functools.lru_cache
def _pool(process: int, depth: int, threads: int) -> ThreadPoolExecutor:
    """Pools are cached, because OpenMP starts threads for each thread that computes. The key has the process, because
    threads do not survive a fork. It has the depth, because replicas that wait for inner replicas occupy their
    threads.
    """
    total = torch.get_num_threads()

    def begin() -> None:
        _thread.depth = depth + 1
        torch.set_num_threads(max(1, total // threads))

    pool = ThreadPoolExecutor(threads, "muster-replica", begin)
    all_began = threading.Barrier(threads)
    list(pool.map(lambda _: all_began.wait(), range(threads)))
    torch.set_num_threads(total)  # begin() also changed this number for threads that start later
    return pool
