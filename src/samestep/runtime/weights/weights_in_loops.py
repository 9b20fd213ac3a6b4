"""The weights of a run in its loop, between two steps: where a rank has a part, an operation on several elements is refused.

    one.mul_(0.9)    average.lerp_(one, 0.1)    one.clamp_(-1, 1)       each element by itself: as on one device
    one.numel()                                                         of the whole weight, as on one device
    one.norm()       one.kthvalue(k)            nn.init.normal_(one)    of the part alone: refused, and in `run.gathered()` right
    one.grad.norm()                                                     refused too where a rank has a part of the gradient

Between `run.backward` and `run.update`, `one.grad` is the gradient of `run.gradients()`, so that code of torch clips it as in a plain loop.

Such a weight has another class while the loop has it, and so has what the loop makes of it. Within a step, and in the forward of a
module of the run, it is the parameter that it was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samestep.building.over_samples import IGNORING
from samestep.errors import LayoutError
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.runtime.axes.loop_calls import Asker, asker, name_of
from samestep.runtime.axes.tensor import whole_logits
from samestep.runtime.weights.placement import Placements
from samestep.trees import operands, tree_map_only

_BY_ELEMENTS = """
add sub subtract rsub mul multiply div divide true_divide rdiv floor_divide remainder fmod pow rpow float_power square sqrt rsqrt
reciprocal neg negative positive abs absolute sign sgn exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh
sigmoid erf relu round floor ceil trunc frac clamp clamp_min clamp_max clip maximum minimum fmax fmin where lerp addcmul addcdiv
nan_to_num isnan isinf isfinite isneginf isposinf eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and
logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not and or xor invert copysign hypot heaviside threshold
hardtanh masked_fill fill constant zero zeros ones copy detach clone contiguous to type type_as float double half bfloat16 int long bool
cpu cuda zeros_like ones_like full_like empty_like requires_grad iadd isub imul idiv itruediv radd rmul rtruediv truediv pos
view view_as reshape reshape_as flatten ravel unflatten t transpose swapaxes swapdims permute movedim unsqueeze squeeze expand expand_as
data T mT H mH real imag
"""
"""Names, without underscores at either end, of operations that compute each element of a result from elements at the same place."""
_NO_VALUES = """
size stride dim ndimension numel nelement element_size data_ptr storage_offset is_contiguous is_floating_point is_complex get_device
is_same_size is_set_to is_pinned is_shared hash len register_hook register_post_accumulate_grad_hook retain_grad untyped_storage dtype
device shape ndim layout is_leaf requires_grad grad_fn is_meta is_cuda is_cpu names output_nr itemsize nbytes is_sparse is_quantized
is_nested version backward_hooks base name is_view
"""
"""Names of what is asked of a tensor that gives none of its values."""
_COUNTS = frozenset(("numel", "nelement"))
"""Those of them that a log of a model's size adds up: of a weight they are those of the whole one."""
_NAMES_BY_ELEMENTS, _NAMES_WITHOUT_VALUES = frozenset(_BY_ELEMENTS.split()), frozenset(_NO_VALUES.split())


@dataclass(slots=True)
class Waiting:
    """The gradients that wait for an update, when the tensors in `grad` have those of the samples of one rank, and of one backward."""

    gradients: Callable[[], Mapping[str, Tensor]] | None = None
    """Returns those of whole weights by name, which the loop may change in place; None if none wait. Collective as `run.gradients`."""

    def of(self, name: str) -> Tensor | None:
        """Return the gradient of a weight of any stage; None if it has none, or is of a stage whose gradients this rank does not know."""
        return None if self.gradients is None else self.gradients().get(name)

    def replace(self, name: str, value: Any) -> bool:
        """Write what a loop puts into the place of a gradient into it; return whether it fits there."""
        gradient = self.of(name)
        if gradient is None or type(value) is not type(gradient) or value.shape != gradient.shape:
            return False
        if value is not gradient:
            gradient.copy_(value.detach())
        return True


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Facts of a weight of which a rank has a part, or a part of the gradient."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole weight."""
    cut: str
    """The words of the layout that cut it; empty where this rank has all of it."""
    reduced: str
    """The words of the layout for which `param.grad` is not the gradient behind a step; empty if it is."""
    waiting: Waiting
    modules: Mapping[int, str]
    """The modules of the run's model by identity, with their paths."""
    may_call: Callable[[str], bool]
    """Whether what the module at a path returns is whole, so that the loop may call it."""

    @property
    def divided(self) -> str:
        """When `param.grad` is not the whole gradient of a rank's part of the weight; empty if it is now."""
        if self.waiting.gradients is not None:
            return "between run.backward and run.update"
        return self.reduced and f"under {self.reduced}"

    def refusal(self, what: str, shape: Iterable[int], *, is_gradient: bool) -> LayoutError:
        """Return the error of an operation on the weight, on its gradient, or on a tensor that a loop has computed from one."""
        if is_gradient:
            return LayoutError(
                "weights-not-whole",
                f"{what} of the gradient of {self.name} needs the full gradient, but {self.divided or f'under {self.cut}'} a rank has a shard. "
                "Use run.gradients() between run.backward and run.update. For the norm, use report.grad_norm, or optimizer.clip_norm of the job",
            )
        return LayoutError(
            "weights-not-whole",
            f"{what} of {self.name} {[*self.shape]} needs the full weight, but under {self.cut} a rank has a shard {[*shape]}, which allows elementwise "
            "operations only. Use run.state_dict() on every rank, or `with run.gathered() as model:`. Both have the full weights",
        )


