"""Buckets: which gradients are reduced as one flat buffer under zero=0 and zero=1, and how the buffer is padded.

```
bucket    │ lm_head.weight │ norm.weight │ layers.1.mlp.up │ padding │   in the order of the backward
```
A bucket holds gradients of weights with equal `Holding`s and one dtype, up to `bucket_bytes`, or less where they are sent
encoded; it is padded to a multiple of the ranks that may divide it. Its first collective starts as soon as backward has finished its last
gradient, so that it overlaps with the rest of backward (Li et al. 2020, arXiv:2006.15704, section 3.2.3); the others
follow the step's last backward. So do all collectives of the weights that several stages or virtual stages use, which
have buckets of their own behind the others: every stage comes to those that it shares with another in one order.

Under zero=1 a weight that its optimizer must update whole lies within the chunk of one rank:

```
bucket    │ q.weight │ up.weight │ padding │ down.weight │ k.weight │ padding │
           rank 0's chunk                   rank 1's chunk
```
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from samestep.models.param_spec import ParamSpec
from samestep.program.codecs import PLAIN, CodedPart, Matrix, exchange
from samestep.program.contributions import Contributions
from samestep.program.holding import Holding
from samestep.program.ops import BYTES_OF, Op, OpKind, Ops
from samestep.program.step import StepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The place of one parameter in the flat buffer of a bucket: its first element and their number."""

    name: str
    offset: int
    numel: int

    @property
    def span(self) -> slice:
        """Its elements in the buffer."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together (zero=0 or 1), in the order in which backward finishes them."""

    name: str
    members: tuple[Member, ...]
    dtype: str
    """Dtype of the weights in the forward; gradients are accumulated in master precision."""
    codec: str
    """Name of the codec with which its gradients are sent, one of `CODECS`; or `PLAIN`."""
    block: int = 1
    """Elements of a block of its gradients, in which the codec writes them down."""
    matrices: tuple[Matrix, ...] = ()
    """Gradients that the codec sends as factors."""
    padded_numel: int
    """Elements of the flat buffer, padding included."""
    holding: Holding
    """The holding that all its weights have in common."""
    is_late: bool = False
    """Whether it is reduced after the last backward of the step, as weights that several stages or virtual stages use."""

    @property
    def numel(self) -> int:
        """Number of elements without padding."""
        return sum(member.numel for member in self.members)

    def coded(self, contributions: Contributions) -> CodedPart:
        """Return the part that a rank encodes: all, or the chunk that it keeps within a contribution."""
        is_cut_before = self.holding.data_axis != contributions.axis
        numel = self.padded_numel // (self.holding.num_shards if is_cut_before else 1)
        return CodedPart(numel, self.block, self.matrices)

    def gathers_codes(self, contributions: Contributions) -> bool:
        """Return whether every rank has all sums, rather than only the chunk that ZeRO leaves it, whose weights it sends back."""
        return self.holding.num_shards == 1 or self.holding.data_axis != contributions.axis

    def parts_at(self, index: int) -> Iterator[tuple[Member, int]]:
        """Yield each member, with the number of its elements in a chunk of those that ZeRO divides the buffer into."""
        size = self.padded_numel // self.holding.num_shards
        first, last = index * size, (index + 1) * size
        for member in self.members:
            yield member, max(0, min(member.offset + member.numel, last) - max(member.offset, first))


def round_up(number: int, multiple: int) -> int:
    """Return a number of elements, or of bytes, rounded up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple


BUCKET_BYTES = 25 * 2**20
"""The fewest bytes of gradients at which a bucket is closed: it can still overlap with backward, and uses the link well."""
PART_BYTES = 3 * 2**20
"""The fewest bytes that a reduce_scatter leaves each rank of a bucket. A ring takes one hop for each rank, so a bucket that
does not grow with the ranks takes longer for its hops than for its bytes. Chosen by the clock:
`tests/laws/test_bucket_sizes.py` compares it with other sizes."""
WEIGHT_BYTES = 16
"""The bytes of whose number the place of a weight in a buffer of weights is a multiple, as in the flat parameters of torch's FSDP."""
CODED_BUCKETS, LEAST_CODED_BYTES = 16, 256 * 2**10
"""Buckets that encoded gradients are divided into where these are so large or larger: each is sent by two collectives, one
after the other, and where libraries seldom fill both directions of a link with one, those of several buckets do."""


