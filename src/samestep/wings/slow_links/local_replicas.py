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
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samestep.building.model_changes import copy_modes
from samestep.building.parameter_marks import gradient_hooks_of
from samestep.errors import ModelError
from samestep.examination.examine import Source, build_blueprint, examine, with_new_blueprint
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.contributions import Contributions
from samestep.program.program import Program, with_exchange
from samestep.runtime.assembly import Assembly, assemble
from samestep.runtime.held_assembly import WEIGHT, HeldAssembly, StoredStates, set_weights
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.weights.moving_averages import ModelAverages
from samestep.runtime.weights.pieces import Piece
from samestep.state.fingerprints import attributes_of, digest
from samestep.trees import tree_map_only

_SOME = 16
"""The number of elements of a tensor that are compared."""


class LoopChanges:
    """Changes that a loop makes between two steps to the first of several replicas of one rank, which `run.model` is."""

    def __init__(self, assembly: Assembly, number: int) -> None:
        """Note the state after a step."""
        self._assembly, self._number = assembly, number
        self._before = self._present()

    def refusal(self) -> str:
        """Return why the next step would not be that of one rank for each replica; empty if nothing shows it."""
        now = self._present()
        name = next((name for name in {**self._before, **now} if now.get(name) != self._before.get(name)), "")
        return name and (
            f"the loop has changed {name} of run.model, which is the first of the {self._number} replicas that this rank trains "
            f"(numerics.replicas). Use a data rank for each replica"
        )

    def _present(self) -> dict[str, Any]:
        module, optimizer = self._assembly.model.module, self._assembly.weights.updater.optimizer
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        groups, states = (optimizer.param_groups, optimizer.state.values()) if optimizer is not None else ((), ())
        # Structures leave out the mode, which is that of all replicas.
        return {
            **{path or type(part).__name__: _structure_of(part) for path, part in module.named_modules()},
            **{f"{path}.{key}".lstrip("."): digest(v) for path, key, v in attributes_of(module) if key[0] != "_"},
            **{name: (_some_of(tensor), _hooks_of(tensor)) for name, tensor in tensors.items()},
            **{f"group {i} of the optimizer": digest(group | {"params": 0}) for i, group in enumerate(groups)},
            **{f"state {i} of the optimizer": tree_map_only(Tensor, _some_of, state) for i, state in enumerate(states)},
        }


def _structure_of(part: nn.Module) -> tuple[Any, ...]:
    """Return a module's parts, its forward and its hooks."""
    kinds = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    tables = (part._modules, part._parameters, part._buffers)
    return (*([*map(id, table.values())] for table in tables), id(vars(part).get("forward")), *map(list, kinds))


def _some_of(tensor: Tensor) -> list[float]:
    if tensor.is_meta:
        return []
    some: list[float] = tensor.detach().flatten()[:: max(1, tensor.numel() // _SOME)].double().tolist()
    return some


def _hooks_of(tensor: Tensor) -> tuple[bool, list[Any]]:
    """Return whether a tensor asks for a gradient, and the keys of the hooks on it."""
    hooks = gradient_hooks_of(tensor) if isinstance(tensor, nn.Parameter) else ()
    return tensor.requires_grad, [key for kind in hooks for key in kind]


OF_REPLICA = ":"
"""The separator, in the keys of a checkpoint's states, between a replica and what it is of it."""
OUTER = "outer"
"""What the momentum of the outer weights is named by, where a replica is named by its number."""


class LocalReplicas(HeldAssembly):
    """The replicas that this rank trains, each with separate weights, and its part of the outer weights."""

    are_apart: ClassVar[bool] = True

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo, averages: ModelAverages) -> None:
        super().__init__(source, layout, job, place, averages)
        self.number = job.numerics.replicas
        self.weights: list[Tensor] = []
        """The outer weights, one tensor for each piece of an assembly."""
        self.momentum: list[Tensor] = []
        self.is_fresh = True
        """Whether every replica has the outer weights."""
        self._changes: LoopChanges | None = None

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
        program = self.assemblies[0].parallel.program
        return with_exchange(program) if self._exchanges_after(step) else program

    def _exchanges_after(self, step: int) -> bool:
        return step % self.job.numerics.exchange_every == 0 or step == self.job.train.steps

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Take the outer step, if it is due after a step: every replica goes on from the outer weights.

        Collective over the axis of the program's contributions, and over `dp_shard` with zero=1, see
        [Note: collective calls].
        """
        self.is_fresh = self.has_exchanged = self._exchanges_after(step)
        if not self.has_exchanged:
            return

        def write_move(replica: int) -> None:
            theirs = self.assemblies[replica].weights.updater.pieces
            for piece, weight, trained in zip(self.pieces, self.weights, theirs, strict=True):
                gradient = piece.gradient()
                gradient.copy_((weight - trained.master()).view_as(gradient))

        numerics = self.job.numerics
        self.assemblies[0].weights.store.codes.sum_moves(write_move)
        for piece, weight, momentum in zip(self.pieces, self.weights, self.momentum, strict=True):
            step_of_piece = piece.gradient().div_(numerics.replicas).view_as(weight)
            momentum.mul_(numerics.outer_momentum).add_(step_of_piece)
            weight.sub_(step_of_piece + numerics.outer_momentum * momentum, alpha=numerics.outer_lr)
        for assembly in self.assemblies:
            assembly.weights.store.settle()  # a gather of the step still sends what is written over here
            set_weights(assembly, self.weights)

    def catch_up(self, step: int) -> None:
        """Exchange after the last step of the job, where a run has gone back to earlier weights; collective as `exchange` is."""
        if step == self.job.train.steps:
            self.exchange(step)

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
        for weight, momentum, value in zip(self.weights, self.momentum, start, strict=True):
            weight.copy_(value.view_as(weight))
            momentum.zero_()
        for assembly in self.assemblies:
            set_weights(assembly, self.weights)
        self.is_fresh = True

    def states(
        self, updater: Updater, elsewhere: Collection[str], writes: Callable[[str], bool]
    ) -> Iterator[tuple[Piece, Mapping[str, Any]]]:
        """Yield the pieces whose states a checkpoint of this rank holds, and these by key: the momentum of the outer weights, and under keys
        that begin with the number of a replica its weights and its optimizer's states."""
        for index, (piece, momentum) in enumerate(zip(self.pieces, self.momentum, strict=True)):
            if piece.name not in elsewhere:
                yield piece, {f"{OUTER}{OF_REPLICA}momentum": momentum}
            for number, assembly in self.numbered_assemblies if writes(piece.name) else ():
                trained = assembly.weights.updater.pieces[index]
                states = {WEIGHT: trained.master(), **assembly.weights.updater.state_of(trained)}
                yield piece, {f"{number}{OF_REPLICA}{key}": value for key, value in states.items()}

    def load_states(self, updater: Updater, stored: StoredStates) -> None:
        """Set the outer weights and their momentum, and the weights and states of each replica of this rank; the first has the outer weights."""
        for index, piece in enumerate(self.pieces):
            self.weights[index].copy_(piece.master().view_as(piece.value))
            self.momentum[index].copy_(stored.read(f"{OUTER}{OF_REPLICA}momentum", piece).view_as(piece.value))
            for number, assembly in self.numbered_assemblies:
                trained = assembly.weights.updater.pieces[index]
                trained.set_master(stored.read(f"{number}{OF_REPLICA}{WEIGHT}", piece))
                stored.load(assembly.weights.updater, trained, f"{number}{OF_REPLICA}")
        for assembly in self.assemblies[1:]:
            assembly.weights.updater.live.publish()
            assembly.weights.store.publish()
        self.is_fresh = False
