"""Traced models: each is built and traced once in the pytest process, and what is forked after that inherits it.

To trace a model takes longer than the few steps that a test takes of it. A pool of ranks that was forked before the model of its
next job was traced is built anew (`pool.py`), which costs less than to trace it once more on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.examination.examine import Source, examine
from samestep.examination.traced_model import TracedModel
from samestep.job import Job
from samestep.job_paths import model_folder
from samestep.layout import Layout
from samestep.models import catalog
from samestep.models.spec_json import to_json
from samestep.runtime import assembly
from samestep.runtime.axes.pipeline import recorded_flows
from samestep.training import workload

_KNOWN: dict[Hashable, TracedModel] = {}
_asked: set[Hashable] = set()


def known() -> dict[Hashable, TracedModel]:
    """Return what this process has traced so far."""
    return dict(_KNOWN)


def is_asked_beyond(inherited: dict[Hashable, TracedModel]) -> bool:
    """Whether a model was asked for since the last call of which ranks that inherited these know too little."""
    beyond = any(inherited.get(key) is not _KNOWN[key] for key in _asked)
    _asked.clear()
    return beyond


def prepared(
    key: Hashable, source: Source, job: Job, example: Any, layout: Layout, *, for_any: bool = False
) -> TracedModel:
    """Return what `examine` finds out for the layout; each finding is found once.

    `key` names the model and its loss: sources of one key are the same. `for_any` proves the plan of tensor parallelism of a
    model that other tests cut, although this layout does not.
    """
    key = (key, job.train.loss, job.train.seed)
    if for_any:
        _KNOWN[key] = examine(replace(source, prepared=_KNOWN.get(key)), job, example)
    found = recorded_flows.trace_for_layout(replace(source, prepared=_KNOWN.get(key)), layout, job, example)
    _KNOWN[key] = found
    _asked.add(key)
    return copied(found)


def copied(traced: TracedModel) -> TracedModel:
    """Return a traced model with a module of its own, for a run to cut and fill."""
    return replace(traced, blueprint=replace(traced.blueprint, module=_copy_of(traced.module)))


@contextmanager
def families_once() -> Iterator[None]:
    """Let the command line trace a model of a family (`hf:llama`) once in all its runs of this process."""

    def once(source: Source, job: Job, example: Any, layout: Layout | None = None) -> TracedModel:
        if source.prepared is None and job.model.source.startswith("hf:") and source.name == job.model.source:
            shapes = str(tree_map_only(Tensor, lambda tensor: (tensor.dtype, tensor.shape), example))
            known = prepared((job.model.model_dump_json(), shapes), source, job, example, Layout(), for_any=True)
            source = replace(source, prepared=known)
        return examine(source, job, example, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload, "examine", once)
        patch.setattr(assembly, "examine", once)
        patch.setattr(recorded_flows, "examine", once)
        yield


@contextmanager
def specs_here() -> Iterator[None]:
    """Let the catalog trace models of transformers and of samestep in this process: a new one imports torch for 3 s to do it.

    Code of a user is traced in a process of its own, as always; so are all models in commands that a test starts as new processes.
    """
    elsewhere = catalog._trace_elsewhere

    def trace(job: Job) -> str:
        if not job.model.source.startswith(("hf:", "samestep.")) or model_folder(job) is not None:
            return elsewhere(job)
        return to_json(workload.trace_job(job).spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "_trace_elsewhere", trace)
        yield


def _copy_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module, in which a tensor that it computes from its weights, as a weight norm does, is a plain one."""
    computed = (
        one for part in module.modules() for one in vars(part).values() if isinstance(one, Tensor) and not one.is_leaf
    )
    return copy.deepcopy(module, {id(one): one.detach() for one in computed})
