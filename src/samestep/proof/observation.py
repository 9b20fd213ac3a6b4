"""The observation of a run for a proof: every rank takes its steps and records values for a comparison with one device.

Each rank records its part of every tensor; nothing is gathered. A cut tensor is recorded with the place of each of its
elements in the whole tensor, so that the comparison need not know how it was cut.

The output of a module is recorded for each sample as two numbers, a projection on fixed signs and a norm,

    p(x) = sum_j s_j x_j,  s_j = +1 or -1        |p(x) - p(y)| ~ |x - y|

which are equal in every layout that gives a sample the same output, and take almost no memory.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from samestep.building.torch_seams import DisableTorchFunction
from samestep.datasets import Batch, Dataset, batches
from samestep.datasets.reading import SampleDraw, read_samples
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.ops import Task
from samestep.proof.held_tensors import HeldTensor, held_buffers, held_gradients, held_weights, places_of, suffix_of
from samestep.randomness.masks import MaskSlice
from samestep.randomness.mode import Draw
from samestep.runtime.axes.expert import RouteMode, Routes
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_observer import Indices, MakeMode, StepObserver, StepScalars
from samestep.runtime.weights.pieces import Piece
from samestep.schedules import TaskKind
from samestep.strategies.chunked_mlp import chunked_owners
from samestep.tracing.pending_logits import PendingLogits
from samestep.trees import keystr, tree_flatten_with_path, tree_leaves

Share = tuple[int, int, tuple[int, ...]]
"""(micro-batch, chunk, indices of the samples that a rank read for it)."""


FIRST_MOVE = 0.01
"""The length of the first update over the norm of the weights: large enough to see, too small to diverge."""
GIVEN = ": "
"""The separator between a block's path and the position of one of its arguments, in the names of recorded values."""
MASKED = 1e30
"""The magnitude of what stands for minus infinity: masks hold the lowest number of a dtype, whose square overflows."""
ALL_SAMPLES = -1
"""The sample index of an output that a module computes once for all samples, such as rotary angles; -1 - N for
replica N of those that are trained independently."""


@dataclass(slots=True)
class Output:
    """The output of a module for one sample of one step, as a projection and a norm."""

    projection: float
    norm: float
    numel: int
    """The number of elements that both numbers were computed from."""
    is_part: bool = False
    """Whether it is from one slice of the sequence; projections and squared norms of all `cp` ranks then add up."""


@dataclass(slots=True)
class ObservedStep:
    """The record of one step on one rank."""

    loss: float
    norm: float
    """The global gradient norm before clipping."""
    count: int
    """The tokens or samples that the loss counted."""
    factor: float
    """The clipping factor that gradients were multiplied by, computed from this rank's norm."""
    skipped: bool
    note: str
    shares: list[Share]
    digests: dict[int, int]
    """A hash of the content of each sample that was read, by sample index."""
    outputs: dict[tuple[str, int, int], Output]
    """The outputs by (module, index of its call in the forward, sample), in order of execution."""
    gradients: list[HeldTensor]
    weights: list[HeldTensor]
    """The weights after the step."""
    routes: Routes
    """The chosen experts, where choices are recorded and replayed; empty otherwise."""
    unused: list[str] = field(default_factory=list)
    """The weights that the step gave no gradient, and so did not update."""


