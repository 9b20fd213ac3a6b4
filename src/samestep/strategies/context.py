"""Context parallelism: every rank of `cp` has a slice of each sequence, and in attention some heads of all tokens, or a ring.

Operations on single tokens work on a slice unchanged. Attention needs all tokens. `exchange=ring` passes keys and values from
rank to rank (`program/ring_visits.py`), in N - 1 shifts forward; backward they pass once more, with N - 1 shifts of their gradients.

`exchange=heads` is DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): attention needs one head at a time, so two all_to_alls (of queries, keys and values, and of the output)
exchange tokens for heads. With N ranks, T tokens and A heads of size D:

```
              tokens T/N, all heads                    all tokens, heads A/N
    rank 0    [ q k v of slice 0 ]  ── all_to_all ──►  [ q k v of heads 0 1 ]  attention
    rank 1    [ q k v of slice 1 ]  ◄── all_to_all ──  [ q k v of heads 2 3 ]  attention
```
Of each tensor they move T A D / N elements a rank, of which N-1 of N parts leave it; backward has the same two in the other
direction. Every rank has all rows of a causal mask for its heads, so the work is balanced. Keys and values with fewer heads than ranks are repeated before they are sent. The model's own code
computes embeddings, positions and masks of the whole sequence on every rank; slicing starts at the first block and ends
in the loss, a sum over tokens. Short convolutions and shifts of tokens need the tokens at the ends of neighbours' slices, which are
contiguous then (`independence/token_moves.py`). Recurrences whose functions take a state are computed by one rank after the other
(`independence/traced_moves.py`), so the products of their tokens take the time of all tokens. Parts of blocks that mix tokens in another way, as recurrences and convolutions do, are gathered
and computed on all tokens by every rank (`independence/gathered_parts.py`). Ranks of `cp` hold equal weights and see different tokens, so for gradients `cp` is one
more data axis (`Layout`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.models.layer_parts import Exchange, ForwardPlace, GatheredPart, Product, TokenMove
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec, cache_by_model, gradients_within, is_below
from samestep.program.ops import BYTES_OF, BodyKey, Op, OpKind, Ops, is_backward
from samestep.program.program import Program
from samestep.program.ring_visits import SlicePlacement
from samestep.program.step import StepSpec

AXIS = "cp"
GIVEN = "query_key_value"
"""What follows the name of a layer in the name of the all_to_all of what its attention is given."""
KEYS_VALUES, OF_GRADIENTS = "key_value", "_gradient"
"""What follows the name of a layer in the name of its shifts, and the name of those of gradients."""
RING_BUFFERS = 5
"""Copies of a rank's keys and values that a backward holds besides its own, in elements of two bytes: those that arrive, and the
gradients that leave and arrive, in twice as many bytes."""
SUMS_MOVED, SUM_KERNELS = 6, 12
"""Elements of two bytes that are read and written, for each element of a block's output, where it is added to sums in float32; and the
operations of a hop."""
_PASSING = ("key", "value")
LEAST_TOKENS = 2
"""Smallest number of tokens in a slice: a model may take a single token for a step of generation."""


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why the model does not work on slices, or why the degree does not divide its tokens or heads."""
    degree, model = step.layout.cp, step.model
    if at := model.picks_at:
        return LayoutError("cp-values", f"cp={degree}: shapes or branches at {at} depend on values. Use cp=1")
    if at := _looks_on_slices(model):
        return LayoutError(
            "cp-values",
            f"cp={degree}: shapes or branches at {at} depend on values, and its code works on slices. Use a module of its own "
            "for the branch that is given no tokens, or cp=1",
        )
    if model.differentiates_at and any(
        layer.exchanges or layer.gathered_parts or layer.token_moves for layer in model.layers
    ):
        return LayoutError("forward-takes-gradients", f"cp={degree}: {gradients_within(model)}. Use cp=1")
    if model.slice_refusal:
        return LayoutError("cp-unsupported", f"cp={degree} slices sequences: {model.slice_refusal}. Use cp=1")
    return _refuse_degree(model, step.layout) or _refuse_reach(model, degree)