def bucket_bytes(num_shards: int) -> int:
    """Return the bytes of gradients at which a bucket is closed, if a reduce_scatter leaves each of `num_shards` ranks a part.

    With one shard an all_reduce leaves each rank the whole sum. Between nodes it goes along trees, whose hops hardly grow with the ranks.
    """
    return max(BUCKET_BYTES, PART_BYTES * num_shards)


def make_buckets(step: StepSpec, chunks: tuple[range, ...] = ()) -> tuple[Bucket, ...]:
    """Return the trainable parameters in flat buckets, in the order in which backward finishes them.

    Weights of different working dtypes never share a bucket, because a bucket's weights may be gathered as one buffer;
    nor do those of different virtual stages (chunks), whose backwards end at different times.
    """

    trained = [param for param in step.model.params if param.trainable]
    kinds = {id(param): _kind(step, param, chunks) for param in trained}

    def chunk_of(param: ParamSpec) -> int:
        """Return the index of the chunk that uses a parameter; -1 if several do, or several stages."""
        return kinds[id(param)].chunk

    # Weights with other holdings have buckets of their own, because the gradient norm counts replicated ones once and
    # because their gradients are summed over other ranks.
    def place_of(param: ParamSpec) -> tuple[object, ...]:
        """Return a key by which weights come one after the other: of one layer in the module's order, as on every stage that shares
        them, since the sort is stable."""
        kind = kinds[id(param)]
        layer = -param.layer if kind.chunk >= 0 else 0
        return -kind.chunk, kind.holding.sort_key, kind.is_updated_whole, -kind.block, layer

    groups: list[list[ParamSpec]] = []
    size, full, last = 0, 0, None
    for param in sorted(trained, key=place_of):
        kind = kinds[id(param)]
        if kind != last or size >= full:
            groups.append([])
            size, full = 0, _full_numel(step, param, is_late=kind.chunk < 0)
        groups[-1].append(param)
        size, last = size + param.numel, kind
    # A bucket is finished with its first layer, the last one that backward reaches.
    late = [group for group in groups if chunk_of(group[0]) < 0]
    groups = [group for group in groups if chunk_of(group[0]) >= 0]
    groups.sort(key=lambda group: (-chunk_of(group[0]), -min(param.layer for param in group)))
    return tuple(
        _bucket(step, index, group, is_late=index >= len(groups)) for index, group in enumerate([*groups, *late])
    )


