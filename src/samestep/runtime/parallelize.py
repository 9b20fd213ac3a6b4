"""`parallelize` puts any model into a layout: a user's loop begins here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from samestep import calls
from samestep.building.loss import named_loss
from samestep.building.loss_scope import scoped
from samestep.building.several_models import Built, Forward, as_one
from samestep.errors import LayoutError
from samestep.examination.examine import Loss, Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.guards.shared_weights import SharedWeights
from samestep.runtime.optimizers.optimizer_source import OptimizerLike, optimizer_source
from samestep.runtime.processes import join, mesh, rank_order
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.weights.moving_averages import Following, ModelAverages


@calls.checked
def parallelize(
    model: Built | Mapping[str, Built],
    loss: Loss | str,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | Mapping[str, OptimizerLike],
    *,
    layout: str | Layout = "",
    job: Job | None = None,
    stages: Sequence[str] | None = None,
    forward: Forward | None = None,
    batch_dim: int = 0,
    ema: Following | None = None,
    offload: Sequence[str] | None = None,
) -> Run:
    """Put any model into a layout; `run.step(batch)` then takes one optimizer step of the job.

    Every rank calls it with equal arguments, started by `samestep.launch`, torchrun or srun, or as the only process.

    A run trains weights of its own: of an instance it takes the values. So two runs over the same modules or optimizer, which
    take steps in turn, are refused.

    Args:
        model: a build function, whose weights start as functions of (seed, name); or an instance, whose values stay; or several of
            these by name, with a `forward`. Those whose weights take no gradient are frozen.
        loss: (outputs, batch) -> (sum, count), or one of `samestep.whole_batch`, or a word of the key `train.loss`: "cross_entropy",
            "mse", or "model" for what the forward returns, which is then given the labels.
        optimizer: a function of the list of parameters, or of a list of (name, parameter); an instance over the model instance
            that has not stepped; or a list or a dict of these, which together hold each weight once.
        layout: one line of text such as "dp=2 zero=3"; empty replicates over all ranks.
        job: global batch, steps, seed, schedule, numerics, `optimizer.clip_norm`, and `data.labels`, which says what the labels of
            a causal model of transformers are for "cross_entropy". Its model, the rest of its data, its loss and the rest of
            its optimizer table are not read: the arguments above replace them.
        stages: names of modules with which the later stages of a pipeline may begin, such as ["encoder.3", "head"]; by default
            those of `job.model.stages`, and else blocks, or the calls of any modules.
        forward: a function of the model, or of the models by name, and of a batch with its labels, which returns the outputs that
            the loss is given; by default the model is called with what its forward takes of the batch.
        batch_dim: the dimension of the samples in the tensors that the forward and the loss are given, and in batches that a
            collate_fn or the loop puts together: 1 for a recurrent model over [tokens, samples].
        ema: models that follow others behind each step, {"teacher": ("student", 0.996)}: the decay is a number, or a function of the
            step. Such a model is frozen, and starts as a copy of the one that it follows, unless `model` has one of its name.
        offload: names of models, or of modules, whose weights take no gradient, such as ["reference"]: they are in the host's memory,
            and on the device while a forward or a backward reads them; by default those of `job.model.offload`.

    Raises:
        InputError: a model, optimizer or layout that cannot run; the text says what would.
    """
    job = (job or Job()).with_stages(stages).with_offload(offload)
    place, where = _joined(job, layout)
    averages = ModelAverages(ema or {})
    averages.check(where, job)
    whole = as_one(model, forward, {name: followed for name, (followed, _) in averages.following.items()})
    source = _source_of(whole, loss, optimizer, job)
    return Run(source, where, job, place, shared=SharedWeights(), batch_dim=batch_dim, averages=averages)


def _joined(job: Job, layout: str | Layout) -> tuple[RankInfo, Layout]:
    """Join the ranks of the job; return this rank's place among them, and the layout, which has as many ranks.

    Raises:
        LayoutError: it has another number, or its order of ranks does not fit the hosts.
    """
    had_joined = dist.is_initialized()
    place = join.join(job.run.device, timeout_s=job.run.timeout_s, ranks_per_node=job.run.ranks_per_node)
    where = Layout.parse(layout) if isinstance(layout, str) else layout
    if layout == "":
        where = Layout(dp_replicate=place.world_size)
    try:
        mesh.check_world(where)
        rank_order.check(where, place.hosts)
    except LayoutError:
        if not had_joined:  # a process in no group may still fork the ranks that the refusal asks for
            join.leave()
        raise
    return place, where


def _source_of(
    model: Built,
    loss: Loss | str,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | Mapping[str, OptimizerLike],
    job: Job,
) -> Source:
    """Return a model, a loss and an optimizer as a run takes them."""
    of_samples = scoped(named_loss(loss) if isinstance(loss, str) else loss, job)
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    return Source(model, of_samples, optimizer_source(optimizer, names), name)
