"""Gradient hooks that a user's code has registered on parameters: tested, and moved to the parameters of a run.

In plain torch a hook sees the gradient of a whole step; here it sees that of a micro-batch on one rank, times a factor,
and under a tensor cut a part of it. Only a linear function gives the same step, and under a cut only an element-wise one.
Both are tested on real values before the first step:

    hook(a) + hook(b) == hook(a + b)          hook(part of a) == part of hook(a)

The first is tried as that of a backward is (`independence/operation_trial.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from samestep.building.first_read import FirstRead
from samestep.building.initial_values import Blueprint
from samestep.building.parameter_marks import ParameterMarks, gradient_function, gradient_hooks_of, with_values
from samestep.building.torch_seams import DisableTorchFunction
from samestep.errors import LayoutError, ModelError, first_line
from samestep.independence.operation_trial import compare_sums_of
from samestep.program.program import Program
from samestep.runtime.axes import forward_state
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights import placement

GradientHooks = Mapping[str, Callable[[Tensor], Tensor]]
"""The function that the hooks of each parameter apply to its gradient, by the parameter's full name."""


def gradient_hooks(plan: Blueprint, program: Program, mesh: Mesh) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the function that the user's hooks apply to each gradient, tested for the program's layout.

    Raises:
        ModelError: a hook is not linear, so it would give another step than in a plain loop, or it reads weights that the run does not
            train.
        LayoutError: a hook needs the whole gradient of a weight that the layout cuts.
    """
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    step = program.step
    for spec in step.model.params:
        alike = [name for name in (spec.name, *spec.aliases) if name in plan.marks]
        marks = next((plan.marks[name] for name in alike), None)
        if marks is None or not spec.trainable or not (marks.hooks or marks.late_hooks):
            continue
        if step.splits_backward:
            raise LayoutError(
                f"{spec.name} has hooks on its gradient, and schedule={step.layout.schedule} computes gradients of weights "
                "apart from autograd: schedule=1f1b works"
            )
        whole = plan.materialize(alike[0], mesh.device, torch.float64)
        valued = with_values(alike[0], marks, lambda name: plan.materialize(name, mesh.device))
        function = gradient_function(valued, whole)
        with FirstRead((name, weight) for name, held in plan.given.items() if (weight := held()) is not None) as read:
            drawn = _check_linear(spec.name, function, whole)
        if read.name:
            raise ModelError(
                f"a hook on the gradient of {spec.name} reads {read.name} of the model instance that was given, and a run trains "
                "parameters of its own: the hook would see the first values in every step; a build function that registers it, in "
                "place of the instance, works"
            )
        part = placement.local_part(whole, spec, step.holding(spec), mesh)
        if part.shape != whole.shape:
            function = gradient_function(valued, part)
            _check_part(spec.name, function, drawn, lambda t: placement.local_part(t, spec, step.holding(spec), mesh))  # noqa: B023
        found[spec.name] = function
    return found


_ALLOWED, _SCALES = 1e-6, (1.0, 1e-4, 1e4)
"""The largest relative difference of sums, which hooks may compute in float32, and the sizes of the gradients."""


def _check_linear(name: str, function: Callable[[Tensor], Tensor], value: Tensor) -> tuple[Tensor, Tensor]:
    """Return a random gradient and the hooks' result for it, once the hooks are shown to be linear.

    Raises:
        ModelError: they are not, change the weight, or fail.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(value.shape, dtype=torch.float64, generator=generator).to(value.device)
    before = value.clone()
    state = torch.get_rng_state()

    def changed(gradients: list[Tensor | None]) -> list[Tensor | None]:
        return [None if one is None else function(one.clone()) for one in gradients]

    try:
        with torch.no_grad():
            found = function(drawn)
            outcome = compare_sums_of(changed, [drawn], [None], _ALLOWED, generator, _SCALES)
    except Exception as error:
        raise _failing(name, error) from error
    if not torch.equal(before, value):
        raise ModelError(f"a hook on the gradient of {name} changes the weight itself: an optimizer function can do so")
    if outcome != "same" or not torch.equal(state, torch.get_rng_state()):
        raise ModelError(
            f"a hook on the gradient of {name} is not linear, and gradients are added up over micro-batches and ranks after "
            "it, where a plain loop gives it their sum: a factor or a mask works, and so does clip_norm in the job, or a change "
            "of the gradient in the optimizer's step"
        )
    return drawn, found


def _failing(name: str, error: Exception) -> ModelError:
    return ModelError(
        f"a hook on the gradient of {name} fails on a gradient of its shape ({type(error).__name__}: {first_line(error)}): "
        "tensors that it needs can be buffers of the module"
    )


_ALL = -1
"""The key of the numbers of all hooks among those that are judged."""


def _dividing_words(program: Program) -> tuple[str, str, bool]:
    """Return the word under which weights are gathered, that by which a forward sees a part of the batch, and whether weights are cut."""
    layout = program.step.layout
    word = f"zero={layout.zero}" if layout.gathers_weights else ""
    divides = forward_state.splits(layout, program.step.num_microbatches)
    return word, divides, any(degree > 1 for degree in layout.weight_axes.values())


def may_refuse(program: Program) -> bool:
    """Return whether a hook that is registered later may be refused: not where one forward takes the batch and weights are whole."""
    return any(_dividing_words(program))


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
    for name, param in params if may_refuse(program) else ():
        hooks = {id(hook): hook for kind in gradient_hooks_of(param) for hook in kind.values()}  # those of samestep too
        if hooks.keys() <= judged.keys():
            continue
        if reason := _refusal_of(name, param, program):
            return reason
        judged.update(hooks)
    judged[_ALL] = present
    return ""


def _refusal_of(name: str, param: nn.Parameter, program: Program) -> str:
    """Return why the hooks of a parameter are refused where a rank holds a part of it, or sees a part of the batch; else empty."""
    marks = _own_hooks(param)
    if not marks.hooks and not marks.late_hooks:
        return ""
    word, divides, is_cut = _dividing_words(program)
    if word:
        return (
            f"a hook was registered on the gradient of {name} in run.model, and under {word} the gradient is that of a gathered "
            "weight, which the hook does not see: a hook that the build function registers works, and so does zero=1"
        )
    value = param.detach()
    function = gradient_function(marks, value)
    try:
        if divides:
            _check_linear(name, function, value)
        is_apart = not is_cut or _is_by_elements(function, value)
    except ModelError as error:
        return str(error)
    except Exception as error:  # of the user's own code, which may raise anything
        return str(_failing(name, error))
    if not is_apart:
        return (
            f"a hook on the gradient of {name} does not treat every element alike, and a rank may hold a part of the weight: "
            "tp=1 (and ep=1) works"
        )
    return ""


def _is_by_elements(function: Callable[[Tensor], Tensor], value: Tensor) -> bool:
    """Return whether the hooks' result for half of a gradient's elements is independent of the other half."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value) for _ in range(2))
    kept = (torch.arange(value.numel(), device=value.device) % 2).view(value.shape).bool()
    with torch.no_grad():
        results = [function(gradient) for gradient in (one, torch.where(kept, one, other))]
    return torch.allclose(results[0][kept], results[1][kept], rtol=_ALLOWED, atol=1e-9)


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
            f"a hook on the gradient of {name} does not treat every element alike, and a tensor cut leaves it a part of the "
            "gradient: tp=1 (and ep=1) works"
        )


def attributes_of(marks: Mapping[str, ParameterMarks]) -> dict[str, dict[str, object]]:
    """Return the Python attributes of the parameters that have any."""
    return {name: mark.attributes for name, mark in marks.items() if mark.attributes}
