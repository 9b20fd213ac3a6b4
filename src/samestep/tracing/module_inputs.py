"""The inputs of modules at which a traced forward looks: what embeddings look up, weights in whose place code put others, and what calls
are given and return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from samestep.building.families import name_of_hidden
from samestep.building.torch_seams import autograd_sequence_number
from samestep.tracing.checkpointed import Point, TracedPlaces
from samestep.tracing.flow import makes_event
from samestep.tracing.meta_tensors import KnownValues, is_whole
from samestep.trees import tree_leaves

LookedUp = Literal["tokens", "positions"]


class ModuleInputs:
    """The inputs of modules besides activations: indices of embeddings, and weights that code has put in place of others."""

    def __init__(self, module: nn.Module, key: Callable[[Tensor], int]) -> None:
        self._key = key
        self.embeds: dict[str, LookedUp] = {}
        """What each embedding looks up, tokens or positions, by its path; only where it is known."""
        self.of_sample: dict[int, LookedUp] = {}
        """What the tensors of a sample are to an embedding, by their storages."""
        self.replaced: set[str] = set()
        """Weights in whose place a top-most module had another tensor when it was entered."""
        owners = {id(part): part._parameters for part in module.modules() if part._parameters}
        self._weights = {part: {leaf: id(param) for leaf, param in params.items()} for part, params in owners.items()}
        """The weights of each module as identities: a trace may live longer than the model."""

    def note_indices(self, path: str, indices: Tensor | None, values: KnownValues) -> None:
        """Note an embedding's input: tokens that a sample holds, or numbers that count on from one to the next."""
        if indices is None or not is_whole(indices):
            return
        counts_on = indices.dim() > 0 and indices.shape[-1] > 1 and values.knows(indices)
        if self._key(indices) in self.of_sample:
            self.embeds[path] = self.of_sample[self._key(indices)]
        elif counts_on and bool((values.of(indices).diff(dim=-1) == 1).all()):
            self.embeds[path] = "positions"

    def note_weights(self, path: str, part: nn.Module) -> None:
        """Note the weights of a module for which `torch.func.functional_call`, or code like it, has put others."""
        for name, inner in part.named_modules(prefix=path):
            for leaf, identity in self._weights.get(id(inner), {}).items():
                if id(inner._parameters.get(leaf)) != identity:
                    self.replaced.add(f"{name}.{leaf}".lstrip("."))


Shapes = list[tuple[int, tuple[int, ...]]]
"""Storage and shape of each tensor among some values."""


class SeenTensor(NamedTuple):
    """The first tensor that a module is given, or returns."""

    number: int
    """The same for one object and for no other of the forward."""
    storage: int
    shape: torch.Size
    takes_gradient: bool
    state: tuple[int, bool]
    """`state_of` it."""


def state_of(tensor: Tensor) -> tuple[int, bool]:
    """Return what must be the same for one move of a tensor to serve two modules: how often the tensor was written, and
    whether autograd records.
    """
    return tensor._version, torch.is_grad_enabled()


def first_input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first tensor that a module is given."""
    value = args[0] if args else kwargs[name_of_hidden(kwargs)] if kwargs else None
    return value if isinstance(value, Tensor) else None


def first_of(output: Any) -> Tensor | None:
    """Return the first tensor that a module returns."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None


