"""Pipelines of code that passes more than one tensor between its layers: equal to one device in every schedule, or refused.

float64, 1e-9, and the ledger. What crosses each boundary is read off the trace (`tracing/crossings.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests import traced
from tests.covering import daily
from tests.laboratory import Observed, assert_same, follow, job_of, perturbed
from tests.models import Tokens
from tests.parity import pipeline_models as models
from tests.parity import shared_models, stage_models
from tests.parity.test_odd_models import Pairs
from tests.pool import pool
from tests.unit.test_known_values import Mixture

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    dataset: Callable[[], Any] = Tokens
    loss: str = "cross_entropy"


def _images() -> Pairs:
    return Pairs((3, 12, 12), 4, classes=True)


EQUAL = {
    "gains": Case(models.Gains),
    "weighted": Case(models.Weighted),
    "soft_tokens": Case(models.SoftTokens),
    "first_values": Case(models.FirstValues),
    "given_weights": Case(models.GivenWeights),
    "called_twice": Case(models.CalledTwice),
    "vision": Case(models.Vision, _images),
    "plain": Case(models.Language),
    "without_gradients": Case(models.WithoutGradients),
    "fixed_point": Case(models.FixedPoint),
    "mixture_of_softmaxes": Case(models.MixtureOfSoftmaxes),
    "capped": Case(models.Capped),
    "first_residual": Case(models.FirstResidual),
    "skips": Case(models.Skips),
    "between": Case(models.Between),
    "all_states": Case(models.AllStates),
    "conditioned": Case(models.Conditioned),
    "two_lists": Case(models.TwoLists),
    "two_embeddings": Case(models.TwoEmbeddings),
    "positions_by_shape": Case(models.PositionsByShape),
    "pairs": Case(models.Pairs),
    "lists": Case(models.Lists),
    "states": Case(models.States),
    "recurrent": Case(models.Recurrent),
    "shared_bias": Case(models.SharedBias),
    "widths": Case(models.widths, lambda: Pairs((6,), 4), "mse"),
    "images": Case(models.images, _images),
    "last_layers_only": Case(models.last_layers_only),
    "head_only": Case(models.head_only),
    "frozen_condition": Case(models.frozen_condition),
    "low_stream": Case(models.LowStream),
    "high_stream": Case(models.HighStream),
    "in_place": Case(models.InPlace),
    "asking": Case(models.Asking),
    "dropped": Case(models.Dropped),
    "routed": Case(models.Routed),
    "own_function": Case(models.OwnFunction),
    "parts": Case(models.Parts),
    "views": Case(models.Views),
    "flattened": Case(models.Flattened),
    "two_uses": Case(models.TwoUses),
    "behind_back": Case(models.BehindBack),
    "one_norm": Case(models.OneNorm),
    "twice": Case(models.Twice),
    "repeated": Case(shared_models.Repeated),
    "adapted": Case(shared_models.Adapted),
    "tied_blocks": Case(shared_models.TiedBlocks),
    "three_stages": Case(shared_models.ThreeStages),
    "noting": Case(shared_models.Noting),
    "caching": Case(shared_models.Caching),
}


def _vectors() -> Pairs:
    return Pairs((6,), 4, classes=True)


CALLS = {
    "two_linear": Case(stage_models.TwoLinear, _vectors),
    "two_sequences": Case(stage_models.TwoSequences, _vectors),
    "convnet": Case(stage_models.ConvNet, _images),
    "normed": Case(stage_models.Normed, _images),
    "convolved": Case(stage_models.Convolved, _images),
    "unet": Case(stage_models.UNet, _images),
    "coder": Case(stage_models.Coder, _vectors),
    "lstm": Case(stage_models.Recurrent),
    "steps": Case(stage_models.Steps),
    "named": Case(stage_models.Named, _vectors),
    "wrapped": Case(stage_models.Wrapped, _images),
    "structured": Case(stage_models.Structured, _vectors),
    "attending": Case(stage_models.Attending),
    "checkpointed": Case(stage_models.Checkpointed, _vectors),
    "one_block": Case(stage_models.OneBlock),
    "spare_head": Case(stage_models.Frozen, _vectors),
    "sequential": Case(stage_models.sequential, _images),
}
"""Models without a list of blocks, whose stages begin with any call."""
VARYING = {how: Case(functools.partial(Mixture, how)) for how in ("nonzero", "counts", "mask")}
EQUAL |= VARYING
IN_FLOAT32 = {"automatic": Case(models.Automatic), "high_stream": EQUAL["high_stream"]}
REFUSED = {
    "hidden": (Case(models.Hidden), "blocks.1 reads a tensor of blocks.0 that is not passed on"),
    "carried": (Case(models.Carried), "reads a tensor of blocks.0 that is not passed on"),
    "written_through_view": (Case(models.WrittenThroughView), "add reads a tensor of add_ that is not passed on"),
    "single": (
        Case(stage_models.Single, _vectors),
        "pp=2 cuts the 1 call of a module of single into 2 stages: pp=1 works",
    ),
    "kept": (Case(stage_models.Kept, _vectors), "last: last reads a tensor of first that is not passed on"),
}
LAYOUTS = ("pp=2 microbatch=4", "pp=2 microbatch=2 schedule=zero-bubble recompute=full")


def _case(name: str) -> Case:
    known = EQUAL | IN_FLOAT32 | CALLS
    return known[name] if name in known else REFUSED[name][0]


def job_for(name: str, precision: str = "float64") -> Job:
    return job_of(precision, 2, train={"loss": _case(name).loss}, optimizer={"clip_norm": 0.5})


def run_of(rank: int, world: int, name: str, layout: str, job: Job) -> Run:
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    case, where = _case(name), Layout.parse(layout)
    source = Source(perturbed(case.build), loss_of(job), optimizer_of(job), name)
    example = next(batches(case.dataset(), job)).samples([0])
    return Run(
        replace(source, prepared=traced.prepared(f"stages {name}", source, job, example, where)), where, job, place
    )


def observe(rank: int, world: int, name: str, layouts: list[str], precision: str = "float64") -> list[Observed]:
    job = job_for(name, precision)
    return [follow(run_of(rank, world, name, layout, job), _case(name).dataset(), job, True) for layout in layouts]


@pytest.fixture(scope="module", autouse=True)
def _traced() -> None:
    """Trace all models before the first rank is forked."""
    for name in (*EQUAL, *IN_FLOAT32, *CALLS, *REFUSED):
        run_of(0, 1, name, "dp=1", job_for(name))


def hold(name: str, layouts: tuple[str, ...], ranks: int) -> None:
    (reference,) = observe(0, 1, name, ["dp=1"])
    found = pool(ranks).run(observe, name, list(layouts))
    for index, layout in enumerate(layouts):
        seen = [rank[index] for rank in found]
        assert_same(seen, reference, TOLERANCE)
        assert all(one.ledger == one.predicted for one in seen), layout


@pytest.mark.parametrize(
    ("layout", "name"),
    daily((layout, name) for name in EQUAL if name not in VARYING for layout in LAYOUTS),
)
def test_stages_compute_what_one_device_computes(layout: str, name: str) -> None:
    hold(name, (layout,), 2)


OF_CALLS = [
    ("two_linear", "pp=2 microbatch=2"),
    ("two_sequences", "pp=2 microbatch=4 schedule=zero-bubble"),
    ("convnet", "pp=2 microbatch=4 schedule=gpipe"),
    ("normed", "pp=2"),
    ("unet", "pp=2 schedule=interleaved virtual_stages=3 microbatch=2"),
    ("coder", "pp=2 microbatch=4"),
    ("lstm", "pp=2 microbatch=2"),
    ("steps", "pp=2 microbatch=4"),
    ("named", "pp=2 microbatch=4 schedule=zero-bubble"),
    ("structured", "pp=2 microbatch=4"),
    ("attending", "pp=2 microbatch=4 schedule=zero-bubble"),
    ("checkpointed", "pp=2 microbatch=4"),
    ("one_block", "pp=2 microbatch=4"),
    ("spare_head", "pp=2 microbatch=4"),
]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "others"])
def test_stages_begin_with_any_call_where_a_model_has_no_list_of_blocks(half: int) -> None:
    for name, layout in OF_CALLS[half::2]:
        hold(name, (layout,), 2)


@pytest.mark.parametrize(("name", "layout"), [("nonzero", LAYOUTS[1]), ("counts", LAYOUTS[0]), ("mask", LAYOUTS[0])])
def test_rows_that_scores_pick_within_blocks_close_no_stage(name: str, layout: str) -> None:
    hold(name, (layout,), 2)


COMPOSED = [
    ("convnet", "pp=4 microbatch=2"),
    ("convolved", "pp=4 microbatch=2 schedule=zero-bubble"),
    ("wrapped", "dp=2 pp=2 zero=3 microbatch=2"),
    ("unet", "dp=2 pp=2 zero=1 microbatch=1 schedule=zero-bubble"),
    ("normed", "dp=2 pp=2 zero=3"),
    ("sequential", "dp=2 pp=2 zero=2"),
    ("spare_head", "dp=2 pp=2 zero=3 microbatch=2"),
    ("steps", "dp=2 pp=2 zero=3 microbatch=2"),
    ("coder", "dp=2 pp=2 zero=2 microbatch=2"),
    ("checkpointed", "dp=2 pp=2 zero=3 microbatch=2"),
    ("first_residual", "dp=2 pp=2 zero=1 microbatch=1 schedule=zero-bubble"),
    ("two_uses", "dp=2 pp=2 zero=1 microbatch=1 schedule=zero-bubble"),
    ("two_uses", "dp=2 pp=2 microbatch=2 schedule=zero-bubble"),
    ("skips", "pp=4 microbatch=2"),
    ("states", "pp=4 microbatch=1 schedule=gpipe"),
    ("conditioned", "dp=2 pp=2 zero=3 microbatch=2"),
    ("last_layers_only", "dp=2 pp=2 zero=3 microbatch=2"),
    ("head_only", "dp=2 pp=2 zero=2 microbatch=2"),
    ("all_states", "dp=2 pp=2 microbatch=1 schedule=interleaved virtual_stages=2"),
    ("images", "dp=2 pp=2 microbatch=2"),
    ("gains", "dp=2 pp=2 zero=3 microbatch=2"),
    ("soft_tokens", "dp=2 pp=2 zero=2 microbatch=2"),
    ("gains", "dp=2 pp=2 zero=1 microbatch=1 schedule=interleaved virtual_stages=2"),
    ("first_values", "cp=2 pp=2 microbatch=2"),
    ("conditioned", "cp=2 pp=2 microbatch=2 schedule=zero-bubble recompute=full"),
    ("repeated", "pp=4 microbatch=2"),
    ("repeated", "dp=2 pp=2 microbatch=1 schedule=interleaved virtual_stages=2"),
    ("repeated", "dp=2 pp=2 zero=1 microbatch=1 schedule=interleaved virtual_stages=2"),
    ("repeated", "dp=2 pp=2 zero=2 microbatch=2"),
    ("repeated", "dp=2 pp=2 zero=3 microbatch=2 recompute=full"),
    ("adapted", "dp=2 pp=2 zero=3 microbatch=2"),
    ("adapted", "dp=2 pp=2 zero=1 microbatch=2 schedule=zero-bubble"),
    ("tied_blocks", "pp=4 microbatch=2 schedule=zero-bubble"),
    ("tied_blocks", "dp=2 pp=2 zero=3 microbatch=2"),
    ("twice", "dp=2 pp=2 zero=3 microbatch=2"),
    ("behind_back", "dp=2 pp=2 zero=3 microbatch=2"),
    ("three_stages", "pp=4 microbatch=2"),
    ("caching", "pp=4 microbatch=2"),
    ("three_stages", "dp=2 pp=2 zero=1 microbatch=1 schedule=interleaved virtual_stages=3"),
    ("three_stages", "dp=2 pp=2 zero=2 microbatch=2"),
]
"""Models and layouts of other axes; each setting of these once, the others nightly: that stages pass on what a model needs is held above."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=chosen.marks)
        for (name, layout), chosen in zip(COMPOSED, daily(layout for _, layout in COMPOSED), strict=True)
    ],
)
def test_stages_compose_with_other_axes(name: str, layout: str) -> None:
    hold(name, (layout,), 4)


