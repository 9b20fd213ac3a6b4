"""Taped initialisation: each tensor's initial value is a function of (seed, its full name), whatever the layout.

The model is built on the meta device, where nothing has values, while a tape (`building/tape.py`) records which
operations wrote which memory. To make one tensor is to replay the entries from which its memory descends, and no
others:

    materialize("a.weight") = normal_ seeded by (seed, "a.weight", 0)
    materialize("b.weight") = uniform_ seeded by (seed, "b.weight", 0), the same normal_ again, and mul_

A random entry is keyed by the first name that descends from it, so all tensors that descend from it get the same
numbers. The idea of recording and replaying an initialisation is that of torchdistX's deferred_init (Meta, 2022); the
keys by name, and so the equality between layouts, are ours.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from samestep.building import drawn_rows
from samestep.building.model_changes import format_of, packed_weights
from samestep.building.module_copies import deep_copy, tensors_in_functions
from samestep.building.named_tensors import (
    NamedTensor,
    join_name,
    map_attributes,
    tensors_of,
    unwrapped_name,
    unwrapped_prefixes,
)
from samestep.building.outside_reads import stale
from samestep.building.owned_model import OwnedModel, PlainForm
from samestep.building.parameter_marks import TAKEN, ParameterMarks, take_marks, tensors_of_hooks
from samestep.building.pretrained import PretrainedModel
from samestep.building.replay import Ref, Slice, replay
from samestep.building.stored_weights import StoredWeights, parts_of
from samestep.building.surface import process_randomness, surface, whole_truncated_normal
from samestep.building.tape import WAY_OUT, Tape, contiguous
from samestep.errors import JobError, ModelError, did_you_mean


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model on the meta device, and the tape that computes the first value of each of its tensors.

    Every parameter, buffer and other tensor attribute of `module` is on meta. `canonical` maps every name of a tensor
    to its first one: a tied parameter has several names, and so has a module that is used twice.
    """

    module: nn.Module
    seed: int
    canonical: dict[str, str]
    drawn: frozenset[str]
    """First names of the tensors whose values are drawn, as functions of (seed, name); the others are constants."""
    _tape: Tape = field(repr=False)
    _refs: dict[str, Ref] = field(repr=False)
    _slices: dict[int, Slice] = field(repr=False)
    _keys: dict[int, int] = field(repr=False)
    _parameters: tuple[str, ...] = field(repr=False)
    plain: PlainForm = field(repr=False)
    """The form of the module before a layout changes it."""
    marks: Mapping[str, ParameterMarks] = field(default_factory=dict, repr=False)
    """Attributes and hooks of parameters, by name."""
    constants: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Values from a plain call, by first name, of constants that the tape does not make."""
    waived: tuple[str, ...] = ()
    """Refusals of values that the job waives."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """The format of each weight whose values are rounded to it (`building/model_changes.py`), by name."""
    given: Mapping[str, weakref.ref[Tensor]] = field(default_factory=dict, repr=False)
    """The parameters that existed before the build: all of an instance's, and those that a build function took from
    elsewhere."""
    is_taken: bool = False
    """Whether the module is the instance itself, and not a copy of it."""
    others: tuple[tuple[str, weakref.ref[Tensor]], ...] = field(default=(), repr=False)
    """The parameters of other modules that the build function has returned, by name."""
    stored: StoredWeights | None = field(default=None, repr=False)
    """Values that are read from a folder; the tape computes those that it lacks."""

    def state_names(self) -> dict[str, str]:
        """Return the first name of what each tensor in the module's `state_dict` is: tied weights have several names."""
        tensors = self.module.state_dict(keep_vars=True)
        return {name: self.canonical.get(name, name) for name, value in tensors.items() if isinstance(value, Tensor)}

    def is_stored(self, name: str) -> bool:
        """Return whether a folder has the values of a tensor."""
        return self.stored is not None and self.stored.holds(name)

    def makes_parts(self, name: str) -> bool:
        """Return whether intervals of a tensor, along any dimension, are computed without the rest of it in memory."""
        is_read = self.stored is not None and self.is_stored(name) and self.stored.reads_parts(name)
        return is_read and name not in self.rounded

    def is_unmade(self, name: str) -> bool:
        """Return whether nothing on the tape gives a tensor its values."""
        ref = self._refs[name]
        if self.canonical[name] in self.constants or self.is_stored(name):
            return False
        return self._tape.is_unwritten(ref) or self._tape.is_foreign(self._slices[ref.memory])

    def no_values(self, name: str, hindrance: str) -> str:
        """Return the refusal of a tensor that has no values; `hindrance` says why plain calls do not give them."""
        if self._tape.is_foreign(self._slices[self._refs[name].memory]):
            return f"{name} was made on the meta device outside the build function, so it has no values"
        return f"{name} is never given values, as far as the tape shows, and {hindrance}: fill it where it is made"

    def materialize(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype | None = None,
        rows: Sequence[tuple[int, int]] | None = None,
        dim: int = 0,
    ) -> Tensor:
        """Return the tensor `name`, or intervals of its rows: detached, contiguous, in newly allocated memory.

        Rows of a stack of weights are made without the others (`building/drawn_rows.py`), and so is the whole stack; of a
        tensor that a folder stores as it is only the rows are read. `dim` is the dimension of the intervals, if not the
        rows. Bits are equal on every rank (per device type), in whatever order and number tensors are made; the process's
        random state does not change. `dtype` casts values that were drawn in the model's own dtype.

        Raises:
            ModelError: the model has no such tensor, or it has no values.
        """
        ref = self._refs.get(name)
        if ref is None:
            raise ModelError("weight-unknown", f"the model has no tensor {name!r}{did_you_mean(name, self._refs)}")
        if name in self.rounded:
            unrounded = replace(self, rounded={}).materialize(name, device, torch.float32)
            return parts_of(format_of(self.rounded[name]).round_weight(unrounded), rows, dim).to(dtype or ref.dtype)
        constant = self.constants.get(self.canonical[name])
        part = self._slices[ref.memory]
        where = torch.device(device)
        if self.stored is not None and self.is_stored(name):
            if self.stored.resized(name) is not None:
                return parts_of(self._resized(name, dtype or ref.dtype), rows, dim).to(where)
            return self.stored.read(name, dtype or ref.dtype, rows, dim).to(where)
        if constant is not None:
            return parts_of(constant, rows, dim).to(where, dtype or constant.dtype, copy=True)
        if drawn_rows.are_drawn(self._tape, part, ref) and dim == 0:
            intervals = rows if rows is not None else [(0, ref.size[0])]
            tensor = drawn_rows.draw(self._tape, part, ref, where, self._keys, intervals)
        else:
            tensor = parts_of(replay(self._tape, part, ref, where, self._keys), rows, dim)
        return tensor if dtype is None else tensor.to(dtype)

    def _resized(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor for another number of tokens than the folder's: the folder's entries, then new ones as
        drawn."""
        assert self.stored is not None
        dim, known = self.stored.resized(name) or (0, 0)
        read = self.stored.read(name, dtype)
        new = replace(self, stored=None).materialize(name, torch.device("cpu"), dtype)
        return torch.cat([read, new.narrow(dim, known, new.shape[dim] - known)], dim)


Waived = Callable[[str], str]
"""Returns the text of a refusal that the job waives, and raises it otherwise."""


def _refuse(reason: str) -> str:
    raise ModelError("build-not-repeatable", reason)


def blueprint(
    source: Callable[[], nn.Module] | nn.Module, seed: int, waived: Waived = _refuse, owner: OwnedModel | None = None
) -> Blueprint:
    """Build a model on the meta device, and return it with the tape that makes its tensors.

    A build function is taped, and called plainly too where that fits (`building/drawn_rows.py`); of an instance the values are
    kept (not copied: do not train it meanwhile). An `owner` takes the instance itself, which has no values until they are given back;
    otherwise a copy is on the meta device. Values that a build function looks at (`.item()`, `if`, `.numpy()`) are
    computed at once, unless they are random. `waived` takes a refusal of values that are made in no known way.

    Raises:
        JobError: the job's frozen weights or adapters do not fit the model.
        ModelError: the initial values cannot be a function of seed and name; the text names the module or the tensor.
        UnprovenError: a value is made in no known way.
    """
    if isinstance(source, nn.Module):
        return _of(source, Tape(), seed, from_instance=True, plain=owner.take(source) if owner is not None else None)
    plan, failure, build = None, None, source.build if isinstance(source, PretrainedModel) else source
    try:
        plan = _build_on_tape(build, seed)
    except JobError:  # the job does not fit the model that was built
        raise
    except Exception as error:
        failure = error
    if isinstance(source, PretrainedModel):
        plan = _with_stored(source, plan, failure)
    sizes = {id(entry.tensor): entry.tensor.nbytes for entry in tensors_of(plan.module)} if plan else {}
    size_bytes = sum(sizes.values())
    doubtful = plan is None or plan._tape.holds_other_tensors or any(map(plan.is_unmade, plan.canonical.values()))
    calls, hindrance = None, "the model is too large to call it plainly"
    if (doubtful or size_bytes <= drawn_rows.SMALL_BYTES) and drawn_rows.fits(size_bytes):
        try:
            calls = drawn_rows.call_twice(build, seed)
        except Exception as error:
            hindrance = f"the build function cannot be called plainly: {error}"
    if plan is None or (calls and drawn_rows.other_form(plan.module, calls.module)):
        if isinstance(source, PretrainedModel):
            raise ModelError(
                "build-not-repeatable", f"{source.folder}: its class makes another model on the meta device: {WAY_OUT}"
            )
        return _from_calls(calls, failure, seed)
    return _fill_in_constants(plan, calls, hindrance, waived)


def _with_stored(source: PretrainedModel, plan: Blueprint | None, failure: Exception | None) -> Blueprint:
    """Return the blueprint of a folder's model: values are read where the folder has them.

    Raises:
        ModelError: the model cannot be built, or the folder's tensors do not fit it.
    """
    if plan is None:
        assert failure is not None
        raise failure
    stored = source.stored(plan.module, plan.canonical)
    drawn = frozenset(name for name in plan.drawn if not stored.holds(name) or stored.resized(name) is not None)
    return replace(plan, stored=stored, drawn=drawn)


def _build_on_tape(source: Callable[[], nn.Module], seed: int) -> Blueprint:
    """Call the build function on the meta device, under a tape."""
    tape = Tape()
    with process_randomness(seed), whole_truncated_normal(tape), tape, surface(tape), torch.device("cpu"):
        try:
            module = source()
        except RuntimeError as error:
            if "meta tensor" not in str(error):
                raise
            reason = f"the build function looks at values that do not exist yet ({error}): {WAY_OUT}"
            raise ModelError("build-function", reason) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            "build-function", f"the build function returned a {type(module).__name__}; it must return an nn.Module"
        )
    return _of(module, tape, seed, from_instance=False)


def _of(source: nn.Module, tape: Tape, seed: int, *, from_instance: bool, plain: PlainForm | None = None) -> Blueprint:
    """Return the blueprint of a module that was built on a tape, or of an instance, whose present values are kept: of itself if its `plain` form is known,
    otherwise of a copy.

    Raises:
        ModelError: a function holds a parameter, or a tensor that has no values on a rank, or the module cannot be copied.
    """
    name_of_parameter, tensor = tensors_in_functions(source)
    if name_of_parameter:
        raise ModelError(
            "build-not-repeatable",
            f"a function that the model holds has {name_of_parameter} itself in a variable around it, and each rank has a parameter of its own. Use "
            "a function that reads the parameter from its module (self.…)",
        )
    if tensor is not None:
        raise ModelError(
            "build-not-repeatable",
            f"a function that the model holds has a tensor of shape {[*tensor.shape]} in a variable around it, so a rank has no values of it. "
            "Use a buffer that the function reads from its module (self.…)",
        )
    marks = take_marks(source, takes=plain is not None)
    originals: dict[str, weakref.ref[Tensor]] = {
        name: weakref.ref(param) for name, param in source.named_parameters() if not param.is_meta
    }
    module = _on_meta(source, tape, from_instance, plain)
    attributes = list(tensors_of(module))
    attributes += [
        NamedTensor(key, "hook", tensor)
        for name, mark in marks.items()
        for key, tensor in tensors_of_hooks(name, mark).items()
    ]
    refs = {attribute.name: tape.ref(attribute.tensor) for attribute in attributes}
    slices = {ref.memory: tape.slice(ref.memory) for ref in refs.values()}
    parameters = [attribute for attribute in attributes if attribute.kind == "parameter"]
    _check_parameters(parameters, refs)
    first: dict[tuple[int, Ref], str] = {}
    canonical = {p.name: first.setdefault((id(p.tensor), refs[p.name]), p.name) for p in attributes}
    prefixes = unwrapped_prefixes(module)
    named = [(unwrapped_name(name, prefixes), slices[refs[name].memory]) for name in canonical]
    keys = tape.random_keys(seed, named)
    drawn = {
        name for name in canonical.values() if any(tape.entries[e].random for e in slices[refs[name].memory].entries)
    }
    return Blueprint(
        module,
        seed,
        canonical,
        frozenset(drawn),
        tape,
        refs,
        slices,
        keys,
        tuple(p.name for p in parameters),
        plain or PlainForm(module),
        marks,
        given=originals,
        rounded=packed_weights(module),
        is_taken=plain is not None,
    )


def _from_calls(calls: drawn_rows.PlainCalls | None, failure: Exception | None, seed: int) -> Blueprint:
    """Return the blueprint of a build function that cannot be taped: all its values must be constants.

    Raises:
        ModelError: some are drawn, or the function could not be called plainly either.
    """
    drawn = next((name for name in calls.first if calls.differs(name)), "") if calls else ""
    if calls is None or (failure and drawn):
        assert failure is not None
        raise failure
    if drawn:
        raise ModelError(
            "build-not-repeatable",
            f"the build function makes another model on the meta device, where {drawn} would be a function of seed and "
            f"name: {WAY_OUT}",
        )
    return _of(calls.module, Tape(), seed, from_instance=True)


def _fill_in_constants(
    plan: Blueprint, calls: drawn_rows.PlainCalls | None, hindrance: str, waived: Waived
) -> Blueprint:
    """Return a blueprint that takes from a plain call each constant that the tape does not compute to the bit.

    Raises:
        UnprovenError: a value is made in no known way; `waived` may let it pass.
    """
    constants: dict[str, Tensor] = {}
    refused: list[str] = []
    for name in dict.fromkeys(plan.canonical.values()):
        if plan.is_stored(name):
            continue
        if calls is None or name not in calls.first or name not in calls.second:
            if plan.is_unmade(name):
                refused.append(plan.no_values(name, hindrance))
        elif not calls.differs(name):
            first = calls.first[name]
            if plan.is_unmade(name) and drawn_rows.is_unfilled(first):
                refused.append(f"{name} is never given values (torch.empty): fill it where it is made")
            elif plan.is_unmade(name) or not drawn_rows.same_bits(plan.materialize(name, torch.device("cpu")), first):
                constants[name] = first.clone(memory_format=torch.contiguous_format)
        elif reason := _unlike(plan, calls, name):
            refused.append(reason)
    if refused:
        more = f" (and {len(refused) - 1} more tensors)" if len(refused) > 1 else ""
        refused = [waived(f"{refused[0]}{more}")]
    others = () if calls is None else calls.parameters
    return replace(plan, drawn=plan.drawn - set(constants), constants=constants, waived=tuple(refused), others=others)


def _unlike(plan: Blueprint, calls: drawn_rows.PlainCalls, name: str) -> str:
    """Return why the tape does not draw a tensor that differs between two plain calls; empty if it does."""
    if plan.is_unmade(name):
        return (
            f"{name} differs between two calls of the build function, and no operation on the tape makes it: {WAY_OUT}"
        )
    taped = plan.materialize(name, torch.device("cpu"))
    if name not in plan.drawn:
        if drawn_rows.same_bits(taped, calls.first[name]):
            return ""  # numbers of Python or numpy, from the job's seed
        return (
            f"{name} differs between two calls of the build function, and torch did not draw it (a generator without a "
            f"seed, or something that the function uses up): {WAY_OUT}"
        )
    if drawn_rows.agrees_by_chance(taped, calls, name):
        return ""
    return f"{name} is loaded in part, and the tape draws that part: {WAY_OUT}"


def fill(
    blueprint: Blueprint, value: Callable[[str], Tensor], device: torch.device, float_dtype: torch.dtype | None = None
) -> None:
    """Set every parameter of the module to `value` of its first name, and all other tensors as `fill_rest` does."""
    params: dict[str, nn.Parameter] = {}
    for name, param in list(blueprint.module.named_parameters(remove_duplicate=False)):
        first = blueprint.canonical.get(name, name)
        if first not in params:
            params[first] = nn.Parameter(value(first), param.requires_grad)
        path, _, leaf = name.rpartition(".")
        setattr(blueprint.module.get_submodule(path), leaf, params[first])
    fill_rest(blueprint, device, float_dtype)


def fill_rest(blueprint: Blueprint, device: torch.device, float_dtype: torch.dtype | None = None) -> None:
    """Set every buffer and tensor attribute of the module that is still on meta to its value.

    Parameters are the caller's (set them by `setattr`: an LSTM keeps a second list). Attributes are tensors in a
    module's `__dict__`, also within lists, tuples and dicts there. Two names of one tensor stay one tensor. Floating
    tensors are cast to `float_dtype`, and without one the statistics of norms to float32, in which norms compute. An attribute that is a view of a parameter's memory stays on meta: the parameter
    will move, and use of the stale view must raise an error.

    Raises:
        ModelError: a buffer is a view of a parameter's memory.
    """
    refs = blueprint._refs
    owned: dict[int, list[str]] = {}
    for name in blueprint._parameters:
        owned.setdefault(refs[name].memory, []).append(name)
    tensors: dict[Ref, Tensor] = {}
    present = {id(param) for param in blueprint.module.parameters()}  # those of other stages too, which stay on meta
    first_names = {refs[name]: name for name in reversed(blueprint._parameters)}

    def fill(name: str, tensor: Tensor, is_buffer: bool, dtype: torch.dtype | None = float_dtype) -> Tensor:
        ref = refs.get(name)
        if ref is None and isinstance(tensor, nn.Parameter) and tensor.is_meta and id(tensor) not in present:
            return stale(name, first_names.get(blueprint._tape.ref(tensor), "that the module had"), tensor)
        if ref is None or not tensor.is_meta:
            return tensor
        for parameter in owned.get(ref.memory, ()):
            if refs[parameter].overlaps(ref):
                if is_buffer:
                    raise ModelError(
                        "parameters-share-memory",
                        f"buffer {name} is a view of parameter {parameter}; register a clone of it",
                    )
                return stale(name, parameter, tensor)
        if ref not in tensors:
            tensors[ref] = blueprint.materialize(name, device, dtype if ref.dtype.is_floating_point else None)
        value = tensors[ref]
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

    for prefix, module in blueprint.module.named_modules():
        dtype = float_dtype or (torch.float32 if isinstance(module, _BatchNorm | _InstanceNorm) else None)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = fill(join_name(prefix, key), buffer, True, dtype)
        map_attributes(prefix, module, functools.partial(fill, is_buffer=False))


def _on_meta(module: nn.Module, tape: Tape, from_instance: bool, plain: PlainForm | None) -> nn.Module:
    """Return the module with all tensors on meta: itself if they are, or if it is taken from its `plain` form, else a copy that keeps
    its ties and attributes.

    Raises:
        ModelError: a tensor has no shape or no values, or the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for attribute in tensors_of(module):
        tensor = attribute.tensor
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(
                "model-on-meta",
                f"{attribute.name} has no shape yet (a lazy module): run one forward and pass the instance",
            )
        if tensor.is_meta and from_instance:
            raise ModelError(
                "model-on-meta",
                f"{attribute.name} is on the meta device, so it has no values: pass a build function instead",
            )
        twin = tensor
        if not tensor.is_meta:
            twin = tape.twin(tensor.detach(), copies=False)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, tensor.requires_grad)
            twin.__dict__.update(tensor.__dict__)
            if plain is not None and isinstance(tensor, nn.Parameter):
                twin.__dict__[TAKEN] = tensor
        memo.setdefault(id(tensor), twin)
    if not from_instance and all(attribute.tensor.is_meta for attribute in tensors_of(module)):
        return module
    if plain is not None:
        plain.take(memo)
        return module
    try:
        return deep_copy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            "build-not-repeatable", f"the {type(module).__name__} cannot be copied ({error}): pass a build function"
        ) from error


def _check_parameters(attributes: list[NamedTensor], refs: dict[str, Ref]) -> None:
    """Refuse different parameters in one memory, which would diverge.

    Raises:
        ModelError: there is such a parameter.
    """
    owners: dict[int, list[NamedTensor]] = {}
    for attribute in attributes:
        ref = refs[attribute.name]
        for other in owners.setdefault(ref.memory, []):
            may_share = other.tensor is attribute.tensor or ref.stride != contiguous(ref.size)
            if not may_share and refs[other.name].overlaps(ref):
                raise ModelError(
                    "parameters-share-memory",
                    f"{other.name} and {attribute.name} are two parameters in one memory; to tie them, assign one "
                    "nn.Parameter to both names",
                )
        owners[ref.memory].append(attribute)
