"""Rules between the keys of a job that only some jobs write: of held-out sets, and of replicas that compress or train independently."""

from __future__ import annotations

from samestep.errors import did_you_mean
from samestep.job_tables import HELD_OUT, DataTable, NumericsTable, TrainTable


def mistake_of_held_out_sets(data: DataTable, train: TrainTable) -> str | None:
    """Return the mistake in the names of held-out sets, with names that work; None if there is none."""
    sets, judge = data.held_out_sets, train.judged_by
    if HELD_OUT in sets:
        return f"data.held_out_sets.{HELD_OUT}: this is the name of the part of the data that is held out; another name works"
    if judge and judge not in (*sets, HELD_OUT):
        names = ", ".join(sets) if sets else "there are none"
        return f"train.judged_by = {judge!r} is no set of data.held_out_sets ({names}){did_you_mean(judge, list(sets))}"
    if judge == HELD_OUT and not data.held_out:
        return f'train.judged_by = "{HELD_OUT}" is the part of the data that is held out: data.held_out = 0.1 works'
    return None


def mistake_of_replicas(numerics: NumericsTable, batch: int) -> str | None:
    """Return why gradients cannot be compressed, or replicas cannot be trained independently, and what works; None if they can."""
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
