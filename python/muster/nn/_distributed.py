"""DistributedDataParallel: torch's Python class over muster's reducer."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes

from muster import _C, hooks
from muster._group import backend_of
from muster.nn._comm_hooks import adapt_torch_hook, gradients_of
from muster.nn._compiled import can_trace, traced_forward
from muster.nn._logger import Logger
from muster.nn._mixed_precision import LowPrecision
from muster.nn._reducer import Reducer
from muster.nn._sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Backend, GradBucket

# Any: most of torch's class is untyped, and declares its own reducer and logger.
_TorchDistributedDataParallel: Any = nn.parallel.DistributedDataParallel
_init = _TorchDistributedDataParallel.__init__
_parameters = dict(inspect.signature(_init).parameters)
_parameters["gradient_as_bucket_view"] = _parameters["gradient_as_bucket_view"].replace(default=True)
_signature = inspect.Signature(list(_parameters.values()))
_BUILT_IN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
# torch checks that there are a GPU and NCCL before it accepts these hooks.
_HOOKS_WITHOUT_CHECK = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def _optimize_in_backward(
    model: Callable[[], DistributedDataParallel], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """A hook that runs the optimizers of a bucket's parameters as soon as the bucket is reduced."""
    parameters, reducer, size = bucket.parameters(), model().reducer, model().process_group.size()

    def step(future: torch.futures.Future[Tensor]) -> Tensor:
        future.value().div_(size)
        for parameter, gradient in zip(parameters, gradients_of(bucket), strict=True):
            for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                parameter.grad = gradient.to(parameter.dtype)
                optimizer.step()
                parameter.grad = None
        return future.value()

    return reducer._run_allreduce_hook(bucket).then(step)


