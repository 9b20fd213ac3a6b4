"""A model in a layout, taking steps: the interpreter that carries out the program's tasks.

```python
run = samestep.parallelize(model, loss, optimizer, layout="dp=2 zero=3", job=job)
for batch in samestep.batches(dataset, job):
    report = run.step(batch)
```
A loss is a sum over samples or tokens and a count. Backward runs on the sum, divided by a power of two near the
count, which costs no bit; the true count is known to all ranks only after the last micro-batch, in the one all_reduce
that also carries the loss, the gradient norm and the stop flag, and divides the gradients then. So nothing is ever a
mean of means, and a user's loss need not know its count before its forward.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.errors import DataError, LayoutError, NonFiniteError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program import Program, Task
from samestep.runtime import (
    dropout,
    joining,
    precision,
    tensor,
)
from samestep.runtime.assembly import Assembly, Loss, Source, assemble
from samestep.runtime.build import call_model
from samestep.runtime.diagnose import first_nonfinite
from samestep.runtime.joining import Place
from samestep.runtime.record import Ledger, owned
from samestep.runtime.update import (
    LARGEST_SUM,
    Updater,
    clip_factor,
    optimizer_source,
)
from samestep.runtime.watch import Watch
from samestep.schedules import TaskKind

if TYPE_CHECKING:
    pass


class StepBatch(Protocol):
    """The global batch of one step, as `datasets.Batch` holds it: every rank reads only its own part."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        ...

    def shares(self, rank: int, num_ranks: int, num_microbatches: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        """Sample indices of each micro-batch of a rank; one may be empty."""
        ...

    def samples(self, indices: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Read samples into tensors with the batch dimension first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, the same on every rank but for the seconds and the bytes."""

    step: int
    """Steps taken so far, this one included."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Counted tokens or samples."""
    step_s: float
    tokens_per_s: float
    memory_bytes: int
    """Peak of this rank: of its GPU, or the process's resident memory."""
    skipped: bool = False
    stop: bool = False
    """Some rank was asked to stop."""
    note: str = ""
    """What went wrong in a step that is not finite."""


class Run:
    """A model in a layout, ready to take steps. Every rank makes one and calls it alike."""

    def __init__(self, source: Source, layout: Layout, job: Job, place: Place) -> None:
        self.job, self.layout, self.place = job, layout, place
        self.steps_taken = 0
        self._source = source
        self._made: Assembly | None = None
        self._watch: Watch | None = None
        self._reading: _Reading | None = None

    @property
    def is_made(self) -> bool:
        """Whether `prepare` has made the model."""
        return self._made is not None

    @property
    def program(self) -> Program:
        """The step as data."""
        return self.made.program

    @property
    def model(self) -> nn.Module:
        """This rank's module, as the layout has cut it."""
        return self.made.model

    @property
    def updater(self) -> Updater:
        """The optimizer over this rank's pieces."""
        return self.made.updater

    @property
    def made(self) -> Assembly:
        """What `prepare` made."""
        if self._made is None:
            raise LayoutError("the run is not prepared yet: call run.prepare(sample), or take a step")
        return self._made

    def prepare(self, example: Any) -> None:
        """Build the model in its layout, if that has not been done. `example` holds samples, as a batch reads them."""
        if self._made is None:
            self._made = assemble(self._source, self.layout, self.job, self.place, example)

    def step(self, batch: StepBatch) -> StepReport:
        """Take one optimizer step on the global batch. Collective: every rank calls it with the same batch.

        Raises:
            NonFiniteError: loss or gradients are not finite, and the job says stop.
            DriftError: ranks that must agree do not, as every `train.watch_every` steps are looked at.
        """
        self._prepare_from(batch)
        every = self.job.train.watch_every
        is_watched = every > 0 and (batch.step + 1) % every == 0 and self.layout.world_size > 1
        with Ledger() if is_watched and self._watch is None else nullcontext() as sent:
            report = self._step(batch)
        if is_watched:
            self._watch = self._watch or Watch(self)
            if sent is not None:
                self._watch.check_sent(report.step, sent)
            self._watch.check(report, batch.shares(0, 1, 1)[0])
        return report

    def _step(self, batch: StepBatch) -> StepReport:
        began = time.perf_counter()
        made = self.made
        _set_modes(made.modes)
        running = [(buffer, buffer.clone()) for buffer in made.running]
        totals = self.forward_backward(batch)
        loss_sum, count, norm_squared, stop = self._agree(totals)
        if count == 0:
            raise DataError(f"step {batch.step + 1} counts no token: every label of its batch is masked")
        scale = made.nominal_count / count / (made.updater.loss_scale.scale if made.updater.loss_scale else 1.0)
        loss, norm = loss_sum / count, math.sqrt(norm_squared) * scale
        finite = math.isfinite(loss) and math.isfinite(norm)
        note = "" if finite else self._diagnose(batch)
        skipped = not finite and self._skips(note, math.isfinite(loss))
        made.updater.set_lr(made.lr_factor(batch.step))
        if skipped:
            _put_back(running)
        else:
            made.updater.step(scale * clip_factor(norm, self.job.optimizer.clip_norm))
            made.updater.publish()
            made.holder.publish()
        if made.updater.loss_scale and math.isfinite(loss):
            made.updater.loss_scale.after(overflowed=not finite)
        self.steps_taken = batch.step + 1
        step_s = time.perf_counter() - began
        return StepReport(
            step=self.steps_taken,
            loss=loss,
            grad_norm=norm,
            lr=made.updater.first_lr[0] * made.lr_factor(batch.step) if made.updater.first_lr else math.nan,
            tokens=int(count),
            step_s=step_s,
            tokens_per_s=count / step_s,
            memory_bytes=peak_memory_bytes(self.place.device),
            skipped=skipped,
            stop=stop > 0,
            note=note,
        )

    def evaluate(self, batch: StepBatch) -> tuple[float, float]:
        """Return the sum of the loss over a batch and its count, without gradients. Collective over the world."""
        self._prepare_from(batch)
        made = self.made
        size = made.program.step.microbatch_samples * self.layout.dp
        everything = batch.shares(0, 1, 1)[0]
        totals = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        with self._forward_only():
            for part in np.array_split(everything, max(1, -(-len(everything) // size))):
                mine = np.array_split(part, self.layout.dp)[made.mesh.index("dp")]
                samples, weight = self._read(batch, mine)
                with self._slicing(samples):
                    outputs = self._run_through(samples)
                if outputs is not None:
                    loss_sum, count = made.loss(outputs, self._own_tokens(samples))
                    totals += torch.stack([_number(loss_sum, totals), _number(count, totals)]) * weight
        if self.layout.world_size > 1:
            dist.all_reduce(totals)
        loss_sum, count = (totals / self.layout.tp).tolist()
        return loss_sum, count

    def outputs(self, samples: Any) -> Any:
        """Run the model forward on samples that every rank holds alike. Collective over the world."""
        self.prepare(samples)
        with self._forward_only():
            moved = tree_map_only(Tensor, lambda tensor: tensor.to(self.place.device), samples)
            moved = precision.cast_floating(moved, self.made.master)
            outputs = self._run_through(moved)
            if outputs is not None:
                outputs = tensor.whole_logits(outputs, self.made.program, self.made.mesh)
        if self.made.stage is None:
            return outputs
        return self.made.stage.from_last(getattr(outputs, "logits", outputs))

    def _run_through(self, samples: Any) -> Any:
        """Run samples forward through all stages; return the outputs on ranks of the last one, and None on others."""
        outputs = None
        for chunk in range(max(1, len(self.made.program.chunks))):
            outputs = self._run_layers(samples, 0, chunk)
        if self.made.stage is not None:
            self.made.stage.finish_forward()
        return None if outputs is None else precision.for_loss(outputs)

    def _prepare_from(self, batch: StepBatch) -> None:
        if self._made is None:
            self.prepare(batch.samples(batch.shares(0, 1, 1)[0][:1]))

    # -- inside a step -----------------------------------------------------------------------------

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """Carry out the program's forwards and backwards; return this rank's sums (loss, count)."""
        made = self.made
        program = made.program
        totals = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        shares = batch.shares(made.mesh.index("dp"), self.layout.dp, program.step.num_microbatches)
        held: dict[tuple[int, int], Tensor | None] = {}
        reading = self._reading = _Reading(lambda index: self._read(batch, shares[index]))
        made.holder.begin_step()
        if made.stage is not None:
            made.stage.begin_step(reading.shapes_of)
        for task in program.tasks:
            if task.kind is TaskKind.UPDATE:
                continue
            with made.holder.running(task):
                if task.kind is TaskKind.WEIGHT:
                    made.deferred.add_up(task.microbatch)
                elif task.kind is TaskKind.FORWARD:
                    held[task.microbatch, task.chunk] = self._forward(batch, task, shares[task.microbatch], totals)
                else:
                    self._backward(task, held.pop((task.microbatch, task.chunk)))
        made.holder.finish_gradients()
        if made.draws is None:
            made.draws = False
            dropout.untrack_modules(made.model)
        if made.stage is not None:
            made.stage.finish()
        return totals / self.layout.tp  # ranks of a tensor cut count the same samples

    def _forward(self, batch: StepBatch, task: Task, indices: np.ndarray[Any, Any], totals: Tensor) -> Tensor | None:
        """Run a micro-batch forward; return its loss where this rank has the end of the model."""
        made = self.made
        assert self._reading is not None
        samples, weight = self._reading.of(task.microbatch)
        if task.chunk == max(0, len(made.program.chunks) - 1):
            self._reading.forget(task.microbatch)
        with self._modes(batch, indices):
            with self._slicing(samples):
                outputs = self._run_layers(samples, task.microbatch, task.chunk)
            if made.stage is not None and not made.stage.is_last(task.chunk):
                return None
            loss_sum, count = made.loss(precision.for_loss(outputs), self._own_tokens(samples))
            if made.balance is not None:
                loss_sum = loss_sum + made.balance(outputs, count, weight)
        totals += torch.stack([_number(loss_sum.detach(), totals), _number(count, totals)]) * weight
        scale = made.updater.loss_scale.scale if made.updater.loss_scale else 1.0
        return loss_sum * (weight * scale / made.nominal_count)

    def _slicing(self, samples: Any) -> AbstractContextManager[None]:
        """What surrounds a forward on slices of the samples' sequences."""
        return nullcontext() if self.made.slicing is None else self.made.slicing.of(samples)

    def _own_tokens(self, samples: Any) -> Any:
        """Return what the loss compares this rank's outputs with."""
        return samples if self.made.slicing is None else self.made.slicing.part(samples)

    def _run_layers(self, samples: Any, microbatch: int, chunk: int) -> Any:
        """Run the model on samples, or the layers of it that this rank has."""
        made = self.made
        if made.stage is None:
            return call_model(made.model, samples)
        return made.stage.forward(microbatch, chunk, lambda model: call_model(model, samples))

    def _backward(self, task: Task, loss: Tensor | None) -> None:
        made = self.made
        made.deferred.microbatch = task.microbatch
        if made.stage is not None:
            made.stage.backward(task.microbatch, task.chunk, loss)
        elif loss is not None:
            loss.backward()

    def _read(self, batch: StepBatch, indices: np.ndarray[Any, Any]) -> tuple[Any, float]:
        """Read a micro-batch. An empty one runs a sample of another rank with weight 0, so that all ranks send alike."""
        weight = 1.0 if len(indices) else 0.0
        samples = batch.samples(indices if len(indices) else batch.shares(0, 1, 1)[0][:1])
        moved = tree_map_only(Tensor, lambda t: t.to(self.place.device, non_blocking=True), samples)
        return precision.cast_floating(moved, self.made.master), weight

    def _agree(self, totals: Tensor) -> list[float]:
        """Sum the step's scalars over the world: loss, count, squared norm, stop flag."""
        stop = torch.tensor([float(joining.stop_requested())], dtype=torch.float64, device=self.place.device)
        norm_squared = self.made.holder.norm_squared() + self.made.updater.overflow(self.place.device)
        scalars = torch.cat([totals, norm_squared.view(1), stop])
        if self.layout.world_size > 1:
            with owned("scalars"):
                dist.all_reduce(scalars, group=self.made.mesh.groups["world"])
        return scalars.tolist()

    def _skips(self, note: str, loss_is_finite: bool) -> bool:
        """Decide what a step that is not finite does; every rank decides alike."""
        policy = self.job.numerics.on_nonfinite
        if loss_is_finite and self.made.updater.loss_scale is not None and self.made.updater.loss_scale.scale > 1.0:
            return True  # an overflow of scaled gradients: the next step runs at half the scale
        if policy == "stop":
            raise NonFiniteError(f"step {self.steps_taken + 1}: {note}; numerics.on_nonfinite = 'skip' would go on")
        return policy == "skip"

    def _diagnose(self, batch: StepBatch) -> str:
        """Name the first module at fault, on the first rank that has one. Collective: the step is run once more."""
        masters: dict[str, float] = {}
        if self.job.numerics.precision == "fp16":
            for piece in self.made.updater.pieces:
                masters[piece.name] = max(masters.get(piece.name, 0.0), float(piece.value.detach().abs().max()))
            for others in self._gathered(masters):  # a rank may hold a part of a weight only
                masters |= {name: max(most, masters.get(name, 0.0)) for name, most in others.items()}
        buffers = [(buffer, buffer.clone()) for buffer in self.made.model.buffers()]
        text = first_nonfinite(lambda: self.forward_backward(batch)[0], self.made.model, masters)
        _put_back(buffers)
        found = self._gathered(text)
        named = [f"{text} (rank {rank})" for rank, text in enumerate(found) if text]
        if named:
            return named[0]
        if self.made.updater.loss_scale is not None:
            return f"a gradient under the loss scale {self.made.updater.loss_scale.scale:g} is above {LARGEST_SUM:g}"
        return "loss or gradient norm is not finite, though no module's output or gradient is"

    def _gathered(self, mine: Any) -> list[Any]:
        """Return what every rank says. Collective over the world."""
        if self.layout.world_size == 1:
            return [mine]
        said: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(said, mine)
        return said

    @contextmanager
    def _modes(self, batch: StepBatch, indices: np.ndarray[Any, Any]) -> Iterator[None]:
        """What surrounds a training forward: layout-free dropout, raised islands."""
        with ExitStack() as stack:
            if self.job.numerics.precision == "float64":
                stack.enter_context(precision.RaiseIslands())
            made = self.made
            if made.draws is not False:
                drawn = indices if len(indices) else batch.shares(0, 1, 1)[0][:1]
                samples = torch.as_tensor(np.asarray(drawn), device=self.place.device)
                draw = dropout.Draw(self.job.train.seed, batch.step, samples)
                mode = self._drawing(draw)
                stack.enter_context(mode)
                yield
                made.draws = made.draws or mode.num_draws > 0 or None
            else:
                yield

    def _drawing(self, draw: dropout.Draw) -> dropout.DropoutMode:
        return dropout.DropoutMode(self.made.model, draw, self.made.mask_part)

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        model = self.made.model
        modes = {module: module.training for module in model.modules()}
        model.eval()
        with torch.no_grad(), ExitStack() as stack:
            if self.job.numerics.precision == "float64":
                stack.enter_context(precision.RaiseIslands())
            yield
        _set_modes(modes)
        self.made.holder.end_forward_only()


class _Reading:
    """The micro-batches of a step, each read once, when it is first asked for."""

    def __init__(self, read: Callable[[int], tuple[Any, float]]) -> None:
        self._read = read
        self._held: dict[int, tuple[Any, float]] = {}
        self._shapes: dict[int, tuple[torch.Size, ...]] = {}

    def of(self, microbatch: int) -> tuple[Any, float]:
        """Return the samples of a micro-batch, and the weight of its loss."""
        if microbatch not in self._held:
            self._held[microbatch] = self._read(microbatch)
        return self._held[microbatch]

    def forget(self, microbatch: int) -> None:
        """Let go of samples, after their last use."""
        del self._held[microbatch]

    def shapes_of(self, microbatch: int) -> tuple[torch.Size, ...]:
        """Return the shapes of a micro-batch's samples."""
        if microbatch not in self._shapes:
            samples, _ = self.of(microbatch)
            self._shapes[microbatch] = tuple(leaf.shape for leaf in tree_leaves(samples) if isinstance(leaf, Tensor))
        return self._shapes[microbatch]


def parallelize(
    model: Callable[[], nn.Module] | nn.Module,
    loss: Loss,
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer,
    *,
    layout: str | Layout = "",
    job: Job | None = None,
) -> Run:
    """Put any model into a layout; `run.step(batch)` then takes one optimizer step of the job.

    Every rank calls it alike: started by `samestep.launch`, torchrun or srun, or alone.

    Args:
        model: a build function, whose weights are first drawn from (seed, name); or an instance, whose values are kept.
        loss: (outputs, batch) -> (sum, count).
        optimizer: a function of a list of parameters, or an instance over the model instance that has not stepped.
        layout: one line of text such as "dp=2 zero=3"; empty replicates over all ranks.
        job: global batch, steps, seed, schedule, numerics and `optimizer.clip_norm`; what the model, the loss, the data
            and the rest of the optimizer are is said by the arguments above.

    Raises:
        InputError: what was given cannot run; the text says what would.
    """
    job = job or Job()
    place = joining.join(job.run.device, timeout_s=job.run.timeout_s, ranks_per_node=job.run.ranks_per_node)
    where = Layout.parse(layout) if isinstance(layout, str) else layout
    if layout == "":
        where = Layout(dp_replicate=place.world_size)
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    return Run(Source(model, loss, optimizer_source(optimizer, names), name), where, job, place)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on a GPU, or on a CPU the peak resident bytes of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _set_modes(modes: dict[nn.Module, bool]) -> None:
    """Let each module train or evaluate."""
    for module, training in modes.items():
        module.training = training


@torch.no_grad()
def _put_back(values: list[tuple[Tensor, Tensor]]) -> None:
    """Give tensors the values they had."""
    for held, value in values:
        held.copy_(value)


def _number(value: Tensor | int | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(())
