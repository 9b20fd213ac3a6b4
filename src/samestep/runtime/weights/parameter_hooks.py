"""Gradient hooks that a user's code has registered on parameters: tested, and moved to the parameters of a run.

In plain torch a hook sees the gradient of a whole step, and on one rank with one micro-batch it does here; elsewhere it sees that of
a micro-batch on one rank, times a factor, and under a tensor cut a part of it. Only a linear function gives the same step there, and
under a cut only an element-wise one. The first is read off the hook's operations (`independence/linear_hooks.py`), and the second is
tested on real values before the first step:

    hook(a) + hook(b) == hook(a + b)          hook(part of a) == part of hook(a)
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.initial_values import Blueprint
from samestep.building.outside_reads import FirstRead
from samestep.building.parameter_marks import ParameterMarks, gradient_function, gradient_hooks_of, with_values
from samestep.building.torch_seams import DisableTorchFunction
from samestep.errors import LayoutError, ModelError, first_line
from samestep.independence.kept_state import acts_by_calls
from samestep.independence.linear_hooks import is_linear
from samestep.program.program import Program
from samestep.runtime.axes import forward_state
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights import placement
from samestep.runtime.weights.pieces import without_no_row
from samestep.state.snapshot import Snapshot, preserve_function

GradientHooks = Mapping[str, Callable[[Tensor], Tensor]]
"""The function that the hooks of each parameter apply to its gradient, by the parameter's full name."""