def evaluated(rank: int, world: int, name: str, layout: str) -> tuple[float, torch.Tensor]:
    """Return a held-out loss and the outputs for three samples, which are fewer than a step has."""
    job, dataset = job_for(name), _case(name).dataset()
    run, batch = run_of(rank, world, name, layout, job), next(batches(dataset, job))
    run.step(batch)
    outputs = run.outputs(batch.samples(list(range(3))))
    return run.evaluate(batch)[0], outputs["logits"] if isinstance(outputs, dict) else outputs


@pytest.mark.parametrize("name", ["skips", "conditioned", "dropped", "in_place"])
def test_stages_evaluate_and_give_outputs_as_one_device_does(name: str) -> None:
    loss, outputs = evaluated(0, 1, name, "dp=1")
    for found, given in pool(2).run(evaluated, name, "pp=2 microbatch=4"):
        assert found == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(given, outputs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_dtype_of_ones_own_is_kept_in_float32_and_bf16(name: str) -> None:
    """Layouts with the same micro-batches round alike, up to the order of float32 sums."""
    for precision in ("float32", "bf16") if name != "automatic" else ("float32",):
        (reference,) = observe(0, 1, name, ["dp=1 microbatch=4"], precision)
        layouts = ["pp=2 microbatch=4", "pp=2 microbatch=4 schedule=zero-bubble"]
        for ranks in zip(*pool(2).run(observe, name, layouts, precision), strict=True):
            for one in ranks:
                assert one.losses == pytest.approx(reference.losses, rel=3e-6)
                assert one.ledger == one.predicted


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_passed_on_is_refused_by_name(name: str) -> None:
    case, text = REFUSED[name]
    with pytest.raises(LayoutError, match=text):
        run_of(0, 2, name, "pp=2 microbatch=4", job_for(name)).prepare(
            next(batches(case.dataset(), job_for(name))).samples([0])
        )
