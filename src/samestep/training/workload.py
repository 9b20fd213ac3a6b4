"""What a job asks for: its model, data and loss, built once and checked against each other."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from samestep.building.families import facts_of
from samestep.building.loss import loss_of
from samestep.building.model import model_source
from samestep.building.optimizer import optimizer_of
from samestep.datasets import Batch, Dataset, batches, open_dataset, open_tokenizer
from samestep.errors import (
    ModelError,
    SamestepError,
)
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.runtime.assembly import Source, prepare, with_slices

_TOKENS_LOOKED_AT = 2**24
"""Of a file of tokens, which may be far larger than memory."""


class Workload:
    """A job made ready to run: data opened, model built on the meta device and traced.

    A forked worker inherits it; where workers are spawned it is made again from the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.dataset = open_dataset(job, "train")
        evaluates = job.train.evaluate_samples and job.data.held_out
        self.held_out = open_dataset(job, "held_out") if evaluates else None
        optimizer = optimizer_of(job)
        self.example = Batch(0, np.arange(1), self.dataset).samples([0])
        source = Source(model_source(job), loss_of(job), optimizer, job.model.source)
        prepared = prepare(source, job, self.example)
        _check_fit(job, prepared.module, self.dataset, self.example)
        if ":" not in job.optimizer.name:  # a class of torch.optim says at once whether its settings and shapes fit
            shapes = [(param.name, torch.empty(param.shape, device="meta")) for param in prepared.spec.params]
            optimizer([(name, torch.nn.Parameter(weight)) for name, weight in shapes])
        self.source = Source(source.model, source.loss, optimizer, source.name, prepared)

    def __reduce__(self) -> tuple[Any, ...]:
        return Workload, (self.job,)

    def slice(self, layout: Layout) -> None:
        """Find out how the model's sequences can be sliced, where the layout asks for it."""
        assert self.source.prepared is not None
        self.source = dataclasses.replace(self.source, prepared=with_slices(self.source.prepared, layout, self.example))

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        assert self.source.prepared is not None
        return self.source.prepared.spec


def _is_text(job: Job) -> bool:
    """Whether the samples are made by the job's tokenizer."""
    return job.data.source.partition(":")[0] in ("topics", "stdlib", "text", "jsonl", "hf")


def _check_fit(job: Job, model: torch.nn.Module, dataset: Dataset, example: Any) -> None:
    """Refuse tokens and sequences that a transformers model has no embeddings for."""
    facts = facts_of(model)
    words, positions = facts.setting(model, facts.vocabulary_field), facts.setting(model, facts.positions_field)
    if isinstance(words, int):
        known, whose = 0, job.data.source
        if _is_text(job):
            known, whose = open_tokenizer(job).vocab_size, "the tokenizer"
        elif isinstance(tokens := getattr(dataset, "tokens", None), np.ndarray):
            known = int(tokens[:_TOKENS_LOOKED_AT].max()) + 1
        if known > words:
            raise ModelError(
                f"{whose} has tokens up to {known - 1}, but model.config.{facts.vocabulary_field} = {words}; {known} works"
            )
    length = example["input_ids"].shape[-1] if isinstance(example, dict) and "input_ids" in example else 0
    if isinstance(positions, int) and length > positions > 0:
        raise ModelError(
            f"samples of {length} tokens are longer than model.config.{facts.positions_field} = {positions}; "
            f"data.sequence_length = {positions} works, or {facts.positions_field} = {length}"
        )


def write_spec(job_json: str) -> None:
    """Trace the model of a job given as JSON and print its spec: what `catalog` runs in a subprocess.

    Exits with 2 and prints the error instead where the model cannot be built. Whatever else speaks goes to stderr.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = _traced(Job.model_validate_json(job_json)).to_json()
    except SamestepError as error:
        print(error)
        raise SystemExit(2) from None
    print(answer)


def _traced(job: Job) -> ModelSpec:
    """Return the model's shape; that of a transformers model needs none of the data."""
    if not job.model.source.startswith("hf:"):
        return Workload(job).spec
    tokens = torch.zeros(1, job.data.sequence_length, dtype=torch.int64)
    source = Source(model_source(job), loss_of(job), optimizer_of(job), job.model.source)
    example = {"input_ids": tokens, "labels": tokens}
    return with_slices(prepare(source, job, example), Layout(cp=2), example).spec


def step_samples(job: Job, layout: Layout, dataset: Dataset) -> Sequence[np.ndarray[Any, Any]]:
    """Return the sample indices that each rank of the data axis reads in step 1."""
    batch = next(iter(batches(dataset, job)))
    return [np.concatenate(batch.shares(rank, layout.dp, 1)) for rank in range(layout.dp)]
