"""Two runs that were given the same weights: each trains a copy, where a plain loop trains one model.

Two models in turn (a GAN), a backbone under two heads, or one optimizer given twice are written with two calls of `parallelize`
over the same modules. Taken in turn, the steps of one run would not see those of the other, so they are refused. What
counts is that two runs take steps and neither has ended: a run that nobody holds any more, that has taken its last step,
was asked to stop or has raised is no hindrance. A frozen part trains nowhere, and may be shared.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

from torch import Tensor

from samestep.errors import ModelError
from samestep.runtime.assembly import Assembly
from samestep.runtime.step_report import StepReport
from samestep.state.writes import version_of

_RUNS: weakref.WeakSet[SharedWeights] = weakref.WeakSet()
"""The runs of this process that were made by `parallelize` and are prepared."""


class SharedWeights:
    """Weights that one run was given and that stay with whoever gave them, and how far the run has come."""

    def __init__(self, *, is_watched: bool = True) -> None:
        """Watch the weights that a run of `parallelize` is given; other runs train copies."""
        self._is_watched = is_watched
        self._given: dict[str, weakref.ref[Tensor]] = {}
        self._trained: frozenset[str] = frozenset()
        self._versions: dict[str, int] = {}
        self._last: StepReport | None = None
        self._has_ended = False

    def begin(self, held: Assembly) -> str:
        """Note what a run was given once it is prepared; return what the user should know of runs before, as text."""
        if not (self._is_watched and held.model.given):
            return ""
        self._given, self._trained = held.model.given, frozenset(p.name for p in held.model.spec.params if p.trainable)
        self._versions = self._present_versions()
        earlier = next((other for other, _ in self._others() if other._is_stale), None)
        _RUNS.add(self)
        if earlier is None:
            return ""
        return (
            "this run begins with the values of the given model, which another run has trained a copy of: "
            "model.load_state_dict(run.state_dict(on_every_rank=True)) in front of it takes over what was trained"
        )

    def refuse_others(self) -> None:
        """Refuse a step, or a part of one, while another run takes steps with the same weights.

        Raises:
            ModelError: another run does.
        """
        if self._given and (name := self._weight_used_by_another()):
            gc.collect()  # a run that nobody holds may be in a cycle
            name = self._weight_used_by_another()
            if name:
                raise ModelError(
                    f"{name} was given to two runs that take steps, and each trains a copy of its own, which the other never sees: "
                    "one run over a module that holds all parts works; so does, for one run after the other, "
                    "model.load_state_dict(run.state_dict(on_every_rank=True)) before the next one is made"
                )

    def note(self, report: StepReport, *, is_last: bool) -> None:
        """Note the report of a step, or of a part of one."""
        self._last, self._has_ended = report, is_last

    def end(self) -> None:
        """Note that a step has failed, so that the run takes no more."""
        self._has_ended = True

    def _weight_used_by_another(self) -> str:
        """Return the name of a weight with which another run takes steps; empty if none does."""
        taking = ((other, name) for other, name in self._others() if other._takes_steps)
        return next((name for other, name in taking if self._last is not None or other._is_stale), "")

    def _others(self) -> Iterator[tuple[SharedWeights, str]]:
        """Yield other runs that were given weights of this one which one of both trains, each with the name of one here."""
        mine = {id(weight): name for name, ref in self._given.items() if (weight := ref()) is not None}
        for other in _RUNS - {self} if mine else ():
            for name, ref in other._given.items():
                here = mine.get(id(ref()))
                if here is not None and (here in self._trained or name in other._trained):
                    yield other, here
                    break

    @property
    def _takes_steps(self) -> bool:
        return self._last is not None and not self._has_ended and not self._last.stop

    @property
    def _is_stale(self) -> bool:
        """Whether it has taken steps, and nobody has written into what it was given since."""
        return self._last is not None and self._versions == self._present_versions()

    def _present_versions(self) -> dict[str, int]:
        given = {name: one for name, ref in self._given.items() if (one := ref()) is not None}
        return {name: version_of(one) for name, one in given.items()}  # one that moves is not written
