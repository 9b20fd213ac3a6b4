"""The ranks agree on the weights to which a step gave no gradient: torch's optimizers leave alone a weight whose `grad` is None.

Every rank knows which weights its own micro-batches gave a gradient. A weight is *unused* in a step if no rank did:

```
weights that the trace leaves open (`StepSpec.unsure`)    a number each in the step's scalars: the ranks that used it
all others                                                used, until a rank's own set changes; then the ranks exchange
                                                          their sets behind the scalars, which hold the update back
```
A loop that sets `requires_grad` changes such a set. It must do so alike on all ranks, which the same exchange compares.

Where the update is launched before the host has read the scalars, it takes the unused weights of the step before, and the
device holds it back if these are others now. So no step waits for another number than the scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import ModelError
from samestep.models.spec import ModelSpec
from samestep.program.program import Program
from samestep.runtime import host_copies
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.mesh import Mesh

Unused = frozenset[str]
"""Names of weights of the whole model to which a step gave no gradient."""


@dataclass(slots=True)
class UsedWeights:
    """The agreement of the ranks on the unused weights of each step; each of several models that are trained independently has another one."""

    program: Program
    names: Sequence[str]
    """The trained weights of the whole model."""
    unsure: Sequence[str]
    """Those of them that have a number in the step's scalars."""
    world: dist.ProcessGroup | None
    """The group of all ranks; None where there is one."""
    device: torch.device
    held: frozenset[str] = frozenset()
    """The trained weights of which this rank holds a part."""
    index: int = 0
    """The index of this rank's model among those that are trained independently."""
    cut_by: str = ""
    """The word of an axis that cuts the model, if one does."""
    asleep: Unused | None = None
    """The weights that no step of this process has used, which have no state yet; None before the first update."""
    agreed: Unused = frozenset()
    """The unused weights of the last step that `read` has taken."""
    _own: Unused = frozenset()
    """The unused weights of this rank's micro-batches."""
    _frozen: Unused = frozenset()
    """Those of them that the loop has frozen."""
    _others: Unused = frozenset()
    """The unused weights of all ranks among those without a number in the scalars."""
    _exchanged: tuple[Unused, Unused] = (frozenset(), frozenset())
    """The sets that the ranks exchanged last."""
    _exchangeable: tuple[Unused, Unused] = (frozenset(), frozenset())
    """The sets that this rank would exchange now: its unused weights without a number in the scalars, and `_frozen`."""
    _flags: Tensor | None = None
    """This rank's numbers in the scalars, on the device."""
    _expected: tuple[Unused, Tensor] | None = None
    """The weights that `expected_flags` was made for last, and these flags."""

    @classmethod
    def of(cls, program: Program, mesh: Mesh, model: ModelSpec, index: int) -> UsedWeights:
        """Return the agreement about the weights of a program; `model` is the uncut model, at this index of those that are trained independently."""
        layout = program.step.layout
        axes = {**layout.model_axes, "pp": layout.pp}
        return cls(
            program=program,
            names=[p.name for p in model.params if p.trainable and p.numel],
            unsure=program.step.unsure,
            world=mesh.groups["world"] if layout.world_size > 1 else None,
            device=mesh.device,
            held=frozenset(p.name for p in program.step.model.params if p.trainable and p.numel),
            index=index,
            cut_by=next((word for word, degree in axes.items() if degree > 1), ""),
        )

    def note(self, without: Mapping[str, bool]) -> Tensor:
        """Note the weights that this rank's micro-batches left without a gradient, and whether they are frozen;
        return this rank's numbers in the scalars (float64), for which the host waits for nothing.
        """
        unused_here = frozenset([name for name in without if name in self.held])
        if self._flags is None or unused_here != self._own:
            flags = [float(name in self.held and name not in unused_here) for name in self.unsure]
            self._flags = host_copies.to_device(torch.tensor(flags, dtype=torch.float64), self.device)
        self._own, self._frozen = unused_here, frozenset([name for name in unused_here if without[name]])
        self._exchangeable = unused_here.difference(self.unsure), self._frozen
        return self._flags

    @property
    def has_changed(self) -> bool:
        """Whether the ranks have to exchange their sets, because this rank's are no longer those of the last exchange."""
        return self.world is not None and self._exchanged != self._exchangeable

    def expected(self) -> Unused:
        """Return the weights that an update may leave out before the host has read the step's scalars."""
        return self._own if self.world is None else self.agreed

    def can_be_expected(self) -> bool:
        """Return whether all weights of such an update have a state already."""
        return self.asleep is not None and self.asleep <= self.expected()

    def expected_flags(self) -> Tensor | None:
        """Return which numbers of the scalars such an update takes for 0 (bool); None where none can differ."""
        if self.world is None or not self.unsure:
            return None
        left_out = self.expected()
        if self._expected is None or self._expected[0] != left_out:
            flags = torch.tensor([name in left_out for name in self.unsure])
            self._expected = left_out, host_copies.to_device(flags, self.device)
        return self._expected[1]

    def unproven(self) -> str:
        """Return why this rank's uses of weights of a model that is cut are not those of one device; empty if nothing shows it."""
        used = self.held - self._own
        name = next((p.name for p in self.program.step.model.params if p.is_idle and p.name in used), "")
        return name and (
            f"the loss depends on {name}, and did not when the model was traced, so samestep does not know how {self.cut_by} shards its use. "
            f"Use {self.cut_by}=1, or add 0 * weight.sum() to the output, so that each sample uses the weight. If `run.backward` is "
            "given another loss than `parallelize`, give `parallelize` a loss with the terms of both"
        )

    def read(self, sums: Sequence[float], *, exchanges: bool) -> None:
        """Take the summed numbers of weights; `exchanges` if some rank's sets have changed.

        Collective over the world with `exchanges`: every rank calls it with the same numbers, so all exchange alike.

        Raises:
            ModelError: some of the ranks that hold a weight have frozen it.
        """
        if self.world is None:
            self.agreed = self._own
            return
        if exchanges:
            self._exchange(self.world)
        none = (name for name, number in zip(self.unsure, sums, strict=True) if number == 0.0)
        self.agreed = self._others.union(none)

    def _exchange(self, world: dist.ProcessGroup) -> None:
        """Sum over all ranks how many hold each weight, used it, and have frozen it."""
        place = {name: index for index, name in enumerate(self.names)}
        rows = torch.zeros(self.program.step.sharing.num_apart, 3, len(place), dtype=torch.float64)
        for row, names in enumerate((self.held, self.held - self._own, self._frozen)):
            rows[self.index, row, [place[name] for name in names]] = 1.0
        self._exchanged = self._exchangeable
        summed = rows.to(self.device)
        with outside_step():
            dist.all_reduce(summed, group=world)
        all_holders, _, all_frozen = summed.sum(0).tolist()
        for name, index in place.items():
            if 0.0 < all_frozen[index] < all_holders[index]:
                raise ModelError(
                    "frozen-on-some-ranks",
                    f"{name} is frozen (requires_grad_(False)) on {all_frozen[index]:g} of the {all_holders[index]:g} ranks that hold "
                    "it and trained on the others. Use a loop that freezes it on all ranks before the same step",
                )
        holders, used, _ = summed[self.index].tolist()
        self._others = frozenset(
            name for name, i in place.items() if holders[i] and not used[i] and name not in self.unsure
        )

    def updated(self, *, is_first: bool) -> None:
        """Note that the weights that are not unused were updated, `is_first` for the first time in this process."""
        self.asleep = self.agreed if is_first or self.asleep is None else self.asleep & self.agreed
