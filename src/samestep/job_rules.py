"""The rules between the keys of a job, each a function that returns the mistake of a job that breaks it, and how mistakes are worded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from samestep.errors import did_you_mean, short_repr
from samestep.job_tables import HELD_OUT, CheckpointTable, DataTable, NumericsTable, TrainTable, types_in
from samestep.optimizer_tables import ScheduleTable


class Tables(Protocol):
    """The tables of a job between whose keys there are rules."""

    data: DataTable
    train: TrainTable
    schedule: ScheduleTable
    numerics: NumericsTable
    checkpoint: CheckpointTable


def _warmup(job: Tables) -> str | None:
    steps, warmup = job.train.steps, job.schedule.warmup_steps
    if warmup <= steps:
        return None
    return (
        f"schedule.warmup_steps = {warmup} is more than train.steps = {steps}; "
        f"at most {steps} works, and so do more steps (--set schedule.warmup_steps=0 --set train.steps=...)"
    )


def _evaluations(job: Tables) -> str | None:
    if job.train.evaluate_every or not (job.train.patience or job.checkpoint.keep_best):
        return None
    key = "train.patience" if job.train.patience else "checkpoint.keep_best"
    return f"{key} needs evaluations while the run trains: train.evaluate_every = 100 works"


def _held_out_sets(job: Tables) -> str | None:
    sets, judge = job.data.held_out_sets, job.train.judged_by
    if HELD_OUT in sets:
        return f"data.held_out_sets.{HELD_OUT}: this is the name of the part of the data that is held out; another name works"
    if judge and judge not in (*sets, HELD_OUT):
        names = ", ".join(sets) if sets else "there are none"
        return f"train.judged_by = {judge!r} is no set of data.held_out_sets ({names}){did_you_mean(judge, list(sets))}"
    if judge == HELD_OUT and not job.data.held_out:
        return f'train.judged_by = "{HELD_OUT}" is the part of the data that is held out: data.held_out = 0.1 works'
    return None


def _rollback(job: Tables) -> str | None:
    if job.numerics.on_spike != "rollback" or job.checkpoint.every:
        return None
    return (
        'numerics.on_spike = "rollback" goes back to a checkpoint, and checkpoint.every = 0 writes none before the end: '
        'checkpoint.every = 100 works, and so does numerics.on_spike = "skip"'
    )


def _averages(job: Tables) -> str | None:
    if job.train.evaluate_ema and job.train.ema is None:
        return "train.evaluate_ema evaluates the averages of weights: train.ema = 0.999 makes them"
    if job.train.ema is not None and job.numerics.exchange_every > 1:
        return (
            f"train.ema averages the weights of every step, and numerics.exchange_every = {job.numerics.exchange_every} "
            "trains replicas apart, whose weights are one model only where they exchange: one of them alone works"
        )
    return None


def _decay(job: Tables) -> str | None:
    decay, left = job.schedule.decay_steps, job.train.steps - job.schedule.warmup_steps
    if decay <= left:
        return None
    return f"schedule.decay_steps = {decay} is more than the {left} steps after warm-up; that many work, or fewer"


def _coupled_samples(job: Tables) -> str | None:
    coupled, batch = job.numerics.coupled_samples, job.train.global_batch
    if coupled is None or not batch % coupled:
        return None
    near = max(n for n in range(1, min(coupled, batch) + 1) if batch % n == 0)
    return (
        f"numerics.coupled_samples = {coupled} does not divide train.global_batch = {batch} into groups: "
        f"coupled_samples = {near} works"
    )


def _mixture(job: Tables) -> str | None:
    if (job.data.source == "mixture") == bool(job.data.mixture):
        return None
    return (
        f'data.source = "{job.data.source}" with {len(job.data.mixture)} sources in data.mixture: '
        'source = "mixture" and a table [data.mixture] with a line such as "text:PATH" = 0.5 for each source work'
    )


def _replicas(job: Tables) -> str | None:
    """Return why gradients cannot be compressed, or replicas cannot be trained independently, and what works; None if they can."""
    numerics, batch = job.numerics, job.train.global_batch
    kind, replicas = numerics.compression, numerics.replicas
    every, states = numerics.exchange_every, numerics.optimizer_states
    if kind == "none" and every == 1 and replicas > 1:
        return (
            f"numerics.replicas = {replicas} says how many gradients are compressed, and none is: replicas = 1 works, "
            'and so does numerics.compression = "int8", or numerics.exchange_every = 20'
        )
    if every > 1 and replicas == 1:
        return (
            f"numerics.exchange_every = {every} is the number of steps that numerics.replicas take apart from each other: "
            "replicas = 2 or more works, as many as the links are slow between"
        )
    if mistake := _mistake_of_exchange_times(numerics):
        return mistake
    if every > 1 and states != "float32":
        return f'numerics.optimizer_states = "{states}" is not proven with numerics.exchange_every = {every}: "float32" works'
    if kind != "none" and replicas == 1:
        return (
            f'numerics.compression = "{kind}" compresses the gradients of numerics.replicas parts of a batch: '
            "replicas = 2 or more works, as many as the links are slow between"
        )
    if replicas > 1 and numerics.coupled_samples is not None:
        return (
            f"numerics.coupled_samples = {numerics.coupled_samples} and numerics.replicas = {replicas} both say which "
            "samples belong together: one of them alone works"
        )
    if batch % replicas:
        return (
            f"numerics.replicas = {replicas} does not divide train.global_batch = {batch} into equal parts; "
            f"global_batch = {-(-batch // replicas) * replicas} works"
        )
    return None


def _mistake_of_exchange_times(numerics: NumericsTable) -> str | None:
    """Return why replicas cannot exchange parts of their weights, or later than they begin to, and what works."""
    every, parts, delay = (getattr(numerics, f"exchange_{word}") for word in ("every", "parts", "delay"))
    if every == 1 and (parts > 1 or delay):
        key = f"exchange_parts = {parts}" if parts > 1 else f"exchange_delay = {delay}"
        return (
            f"numerics.{key} says how replicas exchange what their weights have moved by, and numerics.exchange_every = 1 "
            "trains none apart: exchange_every = 20 works"
        )
    if parts > every:
        return (
            f"numerics.exchange_parts = {parts} parts cannot be exchanged at different steps of "
            f"numerics.exchange_every = {every}: exchange_parts = {every} works, or fewer"
        )
    if delay > every // parts:
        return (
            f"numerics.exchange_delay = {delay} is longer than the {every // parts} steps between the exchanges of two of "
            f"numerics.exchange_parts = {parts} parts in numerics.exchange_every = {every}: exchange_delay = {every // parts} works"
        )
    return None


RULES: tuple[Callable[[Tables], str | None], ...] = (
    _warmup,
    _evaluations,
    _held_out_sets,
    _rollback,
    _averages,
    _decay,
    _replicas,
    _coupled_samples,
    _mixture,
)
"""All rules, in the order in which they are asked; each returns the mistake, with the values that work, or None."""


def mistakes_in(error: ValidationError, source: Callable[[str], str], job: type[BaseModel]) -> str:
    """Return all mistakes in the tables of a job, one a line: the origin, the key, what was given and what would be right."""
    lines = []
    for mistake in error.errors(include_url=False):
        path = [str(part) for part in mistake["loc"]]
        key = ".".join(path)
        if mistake["type"] == "extra_forbidden":
            known = _keys_of(path[:-1], job)
            text = f"unknown key{did_you_mean(path[-1], known)}; the keys here are {', '.join(known)}"
        elif mistake["type"] == "value_error":
            text = re.sub(r"^Value error, ", "", mistake["msg"])
        else:
            text = f"{mistake['msg'][0].lower()}{mistake['msg'][1:]}, got {short_repr(mistake['input'])}"
        lines.append(f"{source(key)}: {key}: {text}" if key else f"{source(key)}: {text}")
    return "\n".join(lines)


def _keys_of(path: Sequence[str], job: type[BaseModel]) -> list[str]:
    """Return the names of the keys of the table at `path`."""
    table: Any = job
    for part in (one for one in path if not one.isdecimal()):  # an entry of an array of tables
        field = table.model_fields.get(part)
        kinds = types_in(field.annotation) if field else ()
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            return []
    return list(table.model_fields)