def gradient_hooks(plan: Blueprint, program: Program, mesh: Mesh) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the function that the user's hooks apply to each gradient, tested for the program's layout.

    Raises:
        ModelError: a hook is not linear, so it would give another step than in a plain loop, or it reads weights that the run does not
            train.
        LayoutError: a hook needs the whole gradient of a weight that the layout cuts.
    """
    functions: dict[str, Callable[[Tensor], Tensor]] = {}
    step = program.step
    owners = _owners((*marks.hooks, *marks.late_hooks) for marks in plan.marks.values())
    for spec in step.model.params:
        alike = [name for name in (spec.name, *spec.aliases) if name in plan.marks]
        marks = next((plan.marks[name] for name in alike), None)
        if spec.trainable and spec.sparse_gradient:
            functions[spec.name] = functools.partial(without_no_row, lambda gradient: gradient)
        if marks is None or not spec.trainable or not (marks.hooks or marks.late_hooks):
            continue
        if step.splits_backward:
            raise LayoutError(
                "schedule-unsupported",
                f"{spec.name} has hooks on its gradient, and schedule={step.layout.schedule} computes gradients of weights "
                "apart from autograd. Use schedule=1f1b",
            )
        weight = plan.materialize(alike[0], mesh.device, torch.float64)
        valued = with_values(alike[0], marks, lambda name: plan.materialize(name, mesh.device))
        function = gradient_function(valued, weight)
        read = FirstRead(_unlike_a_loop(plan, program))
        with read.mode, _preserved(valued):
            is_shared = _is_shared(owners, (*marks.hooks, *marks.late_hooks))
            drawn = _check_linear(spec.name, valued, function, weight, program, is_shared=is_shared)
        if read.name:
            raise ModelError(
                "instance-read-elsewhere",
                f"a hook on the gradient of {spec.name} reads {read.name}, and the run trains a copy of it, or a rank has a part. Use a hook "
                "of the gradient alone, or a layout where ranks have whole weights (tp=1, zero=1) of an instance.",
            )
        part = placement.local_part(weight, spec, step.holding(spec), mesh)
        if part.shape != weight.shape:
            function = gradient_function(valued, part)
            cut = functools.partial(placement.local_part, cut=spec, holding=step.holding(spec), mesh=mesh)
            with _preserved(valued):
                _check_part(spec.name, function, drawn, cut)
        functions[spec.name] = functools.partial(without_no_row, function) if spec.sparse_gradient else function
    return functions


def _unlike_a_loop(plan: Blueprint, program: Program) -> list[tuple[str, Tensor]]:
    """Return the weights that a hook would see otherwise than in a plain loop: of which the run trains copies, or ranks have parts."""
    gathers, _, is_cut = _dividing_words(program)
    is_alike = plan.is_taken and not gathers and not is_cut
    originals = (
        [] if is_alike else [(name, weight) for name, ref in plan.given.items() if (weight := ref()) is not None]
    )
    return [*originals, *(plan.module.named_parameters() if gathers or is_cut else ())]


_ALLOWED = 1e-6
"""The largest relative difference of what hooks may compute in float32."""


def _check_linear(
    name: str,
    marks: ParameterMarks,
    function: Callable[[Tensor], Tensor],
    value: Tensor,
    program: Program,
    *,
    is_shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a random gradient and the hooks' result for it, once the hooks are shown to be linear, unless the layout divides nothing.

    `is_shared` says whether one of them is a hook of other weights too, or keeps something together with it, which stages, and ranks
    with gathered weights, call otherwise.

    Raises:
        ModelError: they are not, change the weight, or fail.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(value.shape, dtype=torch.float64, generator=generator).to(value.device)
    copied, is_plain = value.clone(), not may_refuse(program)
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            with _preserved(marks):
                again = drawn if is_plain else function(drawn.clone())
            result = function(drawn.clone())
            keeps = is_plain or torch.equal(again, result)
    except Exception as error:
        raise _failing(name, error) from error
    if not torch.equal(copied, value):
        raise ModelError(
            "gradient-hook",
            f"a hook on the gradient of {name} changes the weight itself: an optimizer function can do so",
        )
    changes = not keeps or not torch.equal(state, torch.get_rng_state())
    if not is_plain and (changes or not is_linear(function, [value])):
        raise ModelError(
            "gradient-hook",
            f"a hook on the gradient of {name} is not linear, and gradients are added up over micro-batches and ranks after "
            "it, where a plain loop gives it their sum. Use a factor or a mask, or clip_norm in the job, or a change "
            "of the gradient in the optimizer's step, or one rank with one micro-batch",
        )
    is_parted = program.step.num_microbatches > 1
    layout = program.step.layout
    is_reordered = is_shared and (layout.gathers_weights or layout.pp > 1)
    hooks = (*marks.hooks, *marks.late_hooks) if is_parted or is_reordered else ()
    if any(acts_by_calls(hook, lambda: torch.equal(function(drawn.clone()), result)) for hook in hooks):
        calls = "each micro-batch of a step calls it, where a plain loop does once" if is_parted else ""
        word = f"pp={layout.pp}" if layout.pp > 1 else f"zero={layout.zero}"
        calls = calls or f"{word} calls it for the weights of a stage alone, or in another order than a plain loop does"
        raise ModelError(
            "hook-gradient-counts-calls",
            f"the result of a hook on the gradient of {name} depends on the number of its calls, and {calls}. Use one micro-batch per rank, a hook of its "
            "own for each weight, or a number that the loop counts.",
        )
    return drawn, result


def _owners(hooks_of_weights: Iterable[Iterable[Callable[..., Any]]]) -> Counter[int]:
    """Return how many weights have each hook, and each thing in which hooks keep something, by identity."""
    return Counter(key for hooks in hooks_of_weights for key in {key for hook in hooks for key in _things_of(hook)})


def _is_shared(owners: Counter[int], hooks: Iterable[Callable[..., Any]]) -> bool:
    return any(owners[key] > 1 for hook in hooks for key in _things_of(hook))


def _things_of(hook: Callable[..., Any]) -> set[int]:
    """Return the identities of a hook, and of what it may keep something in: those of its objects, dictionaries and variables."""
    snapshot = Snapshot(hook)
    holders = [variable.holder for variable in snapshot.variables.values() if variable.holder is not None]
    return {id(hook), *(id(container) for container, _ in snapshot.containers), *map(id, holders)}


@contextmanager
def _preserved(marks: ParameterMarks) -> Iterator[None]:
    """Restore what the hooks of a parameter hold after calls inside."""
    with ExitStack() as stack, torch.no_grad():
        for hook in (*marks.hooks, *marks.late_hooks):
            stack.enter_context(preserve_function(hook))
        yield


def _failing(name: str, error: Exception) -> ModelError:
    return ModelError(
        "gradient-hook",
        f"a hook on the gradient of {name} fails on a gradient of its shape ({type(error).__name__}: {first_line(error)}): "
        "tensors that it needs can be buffers of the module",
    )


_ALL = -1
"""The key of the numbers of all hooks among those that are judged."""


def _dividing_words(program: Program) -> tuple[str, str, bool]:
    """Return the word under which weights are gathered, that by which a forward sees a part of the batch, and whether weights are cut."""
    layout = program.step.layout
    word = f"zero={layout.zero}" if layout.gathers_weights else ""
    divides = forward_state.splits(layout, program.step.num_microbatches)
    return word, divides, any(degree > 1 for degree in layout.weight_axes.values())


def of_whole_gradients(plan: Blueprint, program: Program) -> tuple[Callable[..., Any], ...]:
    """Return the hooks of parameters if they see the gradients of a whole step, as in a plain loop."""
    everywhere = (hook for marks in plan.marks.values() for hook in (*marks.hooks, *marks.late_hooks))
    return () if may_refuse(program) else (*{id(hook): hook for hook in everywhere}.values(),)


def may_refuse(program: Program) -> bool:
    """Return whether a hook that is registered later may be refused: not where one forward takes the batch and weights are whole."""
    return any(_dividing_words(program))


def num_on(params: Iterable[tuple[str, nn.Parameter]]) -> int:
    """Return the number of all hooks on the gradients of parameters, in few calls: it is asked in every step."""
    return sum([len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for _, p in params])


def are_on(params: Iterable[tuple[str, nn.Parameter]]) -> bool:
    """Return whether the user's code has registered hooks on parameters."""
    marks = (_own_hooks(param) for _, param in params if any(gradient_hooks_of(param)))
    return any(mark.hooks or mark.late_hooks for mark in marks)


