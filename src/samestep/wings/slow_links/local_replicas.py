"""Independently trained replicas: each takes H steps alone, then all continue from one outer step (local SGD, DiLoCo).

`numerics.replicas = R` divides the global batch into R equal runs of samples, and `numerics.exchange_every = H` says how
many steps each replica takes on its run with weights and optimizer states of its own. Of the outer weights w, from which
all replicas started, and the weights w_r of each after H steps:

    g = 1/R sum_r (w - w_r)      the averaged move, which compression may round, with what it lost before
    m = mu m + g
    w = w - eta (g + mu m)       Nesterov's momentum, as torch.optim.SGD writes it
    w_r = w                      on which each replica goes on, with its own optimizer states as they are

eta = 1 and mu = 0 average weights: local SGD (Stich 2019, arXiv:1805.09767). eta = 0.7 and mu = 0.9 with AdamW inside are
DiLoCo (Douillard et al. 2023, arXiv:2311.08105). The job fixes R and H, so a layout only says where replicas are trained:

    R = 4    dp=4                        dp=2                          dp_replicate=4 dp_shard=2
    rank 0   replica 0                   replicas 0 and 1 in turn      half of replica 0
    rank 1   replica 1                   replicas 2 and 3 in turn      half of replica 0

A rank that trains several holds a whole assembly of each: weights, gradients, optimizer. The last exchange follows the last
step of the job, whether or not H divides it.

`numerics.exchange_parts` exchanges parts of the weights one after the other, each once in H steps, and with
`numerics.exchange_delay = D` replicas take D steps more before the outer step (`program/exchange_times.py`). Their weights have
moved on meanwhile, which w knows nothing of, so they are mixed, by `numerics.exchange_mix`, a (Douillard et al. 2025,
arXiv:2501.18512, algorithm 2):

    g = 1/R sum_r (w - w_r)      of the weights behind step t
    w_r = a w_r + (1 - a) w      behind step t + D
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from samestep.building.model_changes import copy_modes
from samestep.errors import ModelError
from samestep.examination.examine import Source, build_blueprint, examine, with_new_blueprint
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.exchange_times import Contributions, ExchangeTimes, Phase
from samestep.program.program import Program, ending_with
from samestep.runtime.assembly import Assembly, assemble
from samestep.runtime.held_assembly import WEIGHT, HeldAssembly, StoredStates, set_weights
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.weights.moving_averages import ModelAverages
from samestep.runtime.weights.pieces import Piece
from samestep.wings.slow_links.loop_changes import LoopChanges

OF_REPLICA = ":"
"""The separator, in the keys of a checkpoint's states, between a replica and what it is of it."""
OUTER = "outer"
"""What the momentum of the outer weights is named by, where a replica is named by its number."""
MOVE = f"{OUTER}{OF_REPLICA}move"
"""The key among a weight's states of what replicas have moved it by, where the outer step with it is still to be taken."""


