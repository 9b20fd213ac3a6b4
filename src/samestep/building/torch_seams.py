"""The private names of torch that samestep uses, each under a name of ours: the one file that a new release of torch may break.

FSDP2's own names stand in `runtime/weights/`, those of aten in the tables of operations. Each was seen in torch 2.11 and 2.13.

    name here                       private name of torch                     public successor
    DispatchMode                    TorchDispatchMode                         none
    disable_current_modes           _python_dispatch._disable_current_modes   none
    num_dispatch_modes              _C._len_torch_dispatch_stack              none
    current_function_mode(s)        overrides._get_current_function_mode...   none
    push_, pop_function_mode        overrides._push_mode, _pop_mode           none
    DisableTorchFunction(Subclass)  _C.DisableTorchFunction...                none
    current_transform_level, ...    _C._functorch                             none
    autograd_sequence_number        _C._autograd._get_sequence_nr             Node._sequence_nr is private too
    current_autograd_node           _C._current_autograd_node                 none
    current_backward_id             _C._current_graph_task_id                 none
    call_after_backward             Variable._execution_engine                none; FSDP2 calls it too
    run_backward                    Variable._execution_engine                torch.autograd.backward, slower
    set_versions                    _C._autograd._unsafe_set_version_counter  none
    RecordFunctionFast              _C._profiler                              torch.profiler.record_function, slower
    dynamo, current_compile_id      _dynamo, _guards                          torch.compiler, in part
    inductor_options                _inductor.list_mode_options               none for a backend that is a function
    num_graph_breaks                _dynamo.utils.counters                    torch._dynamo.explain, which runs the code
    flash_attention(_backward)      aten._scaled_dot_product_flash_...        none that returns the log-sum-exp
    backward_hooks_pass_on          utils.hooks.BackwardHook                  none
    distributions_unchecked         Distribution._validate_args               Distribution.set_default_validate_args, which writes alone
    default_store, names_of_groups  distributed_c10d                          none
    abandon_groups                  distributed_c10d                          none
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch.autograd import graph
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils import hooks as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
RecordFunctionFast = torch._C._profiler._RecordFunctionFast
current_function_mode = overrides._get_current_function_mode
current_function_modes = overrides._get_current_function_mode_stack
pop_function_mode = overrides._pop_mode
pop_function_mode_temporarily = overrides._pop_mode_temporarily
push_function_mode = overrides._push_mode
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
autograd_sequence_number = torch._C._autograd._get_sequence_nr
current_autograd_node = torch._C._current_autograd_node
current_backward_id = torch._C._current_graph_task_id
current_transform_level = torch._C._functorch.maybe_current_level
get_unwrapped = torch._C._functorch.get_unwrapped
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
set_versions = torch._C._autograd._unsafe_set_version_counter
num_dispatch_modes = torch._C._len_torch_dispatch_stack


def call_after_backward(function: Callable[[], None]) -> None:
    """Let a function be called once the backward that runs is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def run_backward(tensors: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Add gradients to those of tensors, as `torch.autograd.backward` does: without its checks, which take longer than the rest."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def dynamo() -> Any:
    """Return the compiler's module, which torch imports when it is first asked for."""
    return torch._dynamo


def current_compile_id() -> Any:
    """Return the identity of the compilation that runs; None outside of one."""
    return torch._guards.CompileContext.current_compile_id()


def inductor_options(mode: str) -> dict[str, Any]:
    """Return the settings of inductor that a `mode` of `torch.compile` stands for."""
    options: dict[str, Any] = torch._inductor.list_mode_options(mode)
    return options


def num_graph_breaks() -> int:
    """Return how often the compiler of this process has ended a graph in the middle of code so far."""
    return sum(dynamo().utils.counters["graph_break"].values())


def default_store() -> Any:
    """Return the store through which the ranks of the default group have met."""
    return dist.distributed_c10d._get_default_store()


def names_of_groups() -> Mapping[dist.ProcessGroup, str]:
    """Return the name of each process group of this process."""
    return dist.distributed_c10d._world.pg_names


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output of torch's flash kernel, and the log-sum-exp of each query's scores [B, A, T], float32 at least."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        output, log_sum_exp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
    else:
        output, log_sum_exp, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    return output, log_sum_exp


def flash_attention_backward(
    given: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given that of the output.

    Where output and log-sum-exp are those of more keys than these, the gradients are the parts that these keys have in them.
    """
    aten = torch.ops.aten
    gradients: tuple[Tensor, Tensor, Tensor]
    if query.device.type == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            given, query, key, value, output, log_sum_exp, 0.0, is_causal, scale=scale
        )
        return gradients
    no_numbers = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which draws none
    gradients = aten._scaled_dot_product_flash_attention_backward(
        given, query, key, value, output, log_sum_exp, None, None, query.shape[2], key.shape[2], 0.0, is_causal,
        no_numbers, no_numbers, scale=scale,
    )  # fmt: skip
    return gradients


_abandoned: list[Any] = []


def abandon_groups() -> None:
    """Forget the process groups that a forked process has inherited, and end none: their threads are the parent's."""
    world = dist.distributed_c10d._world
    if world.default_pg is not None:
        _abandoned.append(dict(world.pg_map))  # a group that is freed would wait for its threads
        world.pg_names.clear()  # the groups that are shut down
        dist.destroy_process_group()


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that torch calls directly. `carry_out(func, args, kwargs)` runs each operation inside, or the method of a subclass."""

    def __init__(self, carry_out: Callable[..., Any] = lambda func, args, kwargs: func(*args, **kwargs)) -> None:
        super().__init__()
        self._carry_out = carry_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._carry_out(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the import of the compiler, which takes seconds, and a wrapper around each operation."""
        return False


class FunctionMode(TorchFunctionMode):
    """A function mode in which `carry_out(func, args, kwargs)` runs each function of torch that code calls."""

    def __init__(self, carry_out: Callable[..., Any]) -> None:
        super().__init__()
        self._carry_out = carry_out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._carry_out(func, args, kwargs or {})


def disable_current_modes() -> AbstractContextManager[Any]:
    """Return a context without the dispatch modes that are active, but with those of a compiler that traces; it costs nothing where
    there are none."""
    return nullcontext() if not num_dispatch_modes() or graph_is_made() else _disable_current_modes()


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Let torch's distributions take values without checking them, inside; no result depends on these checks."""
    was_checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(was_checked)


def graph_is_made() -> bool:
    """Return whether a compiler runs operations on stand-ins, to make a graph of them."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FUNCTIONAL, keys.PROXY))


def disable_compiler() -> AbstractContextManager[object]:
    """Return a context in which compiled code of a model or an optimizer runs uncompiled.

    The compiler would trace the modes that watch the code, too. Nothing is compiled where it is not yet imported.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_compiled(module: nn.Module) -> bool:
    """Return whether the forward of a module is compiled: by `torch.compile` of it, by its `compile()`, or as a decorated method."""
    if "torch._dynamo" not in sys.modules:
        return False
    is_called_by_graph = module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
    return is_called_by_graph or isinstance(module, dynamo().OptimizedModule)


def is_transformed() -> bool:
    """Return whether code runs inside of a transform of `torch.func`."""
    return current_transform_level() is not None


class Replaced:
    """A context, which may be entered any number of times, inside which attributes are others.

    Each is given by its owner, its name, and a function of the value outside, which is called once for each such value.
    """

    def __init__(self, *attributes: tuple[Any, str, Callable[[Any], Any]]) -> None:
        """Replace these attributes."""
        self.attributes = attributes
        self._made: list[tuple[Any, Any]] = [(self, None)] * len(attributes)
        self._before: list[list[Any]] = []

    def __enter__(self) -> None:
        originals = []
        for place, (owner, name, make) in enumerate(self.attributes):
            originals.append(vars(owner).get(name))  # None where it is inherited
            if self._made[place][0] is not originals[-1]:
                self._made[place] = originals[-1], make(getattr(owner, name))
            setattr(owner, name, self._made[place][1])
        self._before.append(originals)

    def __exit__(self, *error: object) -> None:
        for (owner, name, _), original in zip(self.attributes, self._before.pop(), strict=True):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def transforms_beside_hooks() -> Replaced:
    """Return a context inside which transforms of `torch.func` run while hooks of saved tensors are active."""
    return Replaced((graph, "disable_saved_tensors_hooks", _setting_hooks_aside))


def backward_hooks_pass_on() -> Replaced:
    """Return a context inside which modules with hooks on their gradients pass on the inputs and outputs that they are given, and not views
    of them with a node of autograd in front."""
    return Replaced((module_hooks.BackwardHook, "_apply_on_tensors", _passing_on))


def _passing_on(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda hook, note, args: (args, None)


def _setting_hooks_aside(original: Callable[[str], AbstractContextManager[None]]) -> Callable[..., Any]:
    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        aside: list[Any] = []
        while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            aside.append(hooks)
        try:
            with original(error_message):
                yield
        finally:
            for hooks in reversed(aside):
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    return disabled