def later_refusal(params: Sequence[tuple[str, nn.Parameter]], program: Program, judged: dict[int, object]) -> str:
    """Return why a hook that a loop has registered on a parameter of a run's module is refused; empty if it acts as in a plain loop.

    It does where one forward takes the whole batch and ranks hold whole weights. Elsewhere a hook is called once on drawn
    gradients; `judged` holds, by identity, those that have been.
    """
    with DisableTorchFunction():  # a weight of another stage would ask its class at each attribute
        present = [
            (*(p._backward_hooks or ()), *(getattr(p, "_post_accumulate_grad_hooks", None) or ())) for _, p in params
        ]
    if judged.get(_ALL) == present:  # the numbers of hooks, of which no two are equal
        return ""
    reads_all = may_refuse(program)
    owners = _owners((*marks.hooks, *marks.late_hooks) for marks in (_own_hooks(param) for _, param in params))
    for name, param in params:
        hooks = {id(hook): hook for kind in gradient_hooks_of(param) for hook in kind.values()}  # those of samestep too
        if hooks.keys() <= judged.keys() or param.is_meta:
            continue
        is_shared = _is_shared(owners, (hook for hook in hooks.values() if not _is_ours(hook)))
        if not (reads_all or is_shared):
            continue
        if reason := _refusal_of(name, param, program, is_shared=is_shared):
            return reason
        judged.update(hooks)
    judged[_ALL] = present
    return ""


def _refusal_of(name: str, param: nn.Parameter, program: Program, *, is_shared: bool) -> str:
    """Return why the hooks of a parameter are refused where a rank holds a part of it or a part of the weights that have one of them
    (`is_shared`), or sees a part of the batch; else empty."""
    marks = _own_hooks(param)
    if not marks.hooks and not marks.late_hooks:
        return ""
    word, divides, is_cut = _dividing_words(program)
    if word:
        return (
            f"a hook was registered on the gradient of {name} in run.model, and under {word} this is the gradient of a gathered "
            "weight, which the hook does not see. Use a hook that the build function registers, or zero=1"
        )
    value = param.detach()
    function = gradient_function(marks, value)
    try:
        with _preserved(marks):
            if divides or is_shared:
                _check_linear(name, marks, function, value, program, is_shared=is_shared)
            is_apart = not is_cut or _is_by_elements(function, value)
    except ModelError as error:
        return str(error)
    except Exception as error:  # of the user's own code, which may raise anything
        return str(_failing(name, error))
    if divides and marks.late_hooks:
        return (
            f"a hook after the accumulated gradient of {name} was registered in run.model, and {divides} adds up gradients of parts of the "
            "batch: the hook would see each sum. Use such a hook of the model that the run is made of, or register_hook"
        )
    if not is_apart:
        return (
            f"a hook on the gradient of {name} does not treat every element alike, and a rank may hold a part of the weight. Use "
            "tp=1 (and ep=1)"
        )
    return ""


def _is_by_elements(function: Callable[[Tensor], Tensor], value: Tensor) -> bool:
    """Return whether the hooks' result for half of a gradient's elements is independent of the other half."""
    generator = torch.Generator().manual_seed(0)
    drawn, other = (torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value) for _ in range(2))
    is_half = (torch.arange(value.numel(), device=value.device) % 2).view(value.shape).bool()
    with torch.no_grad():
        results = [function(gradient) for gradient in (drawn, torch.where(is_half, drawn, other))]
    return torch.allclose(results[0][is_half], results[1][is_half], rtol=_ALLOWED, atol=1e-9)


def _own_hooks(param: Tensor) -> ParameterMarks:
    """Return the hooks of a parameter that the user's code has registered, without those of samestep."""
    hooks, late = (tuple(hook for hook in kind.values() if not _is_ours(hook)) for kind in gradient_hooks_of(param))
    return ParameterMarks({}, hooks, late)


def _is_ours(hook: Callable[..., object]) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).startswith("samestep.")


def _check_part(
    name: str, function: Callable[[Tensor], Tensor], drawn: tuple[Tensor, Tensor], part: Callable[[Tensor], Tensor]
) -> None:
    gradient, changed = drawn
    try:
        with torch.no_grad():
            is_alike = torch.allclose(function(part(gradient).contiguous()), part(changed), rtol=1e-9, atol=1e-12)
    except Exception:
        is_alike = False
    if not is_alike:
        raise LayoutError(
            "gradient-hook",
            f"a hook on the gradient of {name} does not treat every element alike, and a tensor cut leaves it a part of the "
            "gradient. Use tp=1 (and ep=1)",
        )


def attributes_of(marks: Mapping[str, ParameterMarks]) -> dict[str, dict[str, object]]:
    """Return the Python attributes of the parameters that have any."""
    return {name: mark.attributes for name, mark in marks.items() if mark.attributes}
