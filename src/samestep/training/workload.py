"""The model, data, loss and optimizer of a job, built once and checked against each other before workers start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from samestep.building.families import CLASSES_FIELD, POSITIONS_FIELD, VOCABULARY_FIELD, setting
from samestep.building.loss import IGNORED_LABEL, loss_of, right_answers
from samestep.building.model import model_source
from samestep.building.optimizer import check_groups, learning_rate_factor, optimizer_of, unmatched
from samestep.building.predictions import target_of
from samestep.datasets import (
    Batch,
    Dataset,
    batches,
    classes_of,
    example_of,
    kind_of,
    of_held_out,
    of_words,
    open_dataset,
    open_held_out,
    open_tokenizer,
    remarks_on,
    sample_indices,
    stamps,
    token_ranges,
)
from samestep.errors import DataError, LayoutError, ModelError, SamestepError, to_words
from samestep.examination.examine import Loss, Source, examine
from samestep.examination.traced_model import TracedModel
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.job_tables import HELD_OUT
from samestep.layout import Layout
from samestep.models.spec import ModelAnalysis, ModelSpec, to_json
from samestep.runtime.axes.pipeline.recorded_flows import trace_for_layout
from samestep.runtime.run import Run
from samestep.runtime.run_batches import check_labels
from samestep.trees import tree_leaves

_TOKENS_LOOKED_AT = 2**24
"""About the number of tokens of a file whose largest id is compared with the vocabulary at once; steps look at those that they read."""


class Workload:
    """A job that is ready to run: its data is open, its model built on the meta device and traced.

    A forked worker inherits it; a spawned worker builds it again from the job.
    """

    def __init__(self, job: Job, layout: Layout | None = None) -> None:
        """Build and trace the model of a job, for one layout or for any."""
        self.job, self._layout = job, layout
        self.dataset = open_dataset(job, "train")
        self.held_out = open_held_out(job)
        optimizer = optimizer_of(job)
        learning_rate_factor(job)(job.schedule.warmup_steps)
        self.example = example_of(self.dataset)
        source = Source(model_source(job), loss_of(job), optimizer, job.model.source)
        prepared = examine(source, job, self.example, layout)
        _check_fit(job, prepared.module, self.dataset, self.example)
        check_labels(prepared.module, source.loss, job, self.dataset)
        for name in job.data.held_out_sets.keys() & self.held_out:
            _check_set(job, name, self.dataset, self.held_out[name])
            _check_fit(of_held_out(job, name), prepared.module, self.held_out[name], self.example)
            check_labels(prepared.module, source.loss, job, self.held_out[name])
        words = _num_words(prepared.module)
        self.dataset = of_words(self.dataset, words)
        self.held_out = {name: of_words(held_out, words) for name, held_out in self.held_out.items()}
        self._trained = [param.name for param in prepared.spec.params if param.trainable]
        check_groups(job.optimizer, self._trained)
        names = (job.optimizer.name, *(group.name or "" for group in job.optimizer.groups))
        if not any(
            ":" in name for name in names
        ):  # constructing a class of torch.optim checks its settings and the shapes
            trained = [param for param in prepared.spec.params if param.trainable]
            shapes = [(param.name, torch.empty(param.shape, device="meta")) for param in trained]
            optimizer([(name, torch.nn.Parameter(weight)) for name, weight in shapes])
        self.source = Source(source.model, source.loss, optimizer, source.name, prepared)

    def __reduce__(self) -> tuple[Any, ...]:
        return Workload, (self.job, self._layout)

    def trace_for(self, layout: Layout) -> None:
        """Trace what a layout needs to know of the model; the result replaces `source`."""
        prepared = trace_for_layout(self.source, layout, self.job, self.example)
        self.source = dataclasses.replace(self.source, prepared=prepared)

    def stamp(self) -> stamps.Stamp:
        """Return the stamp of the data, by which a resume detects that the data has changed."""
        return stamps.of_job(self.job, self.dataset)

    @property
    def analysis(self) -> ModelAnalysis:
        """The findings of the model's trace."""
        assert self.source.prepared is not None
        return self.source.prepared.analysis

    @property
    def spec(self) -> ModelSpec:
        """The shape of the traced model."""
        assert self.source.prepared is not None
        return self.source.prepared.spec

    @property
    def counted(self) -> str:
        """The word on the screen for the items that the loss counts: tokens, or "counted tok" where some labels are
        masked, or images or other samples that have one label each."""
        leaves = [leaf for leaf in tree_leaves(self.example) if isinstance(leaf, torch.Tensor)]
        if any(leaf.dim() > 1 and not leaf.is_floating_point() for leaf in leaves):
            return "counted tok" if any(_is_masked(leaf) for leaf in leaves) else "tok"
        return "images" if any(leaf.dim() == 4 for leaf in leaves) else "samples"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user about the folder of the model's values, and about patterns that match no weight."""
        assert self.source.prepared is not None
        stored = self.source.prepared.blueprint.stored
        return (*(stored.remarks() if stored else ()), *unmatched(self.job.optimizer, self._trained))

    @property
    def data_remarks(self) -> tuple[str, ...]:
        """Remarks for the user about the data, each with its file."""
        parts = (self.dataset, *self.held_out.values())
        return tuple(dict.fromkeys(remark for part in parts for remark in remarks_on(part)))


