"""The learning rates of an optimizer's groups: the job's schedule sets them, and whoever sets one from outside keeps it.

A schedule is a function of the step. Where a loop makes updates of its own, each optimizer counts these instead: a group then has
the option `num_updates`, which a checkpoint holds as it does any option that has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import members_of
from samestep.errors import ModelError
from samestep.runtime.optimizers.optimizers_by_name import UpdatedPart

_NUM_UPDATES = "num_updates"


class GroupRates:
    """The learning rates of an optimizer, whose groups follow those of the instances that a user gave."""

    def __init__(self, optimizer: Optimizer | None, given: Mapping[int, Optimizer]) -> None:
        self.optimizer = optimizer
        self.given = given
        """The instances that the user gave, whose options act here too, by the index of their first group."""
        self.first = _rates_of(optimizer)
        """The learning rate of each group, before the job's schedule."""
        self._set = list(self.first)
        self._given_rates = self._theirs()
        self._given_options = self._their_options()

    def check(self, *, follows_schedule: bool) -> None:
        """Refuse groups without a learning rate where the rates are to follow a schedule.

        Raises:
            ModelError: there is such a group.
        """
        if follows_schedule and self.optimizer is not None and any("lr" not in g for g in self.optimizer.param_groups):
            raise ModelError(
                f"a group of {type(self.optimizer).__name__} has no learning rate `lr`, which the job's schedule sets: "
                'schedule.name = "constant" without warm-up works'
            )

    def factors(self, schedule: Callable[[int], float], step: int) -> float | dict[int, float]:
        """Return the factor of a schedule in a step, for each group separately where a loop has called updates of some of them."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        if not self.counts_updates:
            return schedule(step)
        return {index: schedule(group.get(_NUM_UPDATES, step)) for index, group in enumerate(groups)}

    def count(self, step: int, part: UpdatedPart) -> None:
        """Count an update of a part; before the first one that the loop calls, each part has as many as there were steps."""
        for index, member in enumerate(members_of(self.optimizer) if self.optimizer is not None else ()):
            for group in member.param_groups:
                group.setdefault(_NUM_UPDATES, step)
                group[_NUM_UPDATES] += int(part.members is None or index in part.members)

    @property
    def counts_updates(self) -> bool:
        """Whether a loop has called `update` itself."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if _NUM_UPDATES in group:
                return True
        return False

    def first_with(self, factor: float | Mapping[int, float], part: UpdatedPart) -> float:
        """Return the learning rate of the first group of a part with a factor; not a number where there is no group."""
        index = 0
        for number, member in enumerate(members_of(self.optimizer) if self.optimizer is not None else ()):
            if part.members is None or number in part.members:
                return self.first[index] * (factor[index] if isinstance(factor, Mapping) else factor)
            index += len(member.param_groups)
        return math.nan

    def set(self, factor: float | Mapping[int, float]) -> None:
        """Set each group's learning rate to `factor` times its base rate; one that was set from outside meanwhile is kept.

        Raises:
            ModelError: the job's schedule and another hand both change the learning rate, or the optimizer that was given
                has another number of groups now.
        """
        if self.optimizer is None:
            return
        if self.given or len(self.optimizer.param_groups) != len(self.first):
            self._follow_options()
        rates, changed = _rates_of(self.optimizer), dict[int, float]()
        if rates != self._set:
            both = enumerate(zip(rates, self._set, strict=True))
            changed = {index: now for index, (now, before) in both if now != before}
        if self.given:
            theirs = self._theirs()
            changed |= {index: now for index, now in theirs.items() if now != self._given_rates[index]}
            self._given_rates = theirs
        factors = dict.fromkeys(range(len(self.first)), factor) if isinstance(factor, int | float) else factor
        if changed and any(value != 1.0 for value in factors.values()):
            raise ModelError(
                f"the learning rate of group {min(changed)} was set to {changed[min(changed)]:g} from outside, and the job's "
                'schedule sets it too: schedule.name = "constant" without warm-up leaves it to you'
            )
        for index, rate in changed.items():
            self.first[index] = rate
        for index, (group, first) in enumerate(zip(self.optimizer.param_groups, self.first, strict=True)):
            if "lr" not in group:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(first * factors[index])
            else:
                group["lr"] = first * factors[index]
        self._set = _rates_of(self.optimizer)

    def _follow_options(self) -> None:
        """Take over what was changed in the groups of the given instances, as the momentum that a scheduler changes with the
        rate."""
        assert self.optimizer is not None
        theirs = self._their_options()
        for whose, held, number in (
            ("optimizer that was given", theirs, len(self._given_options)),
            ("run's optimizer", self.optimizer.param_groups, len(self.first)),
        ):
            if len(held) != number:
                raise ModelError(
                    f"the {whose} has {len(held)} groups, and had {number} when the run was made: "
                    "groups of all weights from the start, some with lr = 0, work"
                )
        for index, now in theirs.items():
            group, before = self.optimizer.param_groups[index], self._given_options[index]
            group.update({key: value for key, value in now.items() if key in group and value != before.get(key)})
        self._given_options = theirs

    def _theirs(self) -> dict[int, float]:
        return {first + i: rate for first, one in self.given.items() for i, rate in enumerate(_rates_of(one))}

    def _their_options(self) -> dict[int, dict[str, Any]]:
        """Return the numbers among the options of each group of the given instances, but for its learning rate."""
        plain = (bool, int, float, tuple)
        return {
            first + index: {key: value for key, value in group.items() if key != "lr" and type(value) in plain}
            for first, optimizer in self.given.items()
            for index, group in enumerate(optimizer.param_groups)
        }


def _rates_of(optimizer: Optimizer | None) -> list[float]:
    """Return the learning rate of each group; 0 for one without."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups] if optimizer is not None else []