class _Asked:
    """A weight of which a rank has a part, or a tensor that a loop has computed from one, which answers each operation on it."""

    part_facts: PartFacts
    of_gradient: ClassVar[bool] = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Carry out an operation that computes each element by itself, or gives no values, or is called by a forward or by samestep.

        Raises:
            LayoutError: it is another one.
        """
        kwargs = kwargs or {}
        first = next(operand for operand in operands(*args, *kwargs.values()) if isinstance(operand, _Asked))
        name = name_of(func)
        if name in _COUNTS and isinstance(first, nn.Parameter) and not _is_asked_by_run(first.part_facts):
            return math.prod(first.part_facts.shape)
        if name in _NAMES_WITHOUT_VALUES or _is_asked_by_run(first.part_facts):
            return _plainly(func, args, kwargs)
        if name == "grad" and func.__name__ != "__get__":
            is_written = func.__name__ == "__set__" and first.part_facts.waiting.replace(first.part_facts.name, args[1])
            return None if is_written else _plainly(func, args, kwargs)
        if name == "grad":
            return _gradient_of(args[0], _plainly(func, args, kwargs))
        if name == "repr":
            return f"this rank's part of {first.part_facts.name}: {_plainly(func, args, kwargs)}"
        return _by_elements(first, name, func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy: of a part a part, and of a whole weight a plain parameter."""
        assert isinstance(self, Tensor)
        copied = self.detach().clone()
        copied = copied.requires_grad_(self.requires_grad) if isinstance(copied, _Asked) else _plain_parameter(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be written into a file, as by `torch.save`, from which a rank would read the part of another one.

        Raises:
            LayoutError: it is a part.
        """
        assert isinstance(self, Tensor)
        if self.part_facts.cut or self.of_gradient:
            raise _refused(self, "a file")
        return _plain_parameter(self).__reduce_ex__(protocol)


def _plain_parameter(weight: Tensor) -> nn.Parameter:
    """Return a copy of a whole weight that nothing is said of."""
    return nn.Parameter(weight.detach().clone(), weight.requires_grad)


class PartWeight(_Asked, nn.Parameter):
    """A weight of which this rank has a part, or a part of the gradient, while the loop has it."""


class PartTensor(_Asked, Tensor):
    """A tensor that a loop has computed from parts of weights."""


class PartGradient(_Asked, Tensor):
    """A gradient in `param.grad` of which a rank has a part, or a tensor that a loop has computed from one."""

    of_gradient: ClassVar[bool] = True


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out an operation as if its operands were plain tensors."""
    return Tensor.__torch_function__(func, (), args, kwargs)


def _by_elements(first: Any, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Carry out an operation that computes each element by itself; what it makes is a part too.

    Raises:
        LayoutError: it is another one, or mixes a part with a tensor of the loop's own, of which nobody knows what it is a part of.
    """
    tensors = [tensor for tensor in operands(*args, *kwargs.values()) if isinstance(tensor, Tensor)]
    asked = [tensor for tensor in tensors if isinstance(tensor, _Asked)]
    of_gradient = any(tensor.of_gradient for tensor in asked)
    if (
        not any(tensor.part_facts.cut for tensor in asked) and not of_gradient
    ):  # whole weights, of which gradients alone are parts
        return _plainly(func, args, kwargs)
    if name not in _NAMES_BY_ELEMENTS or _writes_divided(func, args, asked):
        raise _refused(next((tensor for tensor in asked if tensor.of_gradient or tensor.part_facts.cut), first), name)
    if any(not isinstance(tensor, _Asked) and tensor.numel() > 1 for tensor in tensors):
        raise _refused(first, f"{name} with a tensor of the loop's own")
    kind = PartGradient if of_gradient else PartTensor
    try:
        result = _plainly(func, args, kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        raise _refused(first, name) from error
    return tree_map_only(
        Tensor, lambda tensor: tensor if isinstance(tensor, _Asked) else _marked(tensor, kind, first.part_facts), result
    )


def _writes_divided(func: Any, args: tuple[Any, ...], asked: Iterable[Any]) -> bool:
    """Return whether an operation writes a value into a weight that was computed from a part of a gradient."""
    is_write = func.__name__ == "__set__" or (func.__name__.endswith("_") and not func.__name__.endswith("__"))
    written = next(iter(operands(*args[:1])), None)
    into_weight = (is_write or func.__name__.startswith("__i")) and not getattr(written, "of_gradient", False)
    return into_weight and any(tensor.of_gradient and tensor.part_facts.divided for tensor in asked)


def _marked(tensor: Tensor, kind: type[PartTensor | PartGradient], facts: PartFacts) -> Tensor:
    """Return a tensor as one that a loop has computed from a weight."""
    if type(tensor) is Tensor:
        tensor = tensor.as_subclass(kind)
    else:  # a DTensor
        tensor.__class__ = _part_class(type(tensor), kind)
    tensor.part_facts = facts  # type: ignore[attr-defined]
    return tensor


@functools.cache
def _part_class(base: type[Tensor], kind: type[_Asked]) -> type[Tensor]:
    """Return the class of a sharded weight, or of a tensor computed from one, while the loop has it."""
    return type(f"{kind.__name__}Of{base.__name__}", (_Asked, base), {"__slots__": (), "of_gradient": kind.of_gradient})


def _is_asked_by_run(facts: PartFacts) -> bool:
    """Return whether the code of samestep asks, or the forward of a module of the run.

    Raises:
        LayoutError: the loop calls a module whose outputs are parts.
    """
    who, path = asker(facts.modules)
    if who is Asker.MODULE and facts.cut and not facts.may_call(path):
        raise LayoutError(
            "weights-not-whole",
            f"{path} was called by the loop itself, and under {facts.cut} it computes a part of its result. Use the forward of run.model "
            "and run.outputs, or a copy of it that is made within `with run.gathered() as model:`",
        )
    return who is not Asker.LOOP


def _refused(asked: Any, what: str) -> LayoutError:
    shape = _plainly(Tensor.size, (asked,), {})
    facts: PartFacts = asked.part_facts
    return facts.refusal(what, shape, is_gradient=asked.of_gradient)


def _gradient_of(weight: Any, gradient: Tensor | None) -> Tensor | None:
    """Return what a loop is given as `param.grad`."""
    facts: PartFacts = weight.part_facts
    if facts.waiting.gradients is not None:
        gradient = facts.waiting.of(facts.name)
        if gradient is None or tuple(gradient.shape) == facts.shape:
            return gradient
    if gradient is None or isinstance(gradient, _Asked):
        return gradient
    return _marked(gradient.detach(), PartGradient, weight.part_facts)


# -- the weights of a run --------------------------------------------------------------------------


@dataclass(slots=True)
class _Lent:
    """A weight whose class is another one while the loop has it."""

    param: nn.Parameter
    facts: PartFacts
    own: type[Tensor]
    in_loop: type[Tensor]


def _take(weights: Iterable[_Lent]) -> None:
    """Make some weights what they were, also for files."""
    for lent in weights:
        lent.param.__class__ = lent.own  # type: ignore[assignment]
        lent.param.__dict__.pop("part_facts", None)


class WeightsInLoops:
    """The weights of one model of which this rank has a part, or a part of the gradient; none in plain layouts."""

    @classmethod
    def of(cls, module: nn.Module, program: Program, placements: Placements) -> WeightsInLoops:
        """Return those of a filled module, which the loop is given."""
        return cls(
            module,
            facts_of(module, program, placements),
            functools.partial(whole_logits, program=program, mesh=placements.mesh),
        )

    def __init__(self, module: nn.Module, facts: Mapping[str, PartFacts], whole: Callable[[Any], Any]) -> None:
        """Mark the weights that have `facts`; `whole` makes outputs of the model that are cut whole ones."""
        self._lent: list[_Lent] = []
        self._waiting: list[_Lent] = []
        """The other weights, which are lent too while gradients wait."""
        self._waits = next((fact.waiting for fact in facts.values()), Waiting())
        self._whole, self._entered = whole, 0
        for name, param in module.named_parameters():
            if param.is_meta:  # of another stage
                vars(param)["waiting"] = self._waits
            elif name in facts:
                kind: type[Tensor] = type(param)
                in_loop = PartWeight if kind is nn.Parameter else _part_class(kind, PartTensor)
                is_part = facts[name].cut or facts[name].reduced
                (self._lent if is_part else self._waiting).append(_Lent(param, facts[name], kind, in_loop))
        self.lend()
        if any(fact.cut for fact in facts.values()):
            self._refuse_whole_states(module)
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward, always_call=True)

    def __bool__(self) -> bool:
        return bool(self._lent) or self._waits.gradients is not None

    def take(self) -> None:
        """Make these weights what they were before a loop had them."""
        self._entered += 1
        if self._entered == 1:
            _take(self._now_lent)

    def lend(self) -> None:
        """Give these weights to the loop, unless something else has taken them too."""
        self._entered = max(self._entered - 1, 0)
        for lent in () if self._entered else self._now_lent:
            lent.param.__class__ = lent.in_loop  # type: ignore[assignment]
            lent.param.__dict__["part_facts"] = lent.facts

    def wait(self, gradients: Callable[[], Mapping[str, Tensor]] | None) -> None:
        """Note what returns the gradients that wait from now on; None if none do."""
        changes = (gradients is None) != (self._waits.gradients is None)
        if changes:
            self._entered += 1
            _take(self._waiting)
        self._waits.gradients = gradients
        if changes:
            self.lend()

    @property
    def _now_lent(self) -> list[_Lent]:
        return [*self._lent, *self._waiting] if self._waits.gradients is not None else self._lent

    def _refuse_whole_states(self, module: nn.Module) -> None:
        """Let `load_state_dict` of the modules whose weights are cut refuse whole weights by name, which torch calls a mismatch."""
        cut = {lent.facts.name: lent for lent in self._lent if lent.facts.cut}
        for path, owner in module.named_modules():
            names = {leaf: f"{path}.{leaf}" if path else leaf for leaf in owner._parameters}
            if lents := {leaf: cut[name] for leaf, name in names.items() if name in cut}:
                owner.register_load_state_dict_pre_hook(functools.partial(_refuse_whole, lents))

    def _before_forward(self, *_: Any) -> None:
        self.take()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return whole outputs where the loop itself has called the model."""
        self.lend()
        return self._whole(output) if not self._entered and output is not None else None


def _refuse_whole(
    lents: Mapping[str, _Lent], module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    """Refuse a state with whole weights for a module that has parts of them.

    Raises:
        LayoutError: it has one.
    """
    for leaf, lent in lents.items():
        tensor = state.get(prefix + leaf)
        is_whole = isinstance(tensor, Tensor) and tuple(tensor.shape) == lent.facts.shape
        if is_whole and module._parameters[leaf] is lent.param:
            raise LayoutError(
                "load-weights-whole",
                f"run.model.load_state_dict was given the whole {lent.facts.name} {[*lent.facts.shape]}, and under {lent.facts.cut} a rank "
                "has a part. Use run.load_state_dict(state), or the same call within `with run.gathered() as model:`",
            )


def facts_of(module: nn.Module, program: Program, placements: Placements) -> dict[str, PartFacts]:
    """Return what is said of the weights of which this rank has a part, or at times a part of the gradient, by name."""
    step, facts, waiting = program.step, dict[str, PartFacts](), Waiting()
    modules = {id(part): path for path, part in module.named_modules()}
    may_call = functools.partial(_returns_whole, program)
    for name, part in placements.parts.items():
        holding, spec = placements.holding(name), placements.whole[name]
        words = (f"{axis}={getattr(step.layout, axis)}" for axis in holding.sharded_over)
        cut = " ".join(words) if part.shape != spec.shape else ""
        reduced = f"zero={step.zero}" if step.zero < 2 and holding.num_shards > 1 and spec.trainable else ""
        if cut or spec.trainable:
            facts[name] = PartFacts(name, tuple(spec.shape), cut, reduced, waiting, modules, may_call)
    return facts


def _returns_whole(program: Program, path: str) -> bool:
    """Return whether what the module at a path returns is whole, as far as blocks tell."""
    step = program.step
    if path == ".":
        return True
    layers, head = step.model.layers, step.model.layers[-1].head
    if step.layout.sequence_parallel or (step.cuts_loss and head is not None and is_below(head.owner, path)):
        return False
    return any(is_below(name, path) for layer in layers if layer.is_block for name in layer.modules)


@contextmanager
def computing(
    in_loops: WeightsInLoops | None, kernels: Callable[[], AbstractContextManager[None]] | None
) -> Iterator[None]:
    """Let a run compute inside, with weights that no loop has meanwhile; what is no part of a step leaves no trace."""
    if in_loops is not None:
        in_loops.take()
    try:
        with IGNORING, kernels() if kernels else nullcontext():
            yield
    finally:
        if in_loops is not None:
            in_loops.lend()