def _is_masked(leaf: torch.Tensor) -> bool:
    """Return whether some elements are labels that the loss does not count."""
    return not leaf.is_floating_point() and not leaf.is_meta and bool((leaf == IGNORED_LABEL).any())


def use_evaluated_weights(run: Run) -> AbstractContextManager[None]:
    """Return the context of evaluations and samples: with the averages of the weights where the job says so.

    Every rank must enter it.
    """
    return run.averaged() if run.job.train.evaluate_ema else nullcontext()


def held_out_losses(run: Run, workload: Workload) -> dict[str, float]:
    """Return the mean loss over samples of each held-out set, the same ones in every layout; every rank must call it."""
    return {name: _held_out_means(run, dataset)["loss"] for name, dataset in workload.held_out.items()}


def _held_out_means(run: Run, dataset: Dataset, measure: Loss | None = None) -> dict[str, float]:
    """Return the mean loss over held-out samples, and the means of a measure."""
    count = min(run.job.train.evaluate_samples, len(dataset))
    indices = sample_indices(0, count, len(dataset), run.job.train.seed)
    return run.evaluate(Batch(0, indices, dataset), measure)


def describe_losses(losses: Mapping[str, float], judge: str | None) -> str:
    """Return validation losses as a part of a line: first the one that decides."""
    if judge is None:
        return ""
    of = "" if judge == HELD_OUT else f" of {judge}"
    others = [f"{name} {loss:.4f}" for name, loss in losses.items() if name != judge]
    return ", ".join([f"validation loss{of} {losses[judge]:.4f}", *others])


def held_out_accuracy(run: Run, workload: Workload) -> float | None:
    """Return the fraction of the held-out samples whose class is found, of the set that decides; None where samples have no
    class each.

    Every rank must call it.
    """
    labels = target_of(workload.example) if workload.job.train.loss == "cross_entropy" else None
    judge = workload.job.judge
    if judge is None or labels is None or labels.dim() != 1 or labels.is_floating_point():
        return None
    return _held_out_means(run, workload.held_out[judge], right_answers)[right_answers.__name__]


def _check_set(job: Job, name: str, dataset: Dataset, held_out: Dataset) -> None:
    """Refuse a held-out set whose samples have other tensors than those on which the model is traced.

    Raises:
        DataError: its tensors differ.
    """
    if (theirs := kind_of(held_out)) != (ours := kind_of(dataset)):
        raise DataError(
            "data-form",
            f"data.held_out_sets.{name}: a sample of {job.data.held_out_sets[name]} has {theirs}, but one of {job.data.source} (training data) "
            f"has {ours}. Use a source of the same kind",
        )


