"""Putting any model into a layout: the entry of a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import calls
from samestep.building.loss import named_loss
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.guards.shared_weights import SharedWeights
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.preparation import Loss, Source
from samestep.runtime.processes import join, mesh
from samestep.runtime.run import Run


@calls.checked
def parallelize(
    model: Callable[[], nn.Module] | nn.Module,
    loss: Loss | str,
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer,
    *,
    layout: str | Layout = "",
    job: Job | None = None,
    stages: Sequence[str] | None = None,
) -> Run:
    """Put any model into a layout; `run.step(batch)` then takes one optimizer step of the job.

    Every rank calls it with equal arguments, started by `samestep.launch`, torchrun or srun, or as the only process.

    A run trains weights of its own: of an instance it takes the values. So two runs over the same modules or optimizer, which
    take steps in turn, are refused.

    Args:
        model: a build function, whose weights start as functions of (seed, name); or an instance, whose values stay.
        loss: (outputs, batch) -> (sum, count), or a word of the key `train.loss`: "cross_entropy", "mse".
        optimizer: a function of a list of parameters, or an instance over the model instance that has not stepped.
        layout: one line of text such as "dp=2 zero=3"; empty replicates over all ranks.
        job: global batch, steps, seed, schedule, numerics, `optimizer.clip_norm`, and `data.labels`, which says what the labels of
            a causal model of transformers are for "cross_entropy". Its model, the rest of its data, its loss and the rest of
            its optimizer table are not read: the arguments above replace them.
        stages: names of modules with which the later stages of a pipeline may begin, such as ["encoder.3", "head"]; by default
            those of `job.model.stages`, and else blocks, or the calls of any modules.

    Raises:
        InputError: a model, optimizer or layout that cannot run; the text says what would.
    """
    job = (job or Job()).with_stages(stages)
    place = join.join(job.run.device, timeout_s=job.run.timeout_s, ranks_per_node=job.run.ranks_per_node)
    where = Layout.parse(layout) if isinstance(layout, str) else layout
    if layout == "":
        where = Layout(dp_replicate=place.world_size)
    mesh.check_world(where)
    loss = named_loss(loss) if isinstance(loss, str) else loss
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    source = Source(model, loss, optimizer_source(optimizer, names), name)
    return Run(source, where, job, place, shared=SharedWeights())