@dataclass(slots=True)
class PlainSteps:
    """The record of a plain loop."""

    hindrance: str = ""
    """Why the loop could not run; empty where it did."""
    unused: list[list[str]] = field(default_factory=list)
    """The weights that had no gradient in each step."""
    other_values: list[str] = field(default_factory=list)
    """Tensors whose constant values before the first step differ from those of our blueprint."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[HeldTensor]] = field(default_factory=list)
    """The gradients of each step before clipping."""
    weights: list[list[HeldTensor]] = field(default_factory=list)
    updated: list[list[HeldTensor]] = field(default_factory=list)
    """The weights after each step of the job's optimizer on one device's gradients."""


@dataclass(slots=True)
class Observation:
    """The record of a whole run on one rank."""

    rank: int
    axes: dict[str, tuple[int, ...]]
    """The ranks of this rank's group, for each axis of the program."""
    indices: dict[str, int]
    """This rank's index on `dp` and `tp`, and its `stage`."""
    start: list[HeldTensor] = field(default_factory=list)
    """The weights before the first step."""
    steps: list[ObservedStep] = field(default_factory=list)
    buffers: list[HeldTensor] = field(default_factory=list)
    """The buffers after the last step."""
    held_out: float = 0.0
    """The loss of one batch after the last step, without gradients."""
    updated: list[list[HeldTensor]] = field(default_factory=list)
    """The weights after each step of the job's optimizer on equal gradients."""
    state: list[HeldTensor] = field(default_factory=list)
    """That optimizer's state after the last of these steps, each tensor named PARAMETER/KEY."""
    learning_rate: float = 0.0
    """The learning rate of the SGD steps."""
    compiled: tuple[str, ...] = ()
    """The compiler's report on the blocks, where they are compiled."""
    plain: PlainSteps | None = None
    """The plain torch loop with which one device is compared in float64."""
    resumed: list[tuple[str, float]] = field(default_factory=list)
    """Comparisons of a run that resumes twice from its checkpoint with the run that goes on, each with its error."""


class _DigestingDataset:
    """A dataset that records a hash of every sample that is read from it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.label_convention = getattr(dataset, "label_convention", None)
        self.digests: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def read_drawn(self, indices: Any, draw: SampleDraw | None) -> Any:
        """Read samples into tensors with the batch dimension first, and record their hashes."""
        samples = read_samples(self.dataset, indices, draw)
        for row, index in enumerate(np.asarray(indices).tolist()):
            digest = xxhash.xxh3_64()
            for leaf in tree_leaves(samples):
                digest.update(np.ascontiguousarray(leaf[row].numpy()).tobytes())
            self.digests[index] = digest.intdigest()
        return samples


def _unseen(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose operations are invisible to the modes of the run."""

    @functools.wraps(hook)
    def apart(*arguments: Any) -> None:
        with DisableTorchFunction():
            hook(*arguments)

    return apart


def _hook(method: Callable[..., None], path: str) -> Callable[..., None]:
    """Return a hook that calls an observer's method while the observer lives: a module that several models share outlives it, and is
    copied with its hooks."""
    of_observer = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (observer := of_observer()) is not None:
            observer(path, *arguments)

    return hook