def _full_numel(step: StepSpec, param: ParamSpec, *, is_late: bool) -> int:
    """Return the elements at which a bucket of weights like this one is closed; stages of other sizes agree on a late one."""
    owners, itemsize = _owners(step, param), BYTES_OF[step.master_dtype]
    numel = (BUCKET_BYTES * owners if owners > 1 else bucket_bytes(step.holding(param).num_shards)) // itemsize
    if is_late or step.sharing.codec == PLAIN or step.sharing.rank:  # factors are small, and an all_reduce fills a link
        return numel
    part = sum(param.numel for param in step.model.params if param.trainable) // CODED_BUCKETS
    return min(numel, max(part, LEAST_CODED_BYTES // itemsize) * owners)


def is_late(step: StepSpec, param: ParamSpec, chunks: tuple[range, ...]) -> bool:
    """Return whether a weight's gradient is reduced after the last backward of the step.

    So it is where other stages or chunks use the weight too, where the gradient is summed over other axes before it is encoded, and
    where the trace had none, so that none is waited for.
    """
    holding, contributions = step.holding(param), step.contributions
    # What is encoded has been summed before over the ranks that work on the same contribution.
    sums_first = contributions is not None and bool(holding.partial_over or contributions.inside)
    return bool(holding.tied_over) or sums_first or param.is_idle or is_in_several(param, chunks)


def is_in_several(param: ParamSpec, chunks: tuple[range, ...]) -> bool:
    """Return whether several virtual stages (chunks) of a rank use a weight."""
    return len(param.uses) > 1 and sum(any(use.layer in layers for use in param.uses) for layers in chunks) > 1


class _Kind(NamedTuple):
    """What weights of one bucket share."""

    chunk: int
    """Index of the virtual stage that uses them; -1 if several do, or several stages."""
    dtype: str
    holding: Holding
    is_updated_whole: bool
    block: int


def _kind(step: StepSpec, param: ParamSpec, chunks: tuple[range, ...]) -> _Kind:
    """Return what weights of one bucket share with this one."""
    used = next((index for index, layers in enumerate(chunks) if param.layer in layers), 0)
    return _Kind(
        -1 if is_late(step, param, chunks) else used,
        step.working_dtype(param),
        step.holding(param),
        param.is_updated_whole,
        step.sharing.block_of(param),
    )


def _owners(step: StepSpec, param: ParamSpec) -> int:
    """Return the number of ranks that each update some weights of a bucket whole; 1 where weights may be divided."""
    return step.holding(param).num_shards if param.is_updated_whole else 1


def _bucket(step: StepSpec, index: int, params: list[ParamSpec], *, is_late: bool) -> Bucket:
    holding = step.holding(params[0])
    block, owners = step.sharing.block_of(params[0]), _owners(step, params[0])
    multiple = math.prod(map(step.ranks.size, holding.data_axes)) * block
    if step.sharing.rank:
        # Matrices of one shape, whose products are one operation, side by side, and all else last.
        params = sorted(params, key=lambda param: (0, *param.shape) if step.sharing.is_factored(param) else (1,))
    holders = owners_of([param.numel for param in params], owners)
    offsets, loads = [], [0] * owners
    for param, owner in zip(params, holders, strict=True):
        offsets.append(round_up(loads[owner], _alignment(step, param)))
        loads[owner] = offsets[-1] + param.numel
    chunk = round_up(max(loads), _chunk_multiple(step, params[0], multiple // owners))
    members = [
        Member(name=param.name, offset=owner * chunk + offset, numel=param.numel)
        for param, owner, offset in zip(params, holders, offsets, strict=True)
    ]
    return Bucket(
        name=f"bucket.{index}",
        members=tuple(members),
        dtype=step.working_dtype(params[0]),
        codec=step.sharing.codec,
        block=block,
        matrices=tuple(_matrices(step, params, members)) if step.sharing.rank else (),
        padded_numel=chunk * owners,
        holding=holding,
        is_late=is_late,
    )


def _alignment(step: StepSpec, param: ParamSpec) -> int:
    """Return the elements of whose number the place of a weight in its bucket is a multiple.

    Under zero=1 the weights themselves lie there (`FlatBuffer.weights`), and each begins where a tensor of its own might: code that views pairs
    of elements as complex numbers, and kernels that read 16 bytes at once, are refused other places by torch.
    """
    if step.holding(param).num_shards == 1:
        return 1
    if step.sharing.codec != PLAIN:  # what is encoded together is the same in every layout
        return step.states.alignment
    return max(step.states.alignment, WEIGHT_BYTES // BYTES_OF[step.working_dtype(param)])


def _chunk_multiple(step: StepSpec, param: ParamSpec, ranks: int) -> int:
    """Return the elements of whose number an owner's part of a bucket is a multiple, where `ranks` divide it."""
    if step.holding(param).num_shards == 1:
        return ranks
    # A rank's chunk begins at no block's middle, and an owner's with a weight.
    return math.lcm(ranks * step.states.alignment, _alignment(step, param) if _owners(step, param) > 1 else 1)


def _matrices(step: StepSpec, params: Sequence[ParamSpec], members: Sequence[Member]) -> Iterator[Matrix]:
    """Yield the matrices that are sent as factors, in the order of the buffer."""
    for param, member in sorted(zip(params, members, strict=True), key=lambda pair: pair[1].offset):
        if step.sharing.is_factored(param):
            rows = param.shape[0]
            yield Matrix(param.name, member.offset, rows, param.numel // rows, step.sharing.rank)


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return for each weight the rank that updates it whole: the largest first, each to the rank with least so far."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += sizes[index]
    return owners


Reduction = Callable[[Bucket], tuple[Op, ...]]
"""A function that returns the collectives that reduce a bucket, in order."""


def start_reductions(ops: Ops, step: StepSpec, buckets: tuple[Bucket, ...], reduction: Reduction) -> Ops:
    """Insert the first collective of each bucket after the backward that finishes it, in the order of the buckets.

    Dispatch and combine of a layer's experts belong to its backward, so the collective follows them. Where the stage before
    waits for the gradient of this body's input, that is sent first: its backward hides what is reduced here.
    """
    buckets = tuple(bucket for bucket in buckets if not bucket.is_late)
    layer_of = {param.name: param.layer for param in step.model.params}
    kind = OpKind.WEIGHT if step.splits_backward else OpKind.BACKWARD
    reached = {op.layer for op in ops if op.kind is kind}  # a body has the layers of one chunk
    waiting = [bucket for bucket in buckets if layer_of[bucket.members[0].name] in reached]
    sent = next((op for op in ops if op.kind is OpKind.SEND), None)
    written: list[Op] = []
    behind_sends: list[Op] = []
    done: Op | None = None
    for op, following in itertools.zip_longest(ops, ops[1:]):
        written.append(op)
        done = op if op.kind is kind else done
        is_of_experts = following is not None and following.kind is OpKind.ALL_TO_ALL and following.codec is None
        if done is None or done.layer is None or is_of_experts:
            continue
        # As long as this layer's backward leaves the last gradient of the next bucket.
        while waiting and min(layer_of[member.name] for member in waiting[0].members) >= done.layer:
            first = reduction(waiting.pop(0))[:1]
            if sent is not None:
                behind_sends.extend(part.but(after=(*part.after, *sent.after)) for part in first)
            else:
                written.extend(part.but(after=(*part.after, done.name)) for part in first)
    assert not waiting, f"no backward finishes {[bucket.name for bucket in waiting]}"
    return (*written, *behind_sends)


def finish_reductions(
    step: StepSpec, chunks: tuple[range, ...], buckets: tuple[Bucket, ...], reduction: Reduction
) -> Iterator[Op]:
    """Yield the collectives of each bucket that follow the step's last backward: all but its first, or all.

    Each waits for the one before it; issued any earlier, they would make compute wait as well.
    """
    kind = OpKind.WEIGHT if step.splits_backward else OpKind.BACKWARD
    last = step.model.layers[chunks[0].start if chunks else 0].name  # which the last backward of a step ends with
    for bucket in buckets:
        parts = reduction(bucket)
        if bucket.is_late and parts:
            yield parts[0].but(after=(*parts[0].after, f"{kind}:{last}"))
        for previous, part in itertools.pairwise(parts):
            yield part.but(after=(*part.after, previous.name))


def coded_reductions(
    step: StepSpec, contributions: Contributions, bucket: Bucket, op: Callable[[OpKind, str, int], Op]
) -> Iterator[Op]:
    """Yield the collectives that sum a bucket within a contribution in full, and then those that sum the codes.

    `op` returns a collective of the bucket over an axis, of so many elements.
    """
    holding, part = bucket.holding, bucket.coded(contributions)
    if part.numel < bucket.padded_numel:
        yield op(OpKind.REDUCE_SCATTER, holding.data_axis, bucket.padded_numel)
    for axis in (*contributions.inside, *holding.tied_over, *holding.partial_over):
        yield op(OpKind.ALL_REDUCE, axis, part.numel)
    if not step.sharing.trains_apart:
        gathers, dtype = bucket.gathers_codes(contributions), step.master_dtype
        yield from exchange(bucket.name, bucket.codec, contributions.axis, (part,), dtype, gathers=gathers)