def _check_fit(job: Job, model: torch.nn.Module, dataset: Dataset, example: Any) -> None:
    """Refuse token ids and lengths for which a transformers model has no embeddings, and classes for which it has no outputs."""
    words, positions = _num_words(model), setting(model, POSITIONS_FIELD)
    if words is not None:
        _check_tokens(job, VOCABULARY_FIELD, words, dataset)
    classes, labels = classes_of(dataset), setting(model, CLASSES_FIELD)
    if isinstance(labels, int) and len(classes) > labels:
        raise ModelError(
            "model-data-sizes",
            f"{job.data.source} has {len(classes)} classes, but model.config.{CLASSES_FIELD} = {labels}. Set "
            f"model.config.{CLASSES_FIELD} = {len(classes)}",
        )
    length = example["input_ids"].shape[-1] if isinstance(example, dict) and "input_ids" in example else 0
    if isinstance(positions, int) and length > positions > 0:
        raise ModelError(
            "model-data-sizes",
            f"samples of {length} tokens are longer than model.config.{POSITIONS_FIELD} = {positions}. Set "
            f"data.sequence_length = {positions}, or {POSITIONS_FIELD} = {length}",
        )


def _num_words(model: torch.nn.Module) -> int | None:
    """Return the number of tokens for which a transformers model has embeddings; None for other models."""
    words = setting(model, VOCABULARY_FIELD)
    return words if isinstance(words, int) else None


def _check_tokens(job: Job, field: str, words: int, dataset: Dataset) -> None:
    """Refuse token ids that have none of the `words` embeddings of a model; `field` is that of its configuration."""
    works = field if model_folder(job) is None else "model.resize_embeddings"
    if job.data.is_text:
        if (known := open_tokenizer(job).vocab_size) > words:
            raise ModelError(
                "model-data-sizes",
                f"the tokenizer has token ids up to {known - 1}, but model.config.{field} = {words}. Use {works} = {known}",
            )
        return
    for token_range in token_ranges(dataset, _TOKENS_LOOKED_AT):
        file = token_range.file or job.data.source
        if token_range.least < 0:
            raise DataError(
                "token-ids",
                f"{file} has the token id {token_range.least}. Use ids from 0, or another data.dtype if it is wrong",
            )
        if token_range.most >= words:
            raise ModelError(
                "model-data-sizes",
                f"{file} has token ids up to {token_range.most}, but model.config.{field} = {words}. Use {works} = {token_range.most + 1}, or another "
                "data.dtype if it is wrong",
            )


def write_spec(job_json: str) -> None:
    """Trace the model of a job given as JSON and print its spec as JSON; `models.catalog` runs this in a subprocess.

    Everything else that is printed on the way goes to standard error.

    Raises:
        SystemExit: the model cannot be built; the error has been printed in its words, as JSON, and the status is 2.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec = to_json(trace_job(Job.model_validate_json(job_json)).spec)
    except SamestepError as error:
        print(json.dumps(to_words(error)))
        raise SystemExit(2) from None
    print(spec)


def trace_job(job: Job) -> TracedModel:
    """Return the traced model of a job, with what `cp=2` and `tp=2 sequence_parallel` need to know of it.

    A language model of transformers is traced without opening the data.

    Raises:
        InputError: the data cannot be read, or the model cannot be built or traced.
    """
    example: Any
    if job.model.takes_tokens:
        tokens = torch.zeros(1, job.data.sequence_length, dtype=torch.int64)
        source = Source(model_source(job), loss_of(job), optimizer_of(job), job.model.source)
        example = {"input_ids": tokens, "labels": tokens}
    else:
        workload = Workload(job)
        example, source = workload.example, workload.source
    traced = examine(source, job, example)
    for layout in (Layout(cp=2), Layout(tp=2, sequence_parallel=True)):
        with contextlib.suppress(LayoutError):  # where the layout is used, its refusal is raised
            traced = examine(dataclasses.replace(source, prepared=traced), job, example, layout)
    return traced


def step_samples(job: Job, layout: Layout, dataset: Dataset, num_microbatches: int) -> Sequence[np.ndarray[Any, Any]]:
    """Return the sample indices that each rank of the data axis reads in step 1."""
    batch = next(iter(batches(dataset, job)))
    return [np.concatenate(batch.shares(rank, layout.dp, num_microbatches)) for rank in range(layout.dp)]
