"""The layouts that a plan considers: every split of the devices over the axes, and every switch of each.

    degrees      tp x pp x cp x data ranks, with ep among these
    splits       of the data ranks into replicas and shards, with ZeRO stages
    sized        micro-batches
    variants     schedules, and recomputation, of each the quickest first

Nothing here asks whether a strategy refuses a layout, but where a whole axis would be refused for the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout, Recompute
from samestep.model import ModelSpec
from samestep.schedules import DEFAULT, SCHEDULES
from samestep.strategies import sequence

MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""Samples of a micro-batch that are tried, beside a rank's whole share."""


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def degrees(devices: int, model: ModelSpec) -> Iterator[Layout]:
    """Yield every split of the devices over the axes of the model; where a tensor cut can cut the sequence too, it does,
    which sends the same bytes and keeps less."""
    blocks = sum(layer.is_block for layer in model.layers)
    experts = math.gcd(*(param.experts for param in model.params if param.experts))
    for tp in _divisors(devices):
        cuts_sequence = tp > 1 and sequence.refuse_model(model, tp) is None
        for pp in _divisors(devices // tp):
            for cp in _divisors(devices // tp // pp) if pp <= max(1, blocks) else ():
                if cp > 1 and (model.slice_refusal or model.length % cp):
                    continue
                ranks = devices // tp // pp // cp
                cuts = cp == 1 and cuts_sequence
                base = Layout(tp=tp, pp=pp, cp=cp, dp_replicate=ranks, sequence_parallel=cuts)
                yield base
                for ep in _divisors(ranks * cp)[1:] if experts else ():
                    if experts % ep == 0:
                        yield replace(base, ep=ep)


def splits(degrees: Layout, hardware: Hardware) -> Iterator[Layout]:
    """Yield the ways to replicate and shard over the data axis: all of it, or the part of it that lies in a node."""
    dp = degrees.dp
    inside = max(1, hardware.devices_per_node // degrees.tp // degrees.cp)
    if dp * degrees.cp % degrees.ep == 0:
        yield degrees
    for shard in sorted({dp, *([inside] if 1 <= inside < dp and dp % inside == 0 else [])}):
        for zero in (1, 2, 3) if shard * degrees.cp > 1 and shard * degrees.cp % degrees.ep == 0 else ():
            yield replace(degrees, dp_replicate=dp // shard, dp_shard=shard, zero=zero)


def switched(degrees: Layout, job: Job) -> Iterator[Layout]:
    """Yield a split with every choice of micro-batch, schedule and recomputation."""
    for one in sized(degrees, job):
        for words in variants(one):
            yield replace(one, **words)


def sized(degrees: Layout, job: Job) -> Iterator[Layout]:
    """Yield a split with every micro-batch that is tried."""
    share = -(-job.train.global_batch // degrees.dp)
    for microbatch in sorted({size for size in MICROBATCHES if size < share} | {share}):
        yield replace(degrees, microbatch=microbatch if microbatch < share else None)


def schedule_words(schedule: str, virtual_stages: int = 2) -> Mapping[str, Any]:
    """Return the layout words of a schedule, with the fewest virtual stages at which they do something."""
    chunks = {"virtual_stages": virtual_stages} if SCHEDULES[schedule].takes_chunks else {}
    return {"schedule": schedule, **chunks}


def _schedules(layout: Layout) -> list[Mapping[str, Any]]:
    """Words of the schedules that are tried: without stages there is one."""
    if layout.pp == 1:
        return [schedule_words(DEFAULT)]
    return [schedule_words(spec.name) for spec in SCHEDULES.values() if spec.is_planned]


def variants(layout: Layout) -> list[Mapping[str, Any]]:
    """Return the words of every schedule and every recomputation, of each schedule the quickest recomputation first."""
    return [{**words, "recompute": recompute} for words in _schedules(layout) for recompute in get_args(Recompute)]


def scheduled(layout: Layout) -> Iterator[Layout]:
    """Yield a layout under every schedule."""
    for words in _schedules(layout):
        yield replace(layout, **words)