class DistributedDataParallel(_TorchDistributedDataParallel):  # type: ignore[misc]
    """torch.nn.parallel.DistributedDataParallel with all of its arguments and methods. muster averages the gradients
    while backward runs, over a process group of the muster backend. For modules on the CPU and on devices. Few things
    differ from torch's class (docs/howto/ddp.md): gradient_as_bucket_view is True by default, bf16 hooks run on the
    CPU, and errors name ranks and parameters.

    When another rank fails, the constructor, forward and backward raise muster.PeerLostError and related errors
    (muster.errors). Afterwards this object cannot be used, but the module that it wraps can.
    """

    _lazy_init_ran = False  # torch's constructor does not set it if all gradients are delayed

    @functools.wraps(_init)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = _signature.bind(self, *args, **kwargs).arguments
        options.pop("self")
        if not isinstance(options["module"], nn.Module):
            raise TypeError(f"muster.nn.DistributedDataParallel wraps a torch.nn.Module, not {options['module']!r}")
        options.setdefault("gradient_as_bucket_view", True)
        mixed_precision = options.pop("mixed_precision", None)  # torch's implementation needs an accelerator's streams
        self._has_local_gradients = False  # of a backward under no_sync()
        self._has_graph_breaks = False  # torch.compile cannot trace the whole module
        # muster's reducer compares the models first, because its error names the parameter and the rank that differ.
        # torch's "init_sync" follows in _ddp_init_helper().
        self._pending_sync: dict[str, bool] | None = None
        if options.pop("init_sync", True):
            buffers = options.get("forward_sync_buffers") is not None or options.get("broadcast_buffers") is not False
            self._pending_sync = {"broadcast_buffers": buffers}
        super().__init__(**options, init_sync=False)
        if mixed_precision is not None:
            self._set_mixed_precision(mixed_precision)

    __init__.__signature__ = _signature  # type: ignore[attr-defined]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        traces = torch.compiler.is_compiling() and can_trace(self)
        if torch.is_grad_enabled():
            self._has_local_gradients = not self.require_backward_grad_sync
        if traces:
            return traced_forward(self, super().forward, inputs, kwargs)
        return super().forward(*inputs, **kwargs)

    def _ddp_init_helper(
        self,
        parameters: list[Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Called by the constructor and by unpickling."""
        if self._use_python_reducer:  # compiled autograd reduces the gradients
            if self._pending_sync is not None:
                _verify_param_shape_across_processes(self.process_group, parameters)
            super()._ddp_init_helper(parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
        else:
            self._make_reducer(parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
            self.logger = Logger(self, static_graph)
            self._passing_sync_batchnorm_handle(self.module)
        if self._pending_sync is not None:
            _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
                **self._pending_sync,
            )
            self._pending_sync = None

    def _make_reducer(
        self, parameters: list[Tensor], sparse: list[bool], names: dict[int, str], static_graph: bool
    ) -> None:
        for index, parameter in enumerate(parameters):
            if parameter.is_meta:
                where = f"the parameter {names[index].removeprefix('.')} is on meta"
                self._log_and_throw(ValueError, f"{where} and has no data: call to_empty() first")
            on_device = parameter.device.type
            if on_device != "cpu" and backend_of(self.process_group, on_device).name() != "muster":
                self._log_and_throw(
                    ValueError,
                    f"the parameter {names[index].removeprefix('.')} is on {parameter.device}, and muster is not the "
                    "backend of the process group for this device: use torch.nn.parallel.DistributedDataParallel, or "
                    'a group of init_process_group("muster")',
                )
        options = _C.ReducerOptions()
        options.names = [names[index].removeprefix(".") for index in range(len(parameters))]
        if self.bucket_bytes_cap < 0:
            cap = self.bucket_bytes_cap / 2**20
            self._log_and_throw(ValueError, f"bucket_cap_mb must be a size in MiB of at least 0, got {cap:g}")
        options.bucket_bytes = self.bucket_bytes_cap
        default = self.bucket_bytes_cap_default
        options.first_bucket_bytes = _DEFAULT_FIRST_BUCKET_BYTES if default else self.bucket_bytes_cap
        options.bucket_bytes_list = self.bucket_bytes_cap_list
        options.gradient_as_bucket_view = self.gradient_as_bucket_view
        options.find_unused_parameters = self.find_unused_parameters
        options.static_graph = static_graph
        options.skip_all_reduce_unused_parameters = self.skip_all_reduce_unused_params
        options.sparse = sparse
        self._has_sparse_gradients = any(sparse)
        if self._pending_sync is not None:
            options.model_parameters = self._unless_ignored(self.module.named_parameters())
            if self._pending_sync["broadcast_buffers"]:
                options.model_buffers = self._unless_ignored(self.module.named_buffers())
        options.verify = self._pending_sync is not None
        self.reducer = Reducer(self.process_group, parameters, options)
        self._set_reduction_dtype()  # for a model that was unpickled

    def _unless_ignored(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """torch also ignores delayed parameters. They are kept here, because all ranks must have the same ones."""
        delayed = {id(each) for each in self._delay_all_reduce_params}
        return [pair for pair in tensors if pair[0] not in self.parameters_to_ignore or id(pair[1]) in delayed]

    def _set_mixed_precision(self, config: Any) -> None:
        self.mixed_precision = config
        if not self._use_python_reducer:
            self._set_reduction_dtype()
        if config.buffer_dtype is not None:
            for buffer in self.module.buffers():
                if buffer.is_floating_point() and not getattr(buffer, "_ddp_ignored", False):
                    buffer.data = buffer.to(config.buffer_dtype)
        if config.param_dtype is not None:
            self._low_precision = LowPrecision(self.module, config.param_dtype)
            self._run_ddp_forward = self._run_in_low_precision

    def _set_reduction_dtype(self) -> None:
        config = self.mixed_precision
        if config is not None and (dtype := config.reduce_dtype or config.param_dtype) is not None:
            self.reducer._set_reduction_dtype(dtype)

    @torch._disable_dynamo(recursive=False)
    def _run_in_low_precision(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._low_precision.active(self.module):
            return super()._run_ddp_forward(*inputs, **kwargs)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Joins the backward of the other ranks with zeros. Keeps the gradients of this rank, as torch does."""
        parameters = self.reducer.parameters
        gradients = [None if each.grad is None else each.grad.clone() for each in parameters]
        self.reducer._shadow_backward()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _match_unused_params_allreduce(self) -> None:
        """Does nothing, because _shadow_backward() includes this."""

    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        """A flag of torch's class. The reducer gives its value here, because the first backward may be under
        no_sync().
        """
        return not self.reducer._in_first_static_iteration()

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, value: bool) -> None:
        pass

    def _delayed_all_reduce_hook(self, gradient: Tensor) -> Tensor:
        """Like torch's hook, but backward waits for the all-reduce. torch's stream makes the optimizer's step wait."""
        self._delay_grad_buffer.div_(self.process_group.size())
        work: Any = dist.all_reduce(self._delay_grad_buffer, group=self.process_group, async_op=True)
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        return gradient

    def _setup_in_backward_optimizers(self) -> None:
        """Like torch's method, whose hook needs an accelerator's streams."""
        if self._use_python_reducer:
            super()._setup_in_backward_optimizers()
        elif any(hasattr(each, "_in_backward_optimizers") for each in self._module_parameters):
            from torch.distributed.optim import apply_optimizer_in_backward as in_backward

            handles: Any = in_backward.param_to_optim_hook_handle_map
            for parameter in self._module_parameters:
                for handle in handles.get(parameter, []):
                    handle.remove()
            self._set_hook(weakref.ref(self), _optimize_in_backward, "optimizer in backward")
            self.reducer._set_optimizer_in_backward()

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            on_cpu = self.device_type == "cpu"
            if on_cpu and isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
                self._log_and_throw(
                    ValueError,
                    f"SyncBatchNorm layers only work with GPU modules, and {name or 'the module'} is one: put "
                    "muster.nn.SyncBatchNorm in their place with its convert_sync_batchnorm()",
                )

    def register_comm_hook(self, state: object, hook: Callable[..., Any] | _C.NativeHook) -> None:
        """Registers a hook like torch's: hook(state, bucket) returns a Future of the bucket's tensor. Also takes a
        hook of muster.hooks, with the state None. For hooks of muster.hooks, and for torch's PowerSGD and quantizing
        hooks, this is a collective call.
        """
        if isinstance(hook, _C.NativeHook):
            self._set_native_hook(state, hook)
            return
        if self._use_python_reducer:
            super().register_comm_hook(state, hook)
            return
        if getattr(hook, "__module__", "") == hooks.__name__:
            made = f"muster.hooks.{hook.__name__}"
            raise TypeError(f"{made} makes a hook: register_comm_hook(None, {made}())")
        if getattr(hook, "__name__", "") not in _HOOKS_WITHOUT_CHECK:
            self._check_comm_hook(hook)
        self._set_hook(state, hook, hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        if self._use_python_reducer:
            super()._register_builtin_comm_hook(comm_hook_type)
        else:
            self._set_hook(self.process_group, _BUILT_IN_HOOKS[comm_hook_type], str(comm_hook_type))

    def _set_native_hook(self, state: object, hook: _C.NativeHook) -> None:
        if state is not None or self._use_python_reducer:
            raise ValueError(f"{hook!r} has no state and needs muster's reducer: register_comm_hook(None, hook)")
        self.reducer._register_native_hook(backend_of(self.process_group), hook)
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(hook.name)

    def _set_hook(self, state: object, hook: Callable[..., Any], name: str) -> None:
        own_groups: list[Backend] = []
        self.reducer._register_comm_hook(state, adapt_torch_hook(hook, self.process_group, own_groups), own_groups)
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(name)
