"""Traced models: each is built and traced once in the pytest process, and what is forked after that inherits it.

To trace a model takes longer than the few steps that a test takes of it. A pool of ranks that was forked before the model of its
next job was traced is built anew (`pool.py`), which costs less than to trace it once more on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import io
import marshal
import pickle
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.errors import InputError
from samestep.examination.examine import Source, build_blueprint, examine
from samestep.examination.traced_model import TracedModel
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.layout import Layout
from samestep.models import catalog
from samestep.models.spec import to_json
from samestep.runtime import assembly
from samestep.runtime.axes.pipeline import recorded_flows
from samestep.tracing.trace import samples_traced, trace_whole_batch
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
def alike_once() -> Iterator[None]:
    """Let a session examine code that is the same to the byte once, on whichever rank and for however many layouts: a folder has the findings.

    Each run builds its model anew, or takes the instance that it is given, and has its own weights. Ranks that begin with the same code
    wait for the first of them; what it refuses in a layout they refuse alike. What has no bytes, as a class within a test, is examined each time.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-examined-") as folder, pytest.MonkeyPatch.context() as patch:

        def once(source: Source, job: Job, example: Any, layout: Layout | None = None) -> TracedModel:
            key = _digest(source, job, example) if source.prepared is None else None
            if key is None:
                return examine(source, job, example, layout)
            refusal = Path(folder, f"{key} {layout}".replace("/", " "))
            with _held(Path(folder, key)) as stored:
                if known := stored.read_bytes():
                    source = replace(source, prepared=_read(known, source, job))
                if refusal.exists():
                    raise pickle.loads(refusal.read_bytes())
                try:
                    prepared = examine(source, job, example, layout)
                except InputError as error:
                    with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
                        refusal.write_bytes(pickle.dumps(error))
                    raise
                if prepared is not source.prepared:
                    with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):  # findings without bytes
                        stored.write_bytes(_written(prepared))
                return prepared

        for room in (assembly, recorded_flows):
            patch.setattr(room, "examine", once)
        yield


@contextmanager
def _held(path: Path) -> Iterator[Path]:
    """Hold a file, which is empty at first, for this process alone."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def _written(found: TracedModel) -> bytes:
    """Return the findings of an examination, without the model and the flows of its tensors."""
    return pickle.dumps((found.analysis, found.cuts, found.keeps_double, samples_traced(found.module)))


def _read(stored: bytes, source: Source, job: Job) -> TracedModel:
    """Return stored findings with a new blueprint of a source."""
    analysis, cuts, keeps_double, num_samples = pickle.loads(stored)
    plan = build_blueprint(source, job, source.owner)
    trace_whole_batch(plan.module, num_samples)
    return TracedModel(plan, analysis, cuts, keeps_double)


class _Bytes(pickle.Pickler):
    """Writes tensors by their elements, where torch writes where its storages lie in memory, and functions within others by their code."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the parts of a tensor that are written."""
        if isinstance(obj, FunctionType) and "<" in obj.__qualname__:
            code, cells = obj.__code__, [cell.cell_contents for cell in obj.__closure__ or ()]
            return _as_written, (obj.__module__, marshal.dumps(code), cells, obj.__defaults__, obj.__kwdefaults__)
        if not isinstance(obj, Tensor):
            return NotImplemented
        if obj._backward_hooks or obj._post_accumulate_grad_hooks:
            raise ValueError("a hook has no bytes")
        elements = obj.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _as_written, (type(obj), obj.dtype, obj.shape, obj.requires_grad, elements, vars(obj))


def _as_written(*_: Any) -> None:
    """Stand for a tensor that is written; nothing is read."""


def _digest(source: Source, job: Job, example: Any) -> str | None:
    """Return a digest of all that an examination reads; None of what has no bytes, as a function within a test."""
    try:
        written = io.BytesIO()
        is_owned = source.owner is not None
        given = job.model_dump_json(exclude={"layout"})
        _Bytes(written).dump((source.model, source.loss, source.name, is_owned, given, example))
    except Exception:  # of the user's own classes
        return None
    return hashlib.sha256(written.getvalue()).hexdigest()


@contextmanager
def specs_here() -> Iterator[None]:
    """Let the catalog trace models of transformers, of samestep and of examples in this process: a new one imports torch for 3 s to do it.

    Code of a user is traced in a process of its own, as always; so are all models in commands that a test starts as new processes.
    """
    elsewhere = catalog._trace_elsewhere

    def trace(job: Job) -> str:
        if not job.model.source.startswith(("hf:", "samestep.", "examples.")) or model_folder(job) is not None:
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
