"""The layouts of a number of devices: every split of them over the axes, and every switch of each. All verbs read this list.

    degrees      tp x pp x cp x data ranks, with ep among these
    splits       of the data ranks into replicas and shards, with ZeRO stages
    sized        micro-batches
    variants     schedules, chunks of the loss, and recomputation, of each the quickest first

`layouts` and `verify --all` list each switch by itself; `plan` tries them together, on a list that is thinned for its
hardware. Nothing here asks whether a strategy refuses a layout; thinned, a degree is left out that the model refuses
whatever the rest is. Thinning leaves out what cannot be faster than something that stays:

    degrees      pp beyond the layers with which a stage can begin; cp that a model refuses or that does not divide its tokens; ep that does not divide
                 its experts: no layout with these is legal
    schedules    that are not `is_planned`: another one is as fast with less memory, as 1f1b beside gpipe
    reduce       root sends the whole gradient N-1 times through one link, where a ring sends 2 (N-1)/N of it;
                 hierarchical in one node, or with one data rank on each, is a ring's bytes in no fewer collectives
    accumulate   full, where there is one micro-batch: there is nothing to add up
    loss_chunk   where the layout fits without: chunks save memory alone (the search finds that out)

`tests/laws/test_candidates.py` holds the rest against the whole list, for each (tp, pp, cp, ep). Six things are left
out although they may be faster, or fit where nothing else does:

    loss_chunk   of vocabularies below `LARGE_VOCABULARY`, and other sizes than `LOSS_CHUNKS`
    offload      its update is slower than any other; `plan` tries it where nothing fits
    recompute    offload of samples below `LONG_SAMPLE` tokens, whose blocks' inputs take little memory
    mlp_chunk    of such samples, and other sizes than `MLP_CHUNK`
    micro-batch  sizes other than `MICROBATCHES`, the whole share, its half, its quarter, and so on above the powers of two that divide it, and `TENS`
    chunks       more than 2 virtual stages on more than `FEW_DEVICES` devices, or of more than `FEW_BLOCKS` blocks
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout, Recompute, Reduce
from samestep.models.spec import ModelSpec
from samestep.program.step import MOST_MICROBATCHES
from samestep.schedules import DEFAULT, SCHEDULES
from samestep.strategies import sequence
from samestep.strategies.context import attention_ranks, divisors_by_heads, exchange_of
from samestep.strategies.pipeline import num_starts

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Micro-batch sizes, in samples, of a thinned list, besides a rank's whole share, its half, its quarter, and so on, its third, and its divisors among `TENS` (`_parts`)."""
TENS = range(17, 64)
"""Micro-batch sizes of a thinned list where they divide a rank's share."""
MOST_PLANNED = 2**13
"""The largest number of micro-batches in the thinned list: playing many of them takes long, and their bubbles are equal."""

LARGE_VOCABULARY = 2**15
"""Classes from which on a thinned list has chunks of the loss."""
LOSS_CHUNKS = (4096, 1024)
"""Tokens of a chunk of the loss that a thinned list has, for micro-batches of more tokens."""
LONG_SAMPLE = 2**15
"""Tokens from which on a thinned list has inputs of blocks on the host, and MLPs in chunks."""
MLP_CHUNK = 8192
"""Tokens of such a chunk, with which products still fill a device."""
FEW_DEVICES, FEW_BLOCKS = 16, 8
"""Devices, and blocks of a stage, up to which a thinned list has every number of virtual stages; beyond them it has 2."""

Words = Mapping[str, Any]
"""Layout options and their values."""


_DEFAULT = Layout()


def schedule_words(schedule: str, virtual_stages: int = 2) -> Words:
    """Return the layout words of a schedule, with the fewest virtual stages at which they do something."""
    chunks = {"virtual_stages": virtual_stages} if SCHEDULES[schedule].takes_chunks else {}
    return {"schedule": schedule, **chunks}


def list_layouts(devices: int, model: ModelSpec, *, switches: bool = False) -> Iterator[Layout]:
    """Yield every split of `devices` over the axes of `model`; with `switches`, each switch of it by itself too."""
    for degree in degrees(devices, model):
        for split in splits(degree):
            yield split
            if switches:
                yield from _one_by_one(split, model)


def layouts_of(devices: int, model: ModelSpec, job: Job, *, thin: Hardware | None = None) -> Iterator[Layout]:
    """Yield every split of `devices` over the axes of `model`, each with every combination of its switches.

    Args:
        devices: how many; each is used.
        model: its experts and blocks say which degrees there are.
        job: its global batch says which micro-batches there are.
        thin: the hardware for which `plan` searches; without it nothing is left out.
    """
    for degree in degrees(devices, model, thin=thin):
        for split in splits(degree):
            yield from vary_switches(split, model, job, thin=thin)


# -- splits ----------------------------------------------------------------------------------------