class ObservedRun(StepObserver):
    """A run that records the samples it reads and the output of every module for each of them."""

    is_proof = True

    def __init__(self, source: Source, layout: Layout, job: Job, place: RankInfo, example: Any) -> None:
        """Prepare the run. Every rank must call it, since it creates process groups; if one does not, the others wait for it."""
        self.shares: list[Share] = []
        self.noted: dict[tuple[str, int, int], Output] = {}
        self.learning_rate: float | None = None
        """The learning rate of plain SGD; while it is None, the first step sets it from `FIRST_MOVE`."""
        self.routes: list[Routes] | None = None
        """The chosen experts of each step: recorded where empty, replayed otherwise; None leaves the choice free."""
        self._samples: list[int] | None = None
        self._calls: dict[str, int] = {}
        self._called: Mapping[str, int] = {}
        """The number of calls of each module by earlier stages."""
        self._replicas: dict[int, int] = {}
        """The replica that trains on each sample, where replicas are trained independently."""
        self._picked: set[tuple[str, int]] = set()
        """The calls of modules whose output had another number of rows than samples in some forward: values pick its
        rows, whose number may equal that of the samples by chance."""
        # A run refuses a layout that lacks a proof, and this is the proof: it measures instead.
        allow = (*job.run.allow, "loss", "state")
        measured = job.model_copy(update={"run": job.run.model_copy(update={"allow": allow})})
        self.run = Run(source, layout, measured, place, self, owns_weights=True)
        self.run.prepare(example)
        self._hook_modules()

    def _hook_modules(self) -> None:
        """Register forward hooks on every module that this rank computes: in a pipeline, those of this rank's layers.

        Modules within experts see the tokens that chose them, and no samples, and those within a part that is computed in chunks some
        of the tokens: the outputs of the experts and of the part are recorded.
        Modules within a graph have no hooks: the output of the graph is recorded.
        """
        program, model = self.run.program, self.run.model
        apart = [dispatch.owner for layer in program.step.model.layers for dispatch in layer.dispatches]
        apart += chunked_owners(program.step.model)
        paths = [path for chunk in program.chunks for i in chunk for path in program.step.model.layers[i].called]
        in_graph = self.run.assembly.model.compiled.in_graph
        for path, module in model.named_modules():
            if module in in_graph or any(path.startswith(f"{holder}.") for holder in apart):
                continue
            if path and (not program.chunks or any(f"{path}.".startswith(f"{root}.") for root in paths)):
                module.register_forward_hook(_hook(self._note, path))
        blocks = [path for layer in program.step.model.layers if layer.is_block for path in layer.modules]
        for path in blocks:
            if not program.chunks or path in paths:
                model.get_submodule(path).register_forward_pre_hook(_hook(self._note_given, path), with_kwargs=True)

    def begin(self, batch: Batch) -> None:
        """Clear the records of the previous step; called before each step."""
        self.shares, self.noted = [], {}
        parts = batch.shares(0, 1, self.run.job.numerics.replicas) if self.run.held.is_apart else []
        self._replicas = {sample: number for number, part in enumerate(parts) for sample in part}

    def whole_outputs(self, noted: Mapping[tuple[str, int, int], Output]) -> dict[tuple[str, int, int], Output]:
        """Return the outputs of a step without those whose rows values pick."""
        return {key: output for key, output in noted.items() if key[:2] not in self._picked}

    @contextmanager
    def running(self, task: Task, samples: Indices) -> Iterator[None]:
        """Set the current samples while a forward runs; modules that run in backward are recomputed, and not recorded."""
        if task.kind is TaskKind.FORWARD:
            self._samples, self._calls = samples.tolist(), {}
            layers = self.run.program.chunks[task.chunk].start if self.run.program.chunks else 0
            self._called = self.run.program.step.model.entered_before(layers)
            self.shares.append((task.microbatch, task.chunk, tuple(self._samples)))
        try:
            yield
        finally:
            self._samples = None

    def dropout_mode(self) -> MakeMode | None:
        """Return the mode that records or replays the choices of experts; None while `routes` is None."""
        return None if self.routes is None else functools.partial(self._route_mode, self.routes)

    def _route_mode(self, routes: list[Routes], model: nn.Module, draw: Draw, part: MaskSlice | None) -> RouteMode:
        return RouteMode(model, draw, part, routes[draw.step], self._own_tokens)

    def _own_tokens(self, tensor: Tensor, parts: int) -> Tensor:
        """Return this rank's tokens of a tensor [samples, tokens, ...], of which as many ranks hold a part each."""
        parallel = self.run.assembly.parallel
        if parts > 1 and parallel.slicing.degree > 1:
            tensor, parts = parallel.slicing.rows_of(tensor), parts // parallel.slicing.degree
        return tensor.chunk(parts, dim=1)[parallel.mesh.index("tp")] if parts > 1 else tensor

    def agreed(self, scalars: StepScalars) -> None:
        """Set the learning rate of plain SGD before the update; the first step derives it from its gradient norm."""
        updater, nominal_count = self.run.updater, self.run.assembly.objective.nominal_count
        if self.learning_rate is None and math.isfinite(scalars.norm_squared):
            norm = math.sqrt(scalars.norm_squared) * nominal_count / max(1.0, scalars.count)
            norm /= updater.loss_scale.scale
            norm = min(norm, self.run.job.optimizer.clip_norm or norm)
            size = math.sqrt(sum(float(piece.master().double().square().sum()) for piece in updater.pieces))
            self.learning_rate = FIRST_MOVE * size / norm if norm > 0.0 else FIRST_MOVE
        rates = self.run.assembly.weights.updater.rates.first
        rates[:] = [self.learning_rate or 0.0] * len(rates)

    @torch.no_grad()
    @_unseen
    def _note(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if not self._samples:
            return
        call = self._calls[path] = self._calls.get(path, self._called.get(path, 0) - 1) + 1
        tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        # Logits that are computed with their loss in chunks are nowhere whole: their input, loss and gradients are
        # recorded.
        if tensor is not None and tensor.is_floating_point() and not isinstance(tensor, PendingLogits):
            self._project(path, call, tensor)

    @torch.no_grad()
    @_unseen
    def _note_given(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a block's arguments without gradients, which no block before it computed: rotary angles, positions."""
        for place, leaf in tree_flatten_with_path((args, kwargs))[0] if self._samples else ():
            if isinstance(leaf, Tensor) and not leaf.requires_grad and leaf.dtype != torch.bool:
                name = f"{path}{GIVEN}{keystr(place)}"
                call = self._calls[name] = self._calls.get(name, self._called.get(path, 0) - 1) + 1
                self._project(name, call, leaf)

    def _project(self, path: str, call: int, tensor: Tensor) -> None:
        """Record a tensor's projection and norm for each sample."""
        if tensor.dim() < 2 or not self._samples:
            return
        for_all = ALL_SAMPLES - self._replicas.get(self._samples[0], 0)
        samples = self._samples if len(tensor) == len(self._samples) else [for_all]
        if len(tensor) != len(samples):
            self._picked.add((path, call))
            return
        parts = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        rows = parts.reshape(len(tensor), -1).double()
        rows = torch.where(rows.abs() > MASKED, MASKED * rows.sign(), rows)  # which leaves nan as it is
        signs, slicing = None, self.run.assembly.parallel.slicing
        is_part = bool(slicing.block) and tensor.shape[1] * slicing.degree == slicing.length
        if is_part:
            all_signs = _signs(rows.shape[1] * slicing.degree, rows.device)
            signs = slicing.rows_of(all_signs.view(1, slicing.length, -1)).reshape(-1)
        projections = (rows @ (_signs(rows.shape[1], rows.device) if signs is None else signs)).tolist()
        for sample, projection, norm in zip(samples, projections, rows.norm(dim=1).tolist(), strict=True):
            self.noted[path, call, sample] = Output(projection, norm, rows.shape[1], is_part)


@functools.lru_cache(maxsize=64)
def _signs(numel: int, device: torch.device) -> Tensor:
    # Drawn with numpy: inside a forward, torch's random numbers would count as the model's.
    drawn = np.random.default_rng(numel).integers(0, 2, numel) * 2.0 - 1.0
    return torch.from_numpy(drawn).to(device)


def join_slices(ranks: Sequence[Observation]) -> None:
    """Replace every output of a sequence slice by that of the whole sequence, joined over the rank's `cp` group."""
    for group in {seen.axes["cp"] for seen in ranks if "cp" in seen.axes}:
        members = [seen for seen in ranks if seen.rank in group]
        for steps in zip(*(seen.steps for seen in members), strict=True):
            for key, first in list(steps[0].outputs.items()):
                parts = [step.outputs[key] for step in steps if key in step.outputs]
                if first.is_part and len(parts) == len(members):
                    norm = math.sqrt(sum(part.norm**2 for part in parts))
                    output = Output(sum(p.projection for p in parts), norm, sum(p.numel for p in parts))
                    for step in steps:
                        step.outputs[key] = output


def joined(ranks: Sequence[Observation]) -> Observation:
    """Return the observation of one device, of ranks that have whole weights, and each a part of the samples."""
    if len(ranks) == 1:
        return ranks[0]
    steps = [
        replace(
            of_ranks[0],
            shares=[share for step in of_ranks for share in step.shares],
            digests={sample: digest for step in of_ranks for sample, digest in step.digests.items()},
            outputs={key: output for step in of_ranks for key, output in step.outputs.items()},
            gradients=_once([step.gradients for step in of_ranks]),
            weights=_once([step.weights for step in of_ranks]),
            routes={key: chosen for step in of_ranks for key, chosen in step.routes.items()},
            unused=sorted({name for step in of_ranks for name in step.unused}),
        )
        for of_ranks in zip(*(seen.steps for seen in ranks), strict=True)
    ]
    updated = [_once(weights) for weights in zip(*(seen.updated for seen in ranks), strict=True)]
    start, state = _once([seen.start for seen in ranks]), _once([seen.state for seen in ranks])
    return replace(ranks[0], start=start, steps=steps, updated=updated, state=state)


def _once(tensors: Sequence[list[HeldTensor]]) -> list[HeldTensor]:
    """Return the tensors of all ranks, each of which several may hold, once."""
    return [*{tensor.name: tensor for of_rank in tensors for tensor in of_rank}.values()]


def observe(observed: ObservedRun, dataset: Dataset) -> Observation:
    """Take all steps of the run's job, and return this rank's record of them.

    Collective over the world, see [Note: collective calls].
    """
    run = observed.run
    mesh = run.assembly.parallel.mesh
    seen = Observation(
        rank=mesh.rank,
        axes={axis: mesh.members(axis) for axis in mesh.groups},
        indices={"dp": mesh.index("dp"), "tp": mesh.index("tp"), "stage": run.program.step.stage},
        start=held_weights(run),
    )
    watched = _DigestingDataset(dataset)
    for batch in batches(watched, run.job):
        observed.begin(batch)
        watched.digests = {}
        seen.steps.append(_one_step(observed, batch, watched))
    for step in seen.steps:
        step.outputs = observed.whole_outputs(step.outputs)
    seen.compiled = tuple(run.assembly.model.compiled.summary())
    seen.buffers = held_buffers(run)
    last = Batch(run.steps_taken, batch.indices, dataset)
    seen.held_out = run.evaluate(last)["loss"]
    seen.learning_rate = observed.learning_rate or 0.0
    return seen


def _one_step(observed: ObservedRun, batch: Batch, watched: _DigestingDataset) -> ObservedStep:
    run = observed.run
    report = run.step(batch)
    limit = run.job.optimizer.clip_norm
    # Independently trained replicas are clipped by a norm each: the gradients that their optimizers get are compared.
    is_clipped = limit is not None and not run.held.is_apart
    factor = min(1.0, limit / (report.grad_norm + 1e-6)) if is_clipped and limit is not None else 1.0
    return ObservedStep(
        loss=report.loss,
        norm=report.grad_norm,
        count=report.tokens,
        factor=factor,
        skipped=report.skipped,
        note=report.note,
        shares=observed.shares,
        digests=watched.digests,
        outputs=observed.noted,
        gradients=held_gradients(run),
        weights=held_weights(run),
        routes=observed.routes[batch.step] if observed.routes else {},
        unused=[f"{name}{suffix_of(run)}" for name in sorted(run.assembly.weights.updater.unused)],
    )


@torch.no_grad()
def feed(
    run: Run, gradients: Sequence[dict[str, Tensor]], unused: Sequence[Collection[str]] = (), first_step: int = 0
) -> Iterator[list[HeldTensor]]:
    """Take optimizer steps on given whole gradients, the same in every layout, but for the weights that a step leaves `unused`;
    yield the weights after each step.

    Collective over the world: every rank must iterate; if one does not, the others wait for it when weights are gathered.
    """
    for index, gradient in enumerate(gradients):
        step = first_step + index
        whose, weights = suffix_of(run), run.assembly.weights
        updater = weights.updater
        for piece in updater.pieces:
            # In a step with an exchange after it, each replica is given the averaged move.
            value = gradient.get(f"{piece.name}{whose}", gradient.get(piece.name))
            assert value is not None
            _give(run, piece, value)
        left_out = {name for name in unused[index] if name.endswith(whose)} if unused else ()
        updater.unused = frozenset(name.removesuffix(whose) for name in left_out)
        updater.rates.set(weights.lr_factor(step))
        updater.step_index = step
        updater.step(1.0)
        updater.live.publish()
        weights.store.publish()
        run.steps_taken = step + 1
        run.held.is_fresh = False
        yield held_weights(run)


def _give(run: Run, piece: Piece, tensor: Tensor) -> None:
    """Set the gradient of a piece to the piece's part of a whole one."""
    places = places_of(run, piece)
    index = slice(places.start, places.stop) if isinstance(places, range) else places
    value = piece.gradient()
    values = tensor.flatten()[index].to(value)
    if isinstance(places, Tensor):
        values = values * (places >= 0).to(values)
    value.copy_(values.view_as(value))


@torch.no_grad()
def restart(run: Run, start: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Reset a run to its state before the first step, with the given weights: one tensor for each piece.

    Collective over the world, see [Note: collective calls].
    """
    for buffer, value in zip(run.model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    run.held.restart(start)
    weights = run.assembly.weights
    if weights.updater.optimizer is not None:
        weights.updater.optimizer.state.clear()
    weights.store.codes.scale(0.0)
    run.steps_taken = 0