class LocalReplicas(HeldAssembly):
    """The replicas that this rank trains, each with separate weights, and its part of the outer weights."""

    are_apart: ClassVar[bool] = True

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo, averages: ModelAverages) -> None:
        super().__init__(source, layout, job, place, averages)
        self.number = job.numerics.replicas
        self.times = ExchangeTimes.of(job.numerics, job.train.steps)
        self.weights: list[Tensor] = []
        """The outer weights, one tensor for each piece of an assembly."""
        self.momentum: list[Tensor] = []
        self.is_fresh = True
        """Whether every replica has the outer weights."""
        self._changes: LoopChanges | None = None
        self.under_way: dict[int, bool] = {}
        """Parts whose exchange has started and not ended, and whether all of its collectives were issued."""
        self.arrived: dict[int, list[Tensor]] = {}
        """The summed moves of such parts, a tensor for each piece, where a checkpoint has waited for them or holds them."""

    def build(self, example: Any) -> None:
        """Build, cut and fill a model for each replica of one rank; they begin with equal weights, as the outer weights do.

        Collective over the world, as `assemble` says.

        Raises:
            InputError: the model, the optimizer or the number of processes does not fit the layout or the job.
            ModelError: the optimizer may keep more than the states of weights.
        """
        zero = self.layout.zero if self.layout.num_shards > 1 else 0
        each = Contributions.of(self.layout, zero, self.number).each
        plans = [
            build_blueprint(self.source, self.job) for _ in range(each - 1)
        ]  # of an instance copies, before it is taken
        source = replace(self.source, prepared=examine(self.source, self.job, example, self.layout))
        assemblies = [assemble(source, self.layout, self.job, self.place, example)]
        for plan in plans:
            another = replace(source, prepared=with_new_blueprint(source, self.job, plan))
            assemblies.append(assemble(another, self.layout, self.job, self.place, example))
        parallel, updater = assemblies[0].parallel, assemblies[0].weights.updater
        if updater.optimizer is not None and not is_torchs_own(updater.optimizer):
            raise ModelError(
                "diloco-unsupported",
                f"numerics.exchange_every = {self.job.numerics.exchange_every}: what {type(updater.optimizer).__name__} keeps in addition to the states of weights would differ between replicas. Use a class of torch.optim, or exchange_every = 1",
            )
        contributions = parallel.program.step.contributions
        assert contributions is not None
        self.first = parallel.mesh.index(contributions.axis) * contributions.each if contributions.ranks > 1 else 0
        self.weights = [piece.master().clone() for piece in updater.pieces]
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]
        self.assemblies = assemblies

    def begin_step(self) -> str:
        """Let the modules of all replicas have the modes of the first one's; return why a change by the loop is not one of all replicas."""
        first, *others = self.assemblies
        for other in others:
            copy_modes(first.model.module, other.model.module)
        return self._changes.refusal() if self._changes is not None else ""

    def note_loop(self) -> None:
        """Note the state after a step, which the loop may not change where this rank trains several replicas."""
        number = len(self.assemblies)
        self._changes = LoopChanges(self.assemblies[0], number) if number > 1 else None

    def forget_loop(self) -> None:
        """Forget it: the weights are read from a file, or set by the loop."""
        self._changes = None

    def each(self) -> Iterator[tuple[int, Assembly]]:
        """Yield the number and the assembly of each replica of this rank, which is the current one meanwhile."""
        try:
            for turn, (number, assembly) in enumerate(self.numbered_assemblies):
                self.turn = turn
                yield number, assembly
        finally:
            self.turn = 0

    def sums(self, local: Sequence[Tensor]) -> Tensor:
        """Return the scalars of all replicas in one tensor: this rank gives those of its replicas, and has zeros for the others."""
        sums = local[0].new_zeros(self.number, len(local[0]))
        for (number, _), scalars in zip(self.numbered_assemblies, local, strict=True):
            sums[number] = scalars
        return sums.view(-1)

    def value_of(self, index: int) -> Tensor:
        """Return the outer values of a piece."""
        return self.weights[index]

    def program_behind(self, step: int) -> Program:
        """Return the program of a step, counted from 1, followed by the exchanges that are sent after it."""
        return ending_with(self.assemblies[0].parallel.program, self.times.behind(step))

    def indices_of(self, part: int) -> list[int]:
        """Return the indices of the pieces in a part of the weights."""
        step = self.assemblies[0].parallel.program.step
        return [index for index, piece in enumerate(self.pieces) if step.sharing.part_of(piece.name) == part]

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Do what is due after a step: start exchanges, or take the outer steps of those that end.

        Collective over the axis of the program's contributions, and over `dp_shard` with zero=1, see
        [Note: collective calls].
        """
        self.is_fresh, self.ended = False, frozenset()
        started, ended = set[int](), []
        for phase, part in self.times.behind(step):
            if phase is Phase.START:
                self._start(part)
                started.add(part)
            elif part not in self.under_way:  # a checkpoint of a job with fewer steps, which ended it
                continue
            elif phase is Phase.SUM:
                self._sum(part)
            else:
                self._end(part, mixes=part not in started)
                ended.append(part)
        self.ended = frozenset(ended)
        self.is_fresh = self.ended == {*range(self.times.parts)} and self.ended <= started

    @torch.no_grad()
    def catch_up(self, after: int, step: int) -> None:
        """Take the outer steps that were due after steps `after` + 1 to `step`, which a run leaves out as it goes back to the
        weights from behind `after`; exchanges that would have started there take place at their next time.

        Collective as `exchange` is.
        """
        self.ended = frozenset()
        for left_out in range(after + 1, step + 1):
            for phase, part in self.times.behind(left_out):
                if phase is Phase.END and part in self.under_way:
                    self._end(part, mixes=True)
        if step == self.times.last:  # behind which every part is exchanged
            self.exchange(step)

    def _start(self, part: int) -> None:
        """Start to average the moves of a part of the weights of all replicas."""
        assert part not in self.under_way, "an exchange starts once the one before has ended"
        indices = self.indices_of(part)

        def write_move(replica: int) -> None:
            theirs = self.assemblies[replica].weights.updater.pieces
            for index in indices:
                gradient = self.pieces[index].gradient()
                gradient.copy_((self.weights[index] - theirs[index].master()).view_as(gradient))

        self.assemblies[0].weights.store.exchange.start(part, write_move)
        self.under_way[part] = False

    def _sum(self, part: int) -> None:
        if not self.under_way[part]:
            self.assemblies[0].weights.store.exchange.sum(part)
            self.under_way[part] = True

    def _end(self, part: int, *, mixes: bool) -> None:
        """Take the outer step of a part, from which every replica continues, with some of its present weights if it `mixes`."""
        numerics = self.job.numerics
        self._receive(part)
        for index, move in zip(self.indices_of(part), self.arrived.pop(part), strict=True):
            weight, momentum = self.weights[index], self.momentum[index]
            step = move.div_(numerics.replicas).view_as(weight)
            momentum.mul_(numerics.outer_momentum).add_(step)
            weight.sub_(step + numerics.outer_momentum * momentum, alpha=numerics.outer_lr)
        del self.under_way[part]
        self._go_on_from_outer(part, numerics.exchange_mix if mixes else 0.0)

    def _receive(self, part: int) -> None:
        """Wait for the summed moves of a part, which are then the gradients of the first replica."""
        gradients = [self.pieces[index].gradient() for index in self.indices_of(part)]
        if part not in self.arrived:
            self._sum(part)
            self.assemblies[0].weights.store.exchange.end(part)
            self.arrived[part] = gradients
            return
        for gradient, move in zip(gradients, self.arrived[part], strict=True):
            gradient.copy_(move.view_as(gradient))
        self.arrived[part] = gradients

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the exchanges under way, so that a checkpoint holds their sums; they end when they would have.

        Collective over the axis of the program's contributions, see [Note: collective calls].
        """
        for part in [part for part in self.under_way if part not in self.arrived]:
            self._receive(part)
            self.arrived[part] = [move.clone() for move in self.arrived[part]]

    def _go_on_from_outer(self, part: int, rate: float) -> None:
        """Set one part of every replica's weights to the outer ones, mixed with a kept fraction of its present ones."""
        indices = self.indices_of(part)
        for assembly in self.assemblies:
            updater = assembly.weights.updater
            assembly.weights.store.settle()  # a gather of the step still sends what is written over here
            for index in indices:
                piece, outer = updater.pieces[index], self.weights[index]
                piece.set_master(outer if rate == 0.0 else torch.lerp(outer, piece.master().view_as(outer), rate))
            updater.publish()
            assembly.weights.store.publish(part=part)

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Let the first replica have the outer weights inside.

        Collective over `dp_shard` with zero=1, as `WeightStore.publish` says.
        """
        self.assemblies[0].weights.store.settle()
        if self.is_fresh:
            yield
            return
        masters = [piece.master().clone() for piece in self.pieces]
        set_weights(self.assemblies[0], self.weights)
        try:
            yield
        finally:
            set_weights(self.assemblies[0], masters)

    @torch.no_grad()
    def restart(self, start: Sequence[Tensor]) -> None:
        """Begin again from these weights, one tensor for each piece, without momentum."""
        self.forget_exchanges()
        for weight, momentum, value in zip(self.weights, self.momentum, start, strict=True):
            weight.copy_(value.view_as(weight))
            momentum.zero_()
        for assembly in self.assemblies:
            set_weights(assembly, self.weights)
        self.is_fresh = True

    def forget_exchanges(self) -> None:
        """Wait for the exchanges under way, and forget them; collective as `settle` is."""
        self.settle()
        self.under_way.clear()
        self.arrived.clear()

    def states(
        self, updater: Updater, elsewhere: Collection[str], writes: Callable[[str], bool]
    ) -> Iterator[tuple[Piece, Mapping[str, Any]]]:
        """Yield the pieces whose states a checkpoint of this rank holds, and these by key: the momentum of the outer weights, moves under way,
        and under keys that begin with the number of a replica its weights and its optimizer's states."""
        for part, moves in self.arrived.items():  # `settle` has waited for them
            for index, move in zip(self.indices_of(part), moves, strict=True):
                if (piece := self.pieces[index]).name not in elsewhere:
                    yield piece, {MOVE: move.view_as(piece.value)}
        for index, (piece, momentum) in enumerate(zip(self.pieces, self.momentum, strict=True)):
            if piece.name not in elsewhere:
                yield piece, {f"{OUTER}{OF_REPLICA}momentum": momentum}
            for number, assembly in self.numbered_assemblies if writes(piece.name) else ():
                trained = assembly.weights.updater.pieces[index]
                states = {WEIGHT: trained.master(), **assembly.weights.updater.state_of(trained)}
                yield piece, {f"{number}{OF_REPLICA}{key}": value for key, value in states.items()}

    def load_states(self, updater: Updater, stored: StoredStates) -> None:
        """Set the outer weights and their momentum, and the weights and states of each replica of this rank; the first has the outer weights."""
        self.forget_exchanges()
        for index, piece in enumerate(self.pieces):
            self.weights[index].copy_(piece.master().view_as(piece.value))
            self.momentum[index].copy_(stored.read(f"{OUTER}{OF_REPLICA}momentum", piece).view_as(piece.value))
            for number, assembly in self.numbered_assemblies:
                trained = assembly.weights.updater.pieces[index]
                trained.set_master(stored.read(f"{number}{OF_REPLICA}{WEIGHT}", piece))
                stored.load(assembly.weights.updater, trained, f"{number}{OF_REPLICA}")
        for assembly in self.assemblies[1:]:
            assembly.weights.updater.publish()
            assembly.weights.store.publish()
        self.is_fresh = False
        step = self.assemblies[0].parallel.program.step
        for part in sorted({step.sharing.part_of(p.name) for p in step.model.params if stored.has(MOVE, p.name)}):
            moves = [stored.read(MOVE, self.pieces[index]).clone() for index in self.indices_of(part)]
            self.under_way[part], self.arrived[part] = True, moves  # the same parts on all ranks with these weights
