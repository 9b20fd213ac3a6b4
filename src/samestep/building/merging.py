"""A model whose adapters are added into its weights: the model of the job without `model.lora`, and the value of each of its tensors.

Embedding and head may be one weight in the model without adapters and two values after training: one of them has an adapter, or is
trained whole as a module of its own (`modules_to_save`). The merged model then has two weights, and its configuration says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samestep.building import adapters
from samestep.building.adapters import Value
from samestep.building.families import untied_fields
from samestep.building.initial_values import Blueprint
from samestep.building.model import blueprint_of, without_adaptation
from samestep.errors import JobError
from samestep.job import Job
from samestep.job_tables import LoraTable


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A model without adapters, and the model with adapters from which its weights are computed."""

    plan: Blueprint
    """The model without adapters."""
    job: Job
    """Its job."""
    adapted: Blueprint
    lora: LoraTable

    @classmethod
    def of(cls, adapted: Blueprint, job: Job) -> Merged:
        """Return the merged form of a job's model, in which tied weights that were trained separately are two.

        Raises:
            JobError: the job has no adapters, or they train separately what the model always ties.
        """
        lora = job.model.lora
        if lora is None:
            raise JobError(
                "--merge adds adapters into weights, and the run has none (model.lora): without --merge it works"
            )
        bare = without_adaptation(job)
        plan = blueprint_of(bare)
        if (
            job.model.source.startswith("hf:")
            and _find_untied_pair(plan, adapted)
            and (untied := untied_fields(plan.module))
        ):
            bare = bare.model_copy(
                update={"model": bare.model.model_copy(update={"config": _override_fields(bare, untied)})}
            )
            plan = blueprint_of(bare)
        if apart := _find_untied_pair(plan, adapted):
            raise JobError(
                f"--merge: model.lora trains {apart[0]} and {apart[1]} apart, and {type(plan.module).__name__} has one "
                "weight for them in any configuration: without --merge the adapters themselves are written"
            )
        return cls(plan, bare, adapted, lora)

    def values(self, value: Value) -> Value:
        """Return a function from a tensor's name to its merged value; `value` is that function of the model with
        adapters."""
        return adapters.merge_adapters(self.adapted.module, self.adapted.canonical, value, self.lora)


def _find_untied_pair(plan: Blueprint, adapted: Blueprint) -> tuple[str, str] | None:
    """Return two names of one tensor whose values the model with adapters makes of different tensors; None if there are none."""
    sources = {
        base: (adapted.canonical[name], name if is_adapted else "")
        for base, (name, is_adapted) in adapters.origins(adapted.canonical).items()
    }
    for name, first in plan.canonical.items():
        if sources.get(name) != sources.get(first):
            return first, name
    return None


def _override_fields(job: Job, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job's model with others in their place, also within tables."""
    joined = dict(job.model.config)
    for name, value in fields.items():
        joined[name] = {**joined.get(name, {}), **value} if isinstance(value, dict) else value
    return joined