def with_given(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's arguments with its first tensor changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = name_of_hidden(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with its first tensor changed."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: what it is given and returns, and the nodes of autograd that are created in it."""

    path: str
    given: Shapes
    input: SeenTensor | None
    is_positional: bool
    """Whether the input is given by its place, and not by a name."""
    entered_at: Point
    left_at: Point
    takes_gradient: bool
    """Whether a tensor of its arguments does."""
    first: int
    """Autograd's sequence number at its beginning."""
    entered: int
    """When it starts, as a count of entries and exits of modules."""
    is_outside: bool
    """Whether the module is the model itself, a container of blocks, or holds such a container."""
    region: str = ""
    """The call of a top-most module with weights that is the newest then."""
    is_within: bool = False
    """Whether it is a part of that call, and not of the model's own code behind it."""
    last: int = 0
    """Autograd's sequence number at its end."""
    left: int = 0
    """When it ends."""
    returned: Shapes = field(default_factory=list)
    output: SeenTensor | None = None

    @property
    def way(self) -> Point:
        """The point at which it starts, with the nodes of what it returns."""
        return self.entered_at._replace(nodes=self.left_at.nodes)


class ForwardCalls:
    """The calls of the modules of a forward, and its regions: the operations from one call of a top-most module with weights to the next."""

    def __init__(self, key: Callable[[Tensor], int], places: TracedPlaces) -> None:
        self._key, self.places = key, places
        self._numbers = WeakIdKeyDictionary()
        self._num_seen = 0
        self.of: dict[str, list[ModuleCall]] = {}
        """The calls of each module, by its path."""
        self.running: list[ModuleCall] = []
        self.innermost = ""
        """Path of the module that was entered last."""
        self.regions: dict[str, str] = {"": ""}
        """Path of the module of each region, which is named by it, or from the second call on by path and number."""
        self.region = ""
        """The newest region; empty before the first."""
        self.begins: list[tuple[int, str]] = []
        """Autograd's sequence numbers from which on nodes belong to a region."""
        self.order: list[str] = []
        """The regions, and the first calls of top-most modules without weights, in their order."""
        self._is_within = False
        """Whether the top-most module that was entered last has weights."""
        self._depth = 0
        """Number of running modules that are top-most ones, or below these."""
        self._events = 0

    @property
    def where(self) -> str:
        """Path of the module whose code runs; empty for the model itself."""
        return self.running[-1].path if self.running else ""

    @property
    def number(self) -> int:
        """Number of the call whose code runs; 0 for the model itself."""
        return self.running[-1].entered if self.running else 0

    @property
    def is_inside(self) -> bool:
        """Whether a top-most module runs, and not the model's own code around it."""
        return self._depth > 0

    @property
    def top_most(self) -> str | None:
        """Path of the top-most module with weights entered last; None in the model's code after it, which is not repeated with it."""
        return self.regions[self.region] if self.is_inside else None

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the modules that run."""
        return frozenset(call.path for call in self.running)

    @property
    def ended(self) -> list[ModuleCall]:
        """All calls, in the order in which they end."""
        return sorted((call for calls in self.of.values() for call in calls if call.left), key=lambda call: call.left)

    def enter(self, path: str, part: nn.Module, args: tuple[Any, ...], kwargs: Any, *, is_outside: bool) -> None:
        """Record that a module's forward starts."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        point, self._events = self.places.point(), self._events + 1
        call = ModuleCall(
            path=path,
            given=self._shapes(tensors),
            input=self._seen(first_input_of(args, kwargs)),
            is_positional=bool(args),
            entered_at=point,
            left_at=point,
            takes_gradient=any(tensor.requires_grad for tensor in tensors),
            first=autograd_sequence_number(),
            entered=self._events,
            is_outside=is_outside,
        )
        calls = self.of.setdefault(path, [])
        if not is_outside and not self.is_inside:
            self._is_within = makes_event(part)
            if self._is_within:
                number = 1 + [*self.regions.values()].count(path)
                self.region = path if number == 1 else f"{path}#{number}"
                self.regions[self.region] = path
                self.begins.append((call.first, self.region))
            if self._is_within or not calls:
                self.order.append(self.region if self._is_within else path)
        self.innermost = path
        call.region, call.is_within = self.region, self._is_within and not is_outside
        calls.append(call)
        self.running.append(call)
        self._depth += not is_outside

    def leave(self, output: Any) -> None:
        """Record that the forward that started last ends."""
        call = self.running.pop()
        self._depth -= not call.is_outside
        self._events += 1
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        call.left, call.last, call.returned = self._events, autograd_sequence_number(), self._shapes(tensors)
        call.output, call.left_at = self._seen(first_of(output)), self.places.point(tensors)

    def _seen(self, tensor: Tensor | None) -> SeenTensor | None:
        if tensor is None:
            return None
        if (number := self._numbers.get(tensor)) is None:
            self._num_seen += 1
            number = self._numbers[tensor] = self._num_seen
        return SeenTensor(number, self._key(tensor), tensor.shape, tensor.requires_grad, state_of(tensor))

    def _shapes(self, tensors: list[Tensor]) -> Shapes:
        return [(self._key(tensor), tuple(tensor.shape)) for tensor in tensors]


Groups = tuple[tuple[str, ...], ...]
"""The paths of the modules of each group, modules whose calls alternate, in the order of their first calls."""


def groups_of(model: nn.Module, modules: ForwardCalls) -> Groups:
    """Return the groups of modules with weights that a forward of several samples has called several times, as code does that takes samples
    one by one or in chunks, in the order of their first calls.

    Weights that are gathered for the forward must stay gathered from the first call of such a module to the last one, and their gradients
    are whole when the backward of the first call is over. None of the backwards of a group is over before that of the last one starts:

        for sample in batch:                    one sample       a b
            outputs.append(b(a(sample)))        three            a b a b a b        a group: a and b
    """
    weighted = [path for path, part in model.named_modules() if path and any(True for _ in part.parameters())]
    calls = [(modules.of[path], path) for path in weighted if len(modules.of.get(path, ())) > 1]
    groups: list[list[str]] = []
    end = 0
    for first, last, path in sorted((some[0].entered, max(call.left for call in some), path) for some, path in calls):
        if first > end:
            groups.append([])
        groups[-1].append(path)
        end = max(end, last)
    return tuple(map(tuple, groups))


def joined(groups: Groups, other: Groups) -> Groups:
    """Return the groups of two forwards, joined where they have a module in common."""
    merged: list[list[str]] = []
    for group in (*groups, *other):
        alike = [known for known in merged if not {*known}.isdisjoint(group)]
        merged = [known for known in merged if known not in alike]
        merged.append([*dict.fromkeys(path for part in (*alike, group) for path in part)])
    return tuple(map(tuple, merged))