def _refuse_reach(model: ModelSpec, degree: int) -> LayoutError | None:
    """Return why slices are shorter than what a call needs of a neighbour."""
    moves = (move for layer in model.layers for move in layer.token_moves)
    furthest = max(moves, key=lambda move: max(move.left, move.right), default=None)
    reach = max(furthest.left, furthest.right) if furthest else 0
    if furthest is None or reach <= model.length // degree:
        return None
    works = [n for n in range(2, degree) if model.length % n == 0 and model.length // n >= reach]
    near = f"Use cp={works[-1]}, or longer samples" if works else "Use longer samples, or cp=1"
    return LayoutError(
        "cp-slice-too-short",
        f"cp={degree} leaves slices of {model.length // degree} tokens, and {furthest.owner} needs {reach} tokens of a neighbour. {near}",
    )


def _refuse_degree(model: ModelSpec, layout: Layout) -> LayoutError | None:
    """Return why the degree of `cp` does not divide the tokens of the model, or the heads that are exchanged."""
    degree, by_heads = layout.cp, _most_by_heads(model, layout.tp)
    is_ring = exchange_of(model, layout) != "heads"
    if layout.exchange == "hybrid" and not divisors_by_heads(model, layout):
        counts = " and ".join(map(str, sorted(_query_heads(model, layout.tp))))
        return LayoutError(
            "cp-indivisible",
            f"cp={degree} exchange=hybrid: no number of ranks between 1 and {degree} divides both {degree} and the {counts or 0} heads "
            "of a rank, as groups that exchange heads need. Use exchange=ring",
        )
    most = model.length if is_ring else by_heads
    if most % degree == 0 and model.length // degree >= LEAST_TOKENS:
        return None
    works = [n for n in range(2, most + 1) if most % n == 0 and model.length // n >= LEAST_TOKENS]
    if is_ring:  # nearly any degree works: the nearest are enough
        works = [*[n for n in works if n < degree][-1:], *[n for n in works if n > degree][:1]]
    heads = () if is_ring else sorted(_query_heads(model, layout.tp))
    sizes = " and ".join([f"{model.length} tokens", *(f"{count} heads" for count in heads)])
    cut = f" that tp={layout.tp} leaves a rank" if layout.tp > 1 and heads else ""
    near = f"Use cp={' or '.join(map(str, works))}" if works else "Use cp=1"
    if not is_ring and model.length % degree == 0 and model.length // degree >= LEAST_TOKENS:
        near += ", or exchange=ring"
    return LayoutError(
        "cp-indivisible",
        f"cp={degree} does not divide the {sizes}{cut} into slices of {LEAST_TOKENS} tokens or more. {near}",
    )


def exchange_of(model: ModelSpec, layout: Layout) -> Literal["heads", "ring", "hybrid"]:
    """Return how the attentions of a model see all tokens: as the layout says, or by heads where the degree divides them."""
    if layout.exchange != "auto":
        return layout.exchange
    return "ring" if _most_by_heads(model, layout.tp) % layout.cp else "heads"


class AttentionRanks(NamedTuple):
    """The ranks of `cp` that share an attention: groups of neighbours that exchange heads, and a ring of such groups."""

    heads: int
    """Ranks of a group."""
    ring: int
    """Groups."""
    heads_axis: str = AXIS
    ring_axis: str = AXIS


def attention_ranks(model: ModelSpec, layout: Layout, ranks_per_node: int | None) -> AttentionRanks:
    """Return how the ranks of `cp` share an attention.

    Groups of `exchange=hybrid` have as many ranks as heads allow within a node, or the fewest where none fits one.
    """
    exchange, degree = exchange_of(model, layout), layout.cp
    if exchange != "hybrid":
        return AttentionRanks(degree, 1) if exchange == "heads" else AttentionRanks(1, degree)
    divisors = divisors_by_heads(model, layout) or [1]
    inside = [degree for degree in divisors if ranks_per_node is None or degree * layout.model_ranks <= ranks_per_node]
    heads = max(inside, default=divisors[0])
    return AttentionRanks(heads, degree // heads, f"cp_heads{heads}", f"cp_ring{heads}")


def divisors_by_heads(model: ModelSpec, layout: Layout) -> list[int]:
    """Return the numbers of ranks, fewer than those of `cp`, that divide these and the heads of each attention."""
    return [*_divisors_by_heads(model, layout.tp, layout.cp)]


@cache_by_model
def _divisors_by_heads(model: ModelSpec, tp: int, degree: int) -> tuple[int, ...]:
    counts = _query_heads(model, tp)
    every = (factor for factor in range(2, degree) if degree % factor == 0) if counts else ()
    return tuple(factor for factor in every if all(count % factor == 0 for count in counts))


def placement_of(model: ModelSpec, layout: Layout, length: int, ranks_per_node: int | None) -> SlicePlacement:
    """Return which tokens of a sequence of this length each rank of `cp` holds.

    They are from its head and its tail where a ring computes causal attentions. Masks of dropped elements are drawn for one run
    of tokens, and convolutions along tokens need neighbours, so models that have either have contiguous slices.
    """
    is_causal = any(
        product.factors == "causal"
        for layer in model.layers
        for product in layer.products
        if not layer.is_gathered(product.owner)
    )
    ranks = attention_ranks(model, layout, ranks_per_node)
    has_moves = any(layer.token_moves for layer in model.layers)
    may_split = is_causal and ranks.ring > 1 and not model.masks and not has_moves
    return SlicePlacement.of(length, layout.cp, may_split=may_split, heads=ranks.heads if ranks.ring > 1 else 1)


@cache_by_model
def _most_by_heads(model: ModelSpec, tp: int) -> int:
    """Return the largest degree of which every divisor divides the tokens and the heads of each attention."""
    return math.gcd(model.length, *_query_heads(model, tp))


def _looks_on_slices(model: ModelSpec) -> str:
    """Return a module whose code looks at values and runs blocks, or is one; empty if none is."""
    blocks = [path for layer in model.layers if layer.is_block for path in layer.modules]
    looking = next((path for path in model.looks_in if any(is_below(block, path) for block in blocks)), None)
    return "" if looking is None else looking or "the model itself"


def apply(program: Program) -> Program:
    """Return the program of a rank's slice of the blocks and the head, with the all_to_alls of each attention."""
    step = program.step
    ranks = attention_ranks(step.model, step.layout, step.ranks_per_node)
    placement = placement_of(step.model, step.layout, step.model.length, step.ranks_per_node)
    local = step.but(model=slice_model(step.model, placement, ranks.ring > 1))
    axes = {**program.axes, AXIS: step.layout.cp, ranks.heads_axis: ranks.heads, ranks.ring_axis: ranks.ring}
    axes[AXIS] = step.layout.cp
    return replace(program, step=local).with_bodies(
        lambda key, ops: tuple(_slice_ops(key, ops, local, ranks)), axes=axes
    )


@cache_by_model
def slice_model(model: ModelSpec, placement: SlicePlacement, by_ring: bool) -> ModelSpec:
    """Return the local model of a rank that works on a slice of the sequence."""
    first = next(index for index, layer in enumerate(model.layers) if layer.is_block)
    degree = placement.degree

    def part(layer: LayerSpec) -> LayerSpec:
        sliced = layer.sliced_by(degree)
        return _with_ring(layer, sliced, placement) if by_ring and layer.sliced_exchanges else sliced

    layers = tuple(part(layer) if index >= first else layer for index, layer in enumerate(model.layers))
    return replace(model, layers=layers, logit_rows=model.logit_rows // degree)


def _with_ring(layer: LayerSpec, sliced: LayerSpec, placement: SlicePlacement) -> LayerSpec:
    """Return a sliced layer whose attentions keep their heads, with the buffers in which keys and values come and go.

    With contiguous slices the rank with the last tokens computes nearly all pairs of a causal attention, and the others wait.
    """
    degree, hops, heads = placement.degree, placement.ring.degree - 1, placement.heads
    products = tuple(
        replace(
            p,
            rows=-(-p.rows // placement.ring.degree),
            count=-(-p.count // heads),
            factors=p.factors if placement.is_head_tail else "attention",
            within=p.within if placement.is_head_tail else 1.0,
            is_hidden=True,
        )
        if p.is_attention and not layer.is_gathered(p.owner)
        else product
        for p, product in zip(layer.products, sliced.products, strict=True)
    )
    # What `sliced_by` counts twice is sent by an exchange of heads alone.
    on_slices = [
        -(-sliced_exchange.elements // degree)
        for sliced_exchange in layer.sliced_exchanges
        if sliced_exchange.is_kept and heads == 1
    ]
    cut = [
        -(-sliced_exchange.elements // degree)
        for sliced_exchange in layer.sliced_exchanges
        if sliced_exchange.is_kept and sliced_exchange.is_cut and heads == 1
    ]
    passing, passing_cut = (
        RING_BUFFERS
        * sum(
            -(-sliced_exchange.elements // degree)
            for sliced_exchange in layer.sliced_exchanges
            if sliced_exchange.role in _PASSING and sliced_exchange.is_cut >= cut_only
        )
        for cut_only in (False, True)
    )
    outputs = sum(exchange.role == "output" for exchange in layer.sliced_exchanges)
    # Every further hop adds to the sums of all queries.
    added, added_cut = (
        SUMS_MOVED
        * hops
        * sum(
            sliced_exchange.elements // degree
            for sliced_exchange in layer.sliced_exchanges
            if sliced_exchange.role == "output" and sliced_exchange.is_cut >= cut_only
        )
        for cut_only in (False, True)
    )
    return replace(
        sliced,
        products=products,
        moved=sliced.moved.plus(added, added_cut, SUM_KERNELS * hops * outputs),
        saved_elements=sliced.saved_elements - sum(on_slices),
        saved_cut_elements=sliced.saved_cut_elements - sum(cut),
        working=sliced.working.plus(passing, passing_cut),
    )


def num_sent_heads(heads: int, query_heads: int, degree: int) -> int:
    """Return the number of heads that are sent: repeated equally until every rank has those that its queries need."""
    least = math.lcm(heads, degree)
    return least if query_heads % least == 0 else query_heads


def _slice_ops(key: BodyKey, ops: Ops, step: StepSpec, ranks: AttentionRanks) -> Iterator[Op]:
    """Yield the ops of a body with a slice's FLOPs, and the all_to_alls or shifts of each layer after its compute."""
    sent = functools.partial(_sent, ranks)
    for op in ops:
        if op.layer is None:
            yield op
            continue
        layer = step.model.layers[op.layer]
        flops = layer.forward_flops if op.kind is OpKind.FORWARD else layer.backward_flops
        yield op.but(flops=flops * step.microbatch_samples)
        if layer.gathered_parts or layer.token_moves:
            yield from _with_others(layer, step, op, sent, backward=is_backward(key))
        else:
            yield from sent(layer, step, op, backward=is_backward(key))


def _with_others(
    layer: LayerSpec, step: StepSpec, after: Op, sent: Callable[..., Iterator[Op]], *, backward: bool
) -> Iterator[Op]:
    """Yield what the attentions of a layer send, and between them what its parts and its calls of neighbours do."""
    by_attention: dict[int, list[Op]] = {}
    for place, ops in _by_place(layer, step, after, backward=backward):
        by_attention.setdefault(place, []).extend(ops)
    exchanges = list(by_attention.get(0, ()))
    for number in range(layer.num_sliced_attentions):
        alone = layer.with_attention(number)
        ops = [*sent(alone, step, after, backward=backward)]
        exchanges += [*(reversed(ops) if backward else ops), *by_attention.get(number + 1, ())]
    yield from reversed(exchanges) if backward else exchanges


def _by_place(layer: LayerSpec, step: StepSpec, after: Op, *, backward: bool) -> Iterator[tuple[int, list[Op]]]:
    """Yield what parts that compute all tokens and calls of neighbours send, in order of the forward, with the attentions before."""
    moves = [*layer.token_moves]
    for number, part in enumerate((*layer.gathered_parts, None)):
        while moves and (part is None or moves[0].parts_before <= number):
            yield moves[0].before, _passed(moves.pop(0), step, after, backward=backward)
        if part is not None:
            yield part.before, _gathered(part, step, after, backward=backward)


def _awaited(kind: OpKind, owner: str, axis: str, dtype: str, after: Op, place: ForwardPlace) -> Op:
    """Return an op of the tokens of a block, for which its compute waits."""
    return Op(kind=kind, owner=owner, axis=axis, dtype=dtype, after=(after.name,), is_exposed=True, place=place)


def _gathered(part: GatheredPart, step: StepSpec, after: Op, *, backward: bool) -> list[Op]:
    """Return the gathers of a part that computes all tokens.

    The backward adds up the gradients of what was gathered, of which each rank has those of its own tokens' results.
    """
    kind = OpKind.REDUCE_SCATTER if backward else OpKind.ALL_GATHER
    op = _awaited(kind, part.owner, AXIS, step.compute_dtype, after, part.place)
    sent = [tensor for tensor in part.gathered if tensor.takes_gradient or not backward]
    return [op.sized(tensor.elements * step.microbatch_samples) for tensor in sent]


def _passed(move: TokenMove, step: StepSpec, after: Op, *, backward: bool) -> list[Op]:
    """Return the messages of a call that needs tokens of neighbours, whose gradients go back."""
    if backward and not move.takes_gradient:
        return []
    op = _awaited(OpKind.SHIFT, move.owner, AXIS, step.master_dtype, after, move.place)
    cut, times = step.layout.tp if move.is_cut else 1, step.layout.cp - 1 if move.kind == "state" else 1
    return [op.sized(elements // cut * step.microbatch_samples) for elements in move.messages] * times


def _sent(ranks: AttentionRanks, layer: LayerSpec, step: StepSpec, after: Op, *, backward: bool) -> Iterator[Op]:
    """Yield what the attentions of a layer send: two all_to_alls each among ranks that exchange heads, and shifts around a ring."""
    sent = layer.sliced_exchanges
    calls = [sent[at : at + 4] for at in range(0, len(sent), 4)]
    attentions = [
        product for product in layer.products if product.is_attention and not layer.is_gathered(product.owner)
    ] * (ranks.ring > 1)
    blocks = [
        replace(attention.cut_by(step.layout.tp), columns=-(-attention.columns // ranks.ring))
        for attention in attentions
    ]
    per_call: list[tuple[Product, ...]] = (
        [(block,) for block in blocks] if len(blocks) == len(calls) else [()] * len(calls)
    )
    pairs = [*zip(calls, per_call, strict=True)]
    for call, beside in reversed(pairs) if backward else pairs:
        *inputs, output = call
        ends = (GIVEN, inputs), (output.role, [output])
        (first, of_first), (last, of_last) = reversed(ends) if backward else ends
        yield from _exchanged(ranks, layer, step, after, first, of_first, backward=backward)
        yield from _shifts(ranks, layer, step, after, call, beside, backward=backward)
        yield from _exchanged(ranks, layer, step, after, last, of_last, backward=backward)


def _exchanged(
    ranks: AttentionRanks,
    layer: LayerSpec,
    step: StepSpec,
    after: Op,
    role: str,
    parts: Sequence[Exchange],
    *,
    backward: bool,
) -> Iterator[Op]:
    """Yield the all_to_all of some tensors of an attention; the backward has it if one takes a gradient."""
    if ranks.heads == 1 or (backward and not any(part.takes_gradient for part in parts)):
        return
    numel = sum(_sent_elements(part, step, ranks.heads) for part in parts) * step.microbatch_samples
    owner = f"{layer.repeats or layer.name}.{role}"
    op = _awaited(OpKind.ALL_TO_ALL, owner, ranks.heads_axis, step.compute_dtype, after, parts[0].place)
    yield op.sized(numel)


def _sent_elements(exchange: Exchange, step: StepSpec, degree: int) -> int:
    """Return the elements of one sample of a tensor on a rank, with heads as `degree` ranks exchange them."""
    heads, queries = (
        max(1, count // (step.layout.tp if exchange.is_cut else 1)) for count in (exchange.heads, exchange.query_heads)
    )
    per_head = exchange.elements // exchange.heads // step.layout.cp
    return per_head * (num_sent_heads(heads, queries, degree) if degree > 1 else heads)


def _shifts(
    ranks: AttentionRanks,
    layer: LayerSpec,
    step: StepSpec,
    after: Op,
    call: Sequence[Exchange],
    beside: tuple[Product, ...],
    *,
    backward: bool,
) -> Iterator[Op]:
    """Yield the shifts of an attention, each during the attention to the keys and values of one rank of the ring.

    In the backward two are beside it, which takes at least twice as long as in the forward; the first and the last are alone beside half
    of the block of a rank's own keys each.
    """
    degree, (_, key, value, output) = ranks.ring, call
    if degree == 1:
        return
    numel = step.microbatch_samples * sum(_sent_elements(tensor, step, ranks.heads) for tensor in (key, value))
    owner = f"{layer.repeats or layer.name}.{KEYS_VALUES}"
    passed = _awaited(OpKind.SHIFT, owner, ranks.ring_axis, step.compute_dtype, after, key.place).sized(numel)
    if not backward:
        yield from itertools.repeat(passed.but(beside=beside), degree - 1)
    elif output.takes_gradient:
        dtype = sum_dtype(step.compute_dtype)
        passed = passed.but(beside=beside)
        of_them = passed.but(owner=f"{owner}{OF_GRADIENTS}", dtype=dtype).sized(numel)
        takes_gradient = key.takes_gradient or value.takes_gradient
        for hop in range(degree):
            if hop < degree - 1:
                yield passed
            if hop and takes_gradient:
                yield of_them


def sum_dtype(dtype: str) -> str:
    """Return the dtype in which gradients of keys and values of this dtype are added up along the ring."""
    return "float32" if BYTES_OF[dtype] < BYTES_OF["float32"] else dtype


@cache_by_model
def _query_heads(model: ModelSpec, tp: int) -> set[int]:
    """Return the numbers of query heads of the model's attentions on one rank of `tp`."""
    exchanges = (exchange for layer in model.layers for exchange in layer.sliced_exchanges if exchange.role == "query")
    return {exchange.query_heads // tp if exchange.is_cut else exchange.query_heads for exchange in exchanges}
