"""Layouts in the words of other frameworks, for `samestep plan --to`: one file for each framework, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samestep.errors import InputError, did_you_mean
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import catalog
from samestep.models.published import as_published
from samestep.models.spec import ModelSpec
from samestep.wings.plan.recipes.accelerate import ACCELERATE
from samestep.wings.plan.recipes.deepspeed import DEEPSPEED
from samestep.wings.plan.recipes.fsdp import FSDP
from samestep.wings.plan.recipes.megatron import MEGATRON
from samestep.wings.plan.recipes.recipe import Framework, Recipe, recipe_of
from samestep.wings.plan.recipes.torchtitan import TORCHTITAN
from samestep.wings.plan.simulation.simulate import Prediction

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework for framework in (MEGATRON, TORCHTITAN, DEEPSPEED, FSDP, ACCELERATE)
}


def framework_of(name: str) -> Framework:
    """Return the framework of a name.

    Raises:
        InputError: there is none of this name.
    """
    if name not in FRAMEWORKS:
        raise InputError(
            "recipe-unknown", f"--to {name} must be one of {', '.join(FRAMEWORKS)}{did_you_mean(name, FRAMEWORKS)}"
        )
    return FRAMEWORKS[name]


def emit(framework: str, job: Job, layout: Layout, model: ModelSpec, hardware: Hardware) -> Recipe:
    """Return a layout in the words of a framework, with what it cannot do of it.

    Raises:
        InputError: there is no framework of this name.
    """
    return recipe_of(framework_of(framework), job, layout, model, hardware)


def emit_predicted(framework: str, job: Job, rows: Sequence[Prediction]) -> Recipe:
    """Return the first of some predicted layouts in the words of a framework, and a line with the fastest that it can do in whole."""
    job, _ = as_published(job)
    model = catalog.model_spec(job)
    best = emit(framework, job, rows[0].layout, model, rows[0].hardware)
    if best.is_whole:
        return best
    for row in rows[1:]:
        if emit(framework, job, row.layout, model, row.hardware).is_whole:
            slower = row.step_s / rows[0].step_s - 1
            line = (
                f'{framework} can do all of "{row.layout}", {slower:.1%} slower: simulate --layout with --to writes it'
            )
            return replace(best, instead=(line,))
    return best
