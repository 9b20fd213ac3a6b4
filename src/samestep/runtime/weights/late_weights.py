"""Weights under zero=1 that other ranks have updated, and whose all_gather overlaps with the next forward.

After an update each rank gathers the chunks that the others have updated. The forward needs those of its first layers
first, so buckets are gathered in the order of their first layers, and each is waited for where its weights are needed:

    a layer begins             a hook in front of its modules waits for the buckets of their weights
    other code reads a weight  through its module, where a stand-in waits as soon as anything is asked of it
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.models.param_spec import ParamSpec
from samestep.models.spec import is_below
from samestep.program.buckets import Bucket
from samestep.program.program import Program
from samestep.trees import tree_map_only


class StandIn(nn.Parameter):
    """A placeholder of a weight that is still being gathered: an operation on it waits, and is applied to the weight."""

    arrive: Callable[[], Tensor]
    """Waits for the weight, and returns it."""

    def __new__(cls, param: nn.Parameter, arrive: Callable[[], Tensor]) -> StandIn:
        """Return a stand-in for a weight, which takes no memory."""
        made: StandIn = super().__new__(cls, torch.empty_like(param, device="meta"), param.requires_grad)
        made.arrive = arrive
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(StandIn, lambda one: one.arrive(), (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _WeightAttribute:
    """A module's attribute that holds a weight."""

    module: nn.Module
    leaf: str
    param: nn.Parameter
    stand_in: StandIn


@dataclass(slots=True)
class LateWeights:
    """The weights of gathered buckets, and how to wait for those whose gather is under way."""

    places: dict[str, list[_WeightAttribute]]
    """The attributes of modules that hold each bucket's weights."""
    under_way: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Waits for the gather of a bucket that was begun and not waited for."""

    @classmethod
    def of(
        cls, model: nn.Module, program: Program, buckets: Sequence[Bucket], params: Mapping[str, nn.Parameter]
    ) -> LateWeights:
        """Put hooks in front of the layers whose weights are in these buckets, which are gathered after each update."""
        specs = {spec.name: spec for spec in program.step.model.params}
        late = cls({})
        for bucket in buckets:
            late.places[bucket.name] = [
                place
                for member in bucket.members
                for place in late._places_of(model, bucket.name, specs[member.name], params)
            ]
        for layer in program.step.model.layers:
            for path in layer.modules:
                needed = [
                    bucket.name
                    for bucket in reversed(buckets)  # in the order of their gathers
                    if any(is_below(n, path) for member in bucket.members for n in _names(specs[member.name]))
                ]
                if needed:
                    module = model.get_submodule(path)
                    module.register_forward_pre_hook(functools.partial(late._before, needed), prepend=True)
        return late

    def _places_of(
        self, model: nn.Module, bucket: str, spec: ParamSpec, params: Mapping[str, nn.Parameter]
    ) -> list[_WeightAttribute]:
        param = params[spec.name]

        def arrive() -> Tensor:
            self.settle(bucket)
            return param

        stand_in = StandIn(param, arrive)
        split = (name.rpartition(".") for name in _names(spec))
        return [_WeightAttribute(model.get_submodule(path), leaf, param, stand_in) for path, _, leaf in split]

    def hold(self, bucket: str, wait: Callable[[], object]) -> None:
        """Put stand-ins into the attributes of a bucket's weights until `wait` was called."""
        self.under_way[bucket] = wait
        for place in self.places[bucket]:
            place.module._parameters[place.leaf] = place.stand_in

    def settle(self, bucket: str) -> None:
        """Wait for the weights of a bucket, if they are being gathered, and put them back into their attributes."""
        wait = self.under_way.pop(bucket, None)
        if wait is None:
            return
        wait()
        for place in self.places[bucket]:
            if place.module._parameters.get(place.leaf) is place.stand_in:  # nobody has put another one there
                place.module._parameters[place.leaf] = place.param

    def settle_all(self) -> None:
        """Wait for all weights that are being gathered."""
        for bucket in list(self.under_way):
            self.settle(bucket)

    def _before(self, buckets: Sequence[str], _: nn.Module, args: Any) -> None:
        for bucket in buckets if self.under_way else ():
            self.settle(bucket)


def _names(spec: ParamSpec) -> tuple[str, ...]:
    return (spec.name, *spec.aliases)