def degrees(devices: int, model: ModelSpec, *, thin: Hardware | None = None) -> Iterator[Layout]:
    """Yield every split of `devices` over tp, pp, cp and replicas, with every ep where the model has experts.

    Thinned, each is there without and with its sequence cut too, and with its heads exchanged and around a ring.
    """
    starts = num_starts(model)
    experts = math.gcd(*(param.experts for param in model.params if param.experts))
    for tp in _divisors(devices):
        cuts_sequence = (False, True) if thin and tp > 1 and sequence.refuse_model(model, tp) is None else (False,)
        for pp in _divisors(devices // tp):
            if thin and pp > max(1, starts):
                continue
            for cp in _divisors(devices // tp // pp):
                if thin and cp > 1 and (model.slice_refusal or model.length % cp):
                    continue
                ranks = devices // tp // pp // cp
                plain = Layout(tp=tp, pp=pp, cp=cp, dp_replicate=ranks)
                exchanges = (plain, *ring_of(plain, model)) if thin else (plain,)
                for base in (
                    exchange.but(sequence_parallel=is_cut) for is_cut in cuts_sequence for exchange in exchanges
                ):
                    yield base
                    for ep in _divisors(ranks * cp)[1:] if experts else ():
                        if not thin or experts % ep == 0:
                            yield base.but(ep=ep)


def ring_of(split: Layout, model: ModelSpec) -> tuple[Layout, ...]:
    """Return the layout with a ring in the place of exchanged heads, or with heads exchanged within groups around a ring where it is a
    ring already; none where neither is another layout."""
    if split.cp == 1:
        return ()
    if exchange_of(model, split) == "heads":
        return (split.but(exchange="ring"),)
    return (split.but(exchange="hybrid"),) if split.exchange == "auto" and divisors_by_heads(model, split) else ()


def less_cut(degrees: Layout, model: ModelSpec, ranks_per_node: int) -> tuple[Layout, ...]:
    """Return degrees that cut a sequence among fewer ranks, by which the given ones are bounded, and these: first those that leave it whole,
    then those that pass keys and values around a shorter ring of such groups of ranks."""
    if degrees.cp == 1:
        return (degrees,)
    samples = degrees.dp * degrees.cp
    whole = degrees.but(cp=1, dp_replicate=samples, exchange=_DEFAULT.exchange)
    groups = attention_ranks(model, degrees, ranks_per_node)
    fewer = _divisors(degrees.cp)[1:-1] if groups.ring > 1 else ()
    shorter = (degrees.but(cp=cp, dp_replicate=samples // cp) for cp in fewer)
    rings = (
        words
        for words in shorter
        if (ranks := attention_ranks(model, words, ranks_per_node)).ring > 1 and ranks.heads == groups.heads
    )
    return (whole, *rings, degrees)


def splits(degrees: Layout) -> Iterator[Layout]:
    """Yield the ways to replicate and shard over the data ranks, and with cp=N over those of a sequence too."""
    dp = degrees.dp
    yield degrees
    for shard in _divisors(dp):
        for zero in (1, 2, 3) if shard * degrees.cp > 1 and shard * degrees.cp % degrees.ep == 0 else ():
            yield degrees.but(dp_replicate=dp // shard, dp_shard=shard, zero=zero)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def reductions(split: Layout, hardware: Hardware) -> Iterator[Layout]:
    """Yield a split with each way to sum its gradients that may be the quickest on this hardware."""
    yield split
    inside = hardware.devices_per_node // split.tp
    if split.zero >= 2:
        yield split.but(accumulate="full")
    elif split.zero == 0 and 1 < inside < split.dp_cp_size:
        yield split.but(reduce="hierarchical")


# -- switches --------------------------------------------------------------------------------------


def vary_switches(split: Layout, model: ModelSpec, job: Job, *, thin: Hardware | None = None) -> Iterator[Layout]:
    """Yield a split with every combination of its switches: micro-batch, schedule, recomputation and all else."""
    every = variants(split, model) if thin else tuple(_combinations(split, model))
    for summed in reductions(split, thin) if thin else (split,):
        for layout in vary_microbatches(summed, job, thin=thin):
            for words in every:
                yield layout.but(**words)


def vary_microbatches(split: Layout, job: Job, *, thin: Hardware | None = None) -> Iterator[Layout]:
    """Yield a split with every micro-batch that is smaller than a rank's share of the samples, and with the whole share.

    What `accumulate` says is about several micro-batches.
    """
    share = -(-job.train.global_batch // split.dp)
    for microbatch in dict.fromkeys((*MICROBATCHES, *_parts(share))) if thin else range(1, share):
        if microbatch < share <= microbatch * (MOST_PLANNED if thin else MOST_MICROBATCHES):
            yield split.but(microbatch=microbatch)
    if split.accumulate == _DEFAULT.accumulate:
        yield split.but(microbatch=None)


def _parts(share: int) -> Iterator[int]:
    """Yield the half of a rank's share of the samples, its quarter, and so on, rounded up, above the powers of two that divide it; and
    its third and its divisors of some tens, so that any share may have equal micro-batches."""
    yield from (size for size in TENS if share % size == 0)
    power = share & -share
    if share % 3 == 0 and share // 3 > power:
        yield share // 3
    while (share := -(-share // 2)) > power:
        yield share


def _schedules(split: Layout, model: ModelSpec) -> Iterator[Words]:
    """Yield the words of every schedule of the thinned list: without stages there is one."""
    if split.pp == 1:
        yield schedule_words(DEFAULT)
        return
    starts = num_starts(model) // split.pp
    most = starts if split.world_size <= FEW_DEVICES and starts <= FEW_BLOCKS else 2
    for spec in SCHEDULES.values():
        if spec.is_planned and spec.takes_chunks:
            yield from (schedule_words(spec.name, count) for count in range(2, max(2, most) + 1))
        elif spec.is_planned:
            yield schedule_words(spec.name)


def loss_chunks(split: Layout, model: ModelSpec) -> tuple[int | None, ...]:
    """Return the chunks of the loss of the thinned list: none, and where there are many classes, less than all tokens."""
    head = model.layers[-1].head
    if head is None or model.chunk_refusal or head.columns < LARGE_VOCABULARY:
        return (None,)
    most = head.rows // split.cp * split.microbatch if split.microbatch else math.inf
    return None, *(chunk for chunk in LOSS_CHUNKS if chunk < most)


def mlp_chunks(split: Layout, model: ModelSpec) -> tuple[int | None, ...]:
    """Return the chunks of MLPs of the thinned list: none, and of long samples one."""
    is_legal = split.tp == 1 and not model.slice_refusal and any(layer.token_parts for layer in model.layers)
    return (None, MLP_CHUNK) if is_legal and model.length >= LONG_SAMPLE else (None,)


def recomputations(model: ModelSpec) -> tuple[Recompute, ...]:
    """Return the values of `recompute` of the thinned list, the quickest first; `none` is full where blocks checkpoint themselves."""
    left_out = {"offload"} if model.length < LONG_SAMPLE else set()
    left_out |= {"none"} if model.checkpoints == "plain" else set()
    every: tuple[Recompute, ...] = get_args(Recompute)
    return tuple(words for words in every if words not in left_out)


def variants(split: Layout, model: ModelSpec) -> tuple[Words, ...]:
    """Return the words of every schedule, chunk of the loss and recomputation of the thinned list.

    Those that differ in recomputation alone follow each other, the quickest first.
    """
    chunks = chunk_words(split, model)
    every = itertools.product(_schedules(split, model), chunks, recomputations(model))
    return tuple({**words, **chunk, "recompute": recompute} for words, chunk, recompute in every)


def chunk_words(split: Layout, model: ModelSpec) -> tuple[Words, ...]:
    """Return the words of chunks of the thinned list, the first without any."""
    every = itertools.product(loss_chunks(split, model), mlp_chunks(split, model))
    return tuple({"loss_chunk": of_loss, "mlp_chunk": of_mlp} for of_loss, of_mlp in every)


def vary_schedules(split: Layout, model: ModelSpec) -> Iterator[Layout]:
    """Yield a split under every schedule of the thinned list."""
    for words in _schedules(split, model):
        yield split.but(**words)


def _choices(split: Layout, model: ModelSpec) -> Iterator[tuple[Words, ...]]:
    """Yield the values of each switch that a split has a use for, its default not among them."""
    if (head := model.layers[-1].head) is not None and not model.chunk_refusal:
        every = {head.rows, *(loss_chunk for loss_chunk in loss_chunks(split, model) if loss_chunk is not None)}
        yield tuple({"loss_chunk": chunk} for chunk in sorted(every))
    if found_chunks := [{"mlp_chunk": mlp_chunk} for mlp_chunk in mlp_chunks(split, model) if mlp_chunk is not None]:
        yield tuple(found_chunks)
    if split.zero >= 2:
        yield ({"accumulate": "full"},)
    yield tuple({"recompute": word} for word in get_args(Recompute) if word != _DEFAULT.recompute)
    if split.dp_cp_size > 1 and split.zero == 0:
        yield tuple({"reduce": word} for word in get_args(Reduce) if word != _DEFAULT.reduce)
    yield ({"offload": True},)
    if split.tp > 1:
        yield ({"sequence_parallel": True},)
    if ring := ring_of(split, model):
        yield tuple({"exchange": exchanges.exchange} for exchanges in ring)
    if split.pp > 1:
        yield tuple(schedule_words(schedule) for schedule in SCHEDULES if schedule != DEFAULT)


def _one_by_one(split: Layout, model: ModelSpec) -> Iterator[Layout]:
    """Yield a split with one switch at another value than its default; what is about several micro-batches, with such."""
    yield split.but(microbatch=1)
    for words in itertools.chain.from_iterable(_choices(split, model)):
        microbatch = 1 if words.keys() & {"schedule", "accumulate"} else None
        yield split.but(microbatch=microbatch, **words)


def _combinations(split: Layout, model: ModelSpec) -> Iterator[Words]:
    """Yield the words of every combination of a split's switches, with every number of virtual stages."""
    starts = num_starts(model)
    for chosen in itertools.product(*(({}, *values) for values in _choices(split, model))):
        words = {name: value for words in chosen for name, value in words.items()}
        yield words
        if words.get("virtual_stages"):
            yield from ({**words, "virtual_stages": more} for more in range(3, starts // split.pp + 1))
