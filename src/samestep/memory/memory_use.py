"""Bytes that one rank holds: exactly between two steps, at the worst op within one, and while weights are drawn.

Bytes a parameter in mixed precision with Adam, N ranks on dp_shard (Rajbhandari et al. 2020, arXiv:1910.02054):

    zero   classic    held by this runtime
    0      16         16                    weight 2, float32 gradient 4, lower half of the master 2, two states 8
    1      4 + 12/N   6 + 10/N              lower half and states cut
    2      2 + 14/N   2 + 16/N in the step  gradients too; the weights, 2, are freed after the step
    3      16/N       16/N                  weights too (the masters are the weights)

The classic table keeps gradients in half precision; this runtime adds them up in float32. With many ranks the classic
savings are 4x, 8x and N-fold. Where a weight is no half of its master (fp16, offload, the optimizers of users) the master
takes 4 bytes in place of 2.

Within a step five things come and go:

    activations   from a layer's forward to its backward; under recompute only what is kept, and all of it again from
                  the second forward on; during a layer's backward the gradients that it works on; of a stage its output
    logits        what the loss keeps of its input, to its backward, and the gradients that that one works on
    buffers       what a stage awaits, and sent last; gathered units: under zero=2 all, to the end of the step; under
                  zero=3 a unit and the one gathered ahead of need, and those kept from forward to backward
    gradients     under zero=2 and 3 a unit's whole gradient, from its backward to the reduce_scatter of the next unit,
                  until which FSDP2 keeps what it sent; else that of a layer's largest weight, until it is added to those
                  of other micro-batches
    the update    joined masters and widened states of the pieces that are updated together

and on a device there is an overhead: what context, communicators and libraries hold of it, which no tensor can have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from samestep.hardware import Hardware
from samestep.memory.live_bytes import Peak, gradient_bytes, levels_of, peak_of
from samestep.models.param_spec import ParamSpec
from samestep.output.text import gib, readable
from samestep.program.codecs import CODECS, PLAIN, coded_bytes
from samestep.program.ops import BYTES_OF, OpKind, Task, is_forward
from samestep.program.program import Program, host_bytes
from samestep.program.step import StepSpec
from samestep.program.units import coded_parts, padded_rows
from samestep.program.update_rules import update_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank by what they are for."""

    weights: int
    """All weights, embeddings too."""
    gradients: int
    optimizer: int
    """States, averages of weights, and master weights where the model's weights are in another dtype."""
    activations: int = 0
    logits: int = 0
    """Bytes that the loss saves of its input, and working memory of its backward."""
    buffers: int = 0
    """The model's registered buffers, and weights gathered from other ranks."""
    overhead: int = 0
    """Bytes of context, communicators and libraries, by the hardware's profile: no tensor can have them."""
    token_embeddings: int = 0
    """The part of the weights that are tables of tokens; a head tied to one is this table."""
    position_embeddings: int = 0
    """The part of the weights that are tables of positions."""
    host: int = 0
    """Host bytes of states and master weights under offload, of weights of `model.offload`, and of inputs of blocks under
    recompute=offload; not in `parts()` nor in `total`."""
    peak_at: str = "at rest"
    """Name of the op at which this much is held."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes on the device by what they are for."""
        return {
            "weights": self.weights - self.token_embeddings - self.position_embeddings,
            "token embeddings": self.token_embeddings,
            "position embeddings": self.position_embeddings,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "buffers": self.buffers,
            "overhead": self.overhead,
        }

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        parts = {name.replace(" ", "_"): size for name, size in self.parts().items()}
        return {**parts, "host": self.host, "peak": self.total, "peak_at": self.peak_at}


REST = "the rest"
"""Name of what is in use of a rank's memory besides weights, gradients and states of the optimizer, where that was measured."""


def parts_text(parts: Mapping[str, int]) -> str:
    """Return bytes by part as text, without parts that have none; measured and predicted peaks are written alike."""
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)


def memory_summary(use: MemoryUse, hardware: Hardware) -> str:
    """Format the peak against the capacity, in GiB, with its three largest parts."""
    parts = sorted(use.parts().items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {gib(size)}" for name, size in parts[:3] if size)
    return f"needs {gib(use.total)} GiB of {gib(hardware.room_bytes)} at {use.peak_at}: {most}"


def allocator_summary(use: MemoryUse, reserved: int | None, hardware: Hardware) -> list[str]:
    """Return a line on what tensors have of a device at most and what torch's allocator takes for them; none without an allocator."""
    if reserved is None:
        return []
    allocated, room = use.total - use.overhead, hardware.memory_bytes - use.overhead
    line = (
        f"peak memory: {gib(allocated)} GiB allocated by tensors, {gib(reserved)} GiB reserved by PyTorch's allocator"
        f"{f', {gib(use.overhead)} GiB for the CUDA context and libraries' if use.overhead else ''}"
    )
    short = allocated <= room < reserved
    return [
        line
        + "; more is reserved than there is, so the allocator often frees and allocates again, which is slow" * short
    ]


def classic_bytes_per_param(zero: int, num_shards: int) -> float:
    """Return the ZeRO paper's bytes a parameter: mixed precision, Adam."""
    return (16, 4 + 12 / num_shards, 2 + 14 / num_shards, 16 / num_shards)[zero]


def held_bytes_per_param(zero: int, num_shards: int) -> float:
    """Return this runtime's bytes a parameter: mixed precision, Adam; for zero=2 with the weights gathered."""
    return (16, 6 + 10 / num_shards, 2 + 16 / num_shards, 16 / num_shards)[zero]


def at_rest(program: Program, states_per_param: int = 2, rank: int = 0) -> MemoryUse:
    """Return the memory that `rank` holds between two steps, to the byte, but for the padding of masters' lower halves: below 1 KiB
    a chunk of the update.

    `states_per_param` are the optimizer's tensors of a weight's own shape, 2 for Adam, 1 for momentum, 0 for SGD, where
    the weight's group has no optimizer of its own.
    """
    step = program.step
    weights, gradients = (_whole, _in_buckets, _in_units, _in_units)[step.zero](program)
    on_host = host_bytes(step, program.units, program.host_modules)
    gradients += _owned_weights(program, rank)[1] * BYTES_OF[step.master_dtype] + _coded_bytes(program)
    copies = sum(_copy_bytes(step, piece) for piece in _updated_pieces(program, rank))
    states = copies + _state_bytes(program, states_per_param, rank)
    if step.sharing.trains_apart:  # the weights that replicas moved from, and the momentum of their moves
        states += 2 * BYTES_OF[step.master_dtype] * sum(piece.numel for piece in _updated_pieces(program, rank))
    optimizer, host = (0, states) if step.layout.offload else (states, 0)
    return MemoryUse(
        weights=weights - on_host,
        gradients=gradients,
        optimizer=optimizer,
        buffers=step.model.buffer_bytes,
        token_embeddings=_table_bytes(program, "tokens"),
        position_embeddings=_table_bytes(program, "positions"),
        host=host + on_host,
    )


def _state_bytes(program: Program, states_per_param: int, rank: int) -> int:
    """Return the bytes of the optimizer's states of the pieces that a rank updates, with those of their averages."""
    step = program.step
    average = step.averages_weights * BYTES_OF[step.master_dtype]
    return sum(
        step.states.bytes_of(piece.param, piece.numel) * step.states.number(piece.param, states_per_param)
        + piece.numel * average
        for piece in _updated_pieces(program, rank)
    )


def _coded_bytes(program: Program) -> int:
    """Return the bytes of codes that a rank sends, receives and gathers, and of what codes have lost."""
    step, contributions = program.step, program.step.contributions
    if contributions is None:
        return 0
    master, size = BYTES_OF[step.master_dtype], 0
    buffers = [([bucket.coded(contributions)], bucket.gathers_codes(contributions)) for bucket in program.buckets]
    shards = [[*coded_parts(step, contributions, unit)] for unit in program.units]
    buffers += [(parts, not step.scatters_codes) for parts in shards]
    codes = []
    for parts, gathers in buffers:
        numel = sum(part.numel for part in parts)
        if step.sharing.codec == PLAIN:
            continue
        if CODECS[step.sharing.codec].factors:
            for part in parts:
                first, second = part.factor_numels
                size += master * (part.numel + first + 3 * second)  # what was lost; own, summed factors and directions
            continue
        codes.append(contributions.code_bytes(coded_bytes(step.sharing.codec, parts), gathers=gathers))
        size += master * (numel + numel // contributions.ranks) * CODECS[step.sharing.codec].feeds_back
    if step.scatters_codes:  # a unit behind the other, in one buffer
        return size + max(codes, default=0)
    size += sum(codes)
    return size + master * sum(part.numel for parts in shards for part in parts)


class _Updated(NamedTuple):
    """A piece that a rank updates."""

    param: ParamSpec
    numel: int
    dtype: str
    """Dtype of the weight that the forward reads; that of masters where the weight is its master."""
    is_own_copy: bool = False
    """Whether it is a whole copy of a weight of which ranks hold parts."""


def _copy_bytes(step: StepSpec, piece: _Updated) -> int:
    """Return the bytes that masters add to their weights on the device; offloaded states have separate masters on the host."""
    if step.layout.offload or piece.is_own_copy:
        return piece.numel * BYTES_OF[step.master_dtype]
    return piece.numel * master_copy_bytes(step) if piece.dtype != step.master_dtype else 0


def _updated_pieces(program: Program, rank: int) -> list[_Updated]:
    """Return the pieces that a rank updates; those of which it owns a whole copy come last."""
    step = program.step
    lent = {member.name for owners in program.owners for member in owners.members}
    params = [param for param in _trainable(step) if param.name not in lent]
    owned, _ = _owned_weights(program, rank)
    if step.zero >= 2:
        return [*(_Updated(param, _cut_numel(step, param, rank), step.master_dtype) for param in params), *owned]
    if step.zero == 0:
        return [*(_Updated(param, param.numel, step.working_dtype(param)) for param in params), *owned]
    numels = {
        member.name: numel
        for bucket in program.buckets
        for member, numel in bucket.parts_at(step.ranks.coordinate(rank, bucket.holding.data_axis))
    }
    pieces = (_Updated(param, numels[param.name], step.working_dtype(param)) for param in params)
    return [*(piece for piece in pieces if piece.numel), *owned]


def widened_bytes(program: Program, states_per_param: int, rank: int) -> int:
    """Return the working memory of an update, in bytes: joined masters and widened states of some pieces."""
    step = program.step
    if step.layout.offload:
        return 0
    packs, master = step.states.are_packed, BYTES_OF[step.master_dtype]

    def bytes_of(piece: _Updated) -> int:
        of_master = step.splits_masters and not piece.is_own_copy and piece.dtype != step.master_dtype
        is_packed = packs and step.states.bytes_of(piece.param, piece.numel) != piece.numel * master
        return piece.numel * master * (of_master + step.states.number(piece.param, states_per_param) * is_packed)

    return max((sum(map(bytes_of, chunk)) for chunk in _chunks(program, rank)), default=0)


def _chunks(program: Program, rank: int) -> list[list[_Updated]]:
    """Return the pieces that are updated together, where not all of them are."""
    step = program.step
    if not (step.splits_masters or step.states.are_packed):
        return []
    pieces = _updated_pieces(program, rank)
    return [[pieces[index] for index in chunk] for chunk in update_chunks([piece.numel for piece in pieces])]


def _split_bytes(program: Program, rank: int) -> int:
    """Return the bytes at which masters are split: lower halves of the first pieces, and what finds halfway masters."""
    step = program.step
    if not step.splits_masters:
        return 0
    split = [
        [piece.numel for piece in chunk if _copy_bytes(step, piece) == 2 * piece.numel]
        for chunk in _chunks(program, rank)
    ]
    return max((2 * sum(numels) + 5 * max(numels, default=0) for numels in split), default=0)


def _owned_weights(program: Program, rank: int) -> tuple[list[_Updated], int]:
    """Return the weights that a rank updates whole, and the elements that come to it: gradients, parts passed on."""
    step = program.step
    at, params = step.ranks.coordinate, {param.name: param for param in step.model.params}
    passed_on = {member.name for owners in program.owners if owners.is_cut for member in owners.members}
    updated: list[_Updated] = []
    brought = 0
    for owners in program.owners:
        data_index = at(rank, owners.data_axis)
        for member in owners.of_rank(data_index):
            if member.owner == at(rank, owners.axis):
                is_last = owners.is_cut or member.name not in passed_on
                if is_last:
                    updated.append(_Updated(params[member.name], member.numel, step.master_dtype, is_own_copy=True))
                brought += member.numel * (1 if is_last else 2)
    return updated, brought


def during_step(program: Program, states_per_param: int = 2, rank: int = 0) -> MemoryUse:
    """Return the memory that `rank` holds at the op of the step at which it holds most."""
    rest = at_rest(program, states_per_param, rank)
    widened = widened_bytes(program, states_per_param, rank)
    arriving = arriving_bytes(program)
    update = Peak(f"{OpKind.UPDATE}:optimizer", sum(arriving.values()), 0, 0, widened)
    peak = peak_of(program, arriving)
    most = max(peak, update, key=lambda peak: peak.total)._replace(host=peak.host)
    return _held_at(most, rest, sum(arriving.values()), on_the_way_bytes(program))


def over_step(program: Program, states_per_param: int = 2, rank: int = 0) -> Iterator[tuple[Task, MemoryUse]]:
    """Yield, op after op of a step, its task and the memory that `rank` holds at it; the most of these is `during_step`."""
    rest, arriving = at_rest(program, states_per_param, rank), arriving_bytes(program)
    grown, sent, widened = (
        sum(arriving.values()),
        on_the_way_bytes(program),
        widened_bytes(program, states_per_param, rank),
    )
    last = None
    for task, level in levels_of(program, arriving):
        last = task
        yield task, _held_at(level, rest, grown, sent)
    if last is not None:
        yield last, _held_at(Peak(f"{OpKind.UPDATE}:optimizer", grown, 0, 0, widened), rest, grown, sent)


def _held_at(level: Peak, rest: MemoryUse, arriving: int, on_the_way: int) -> MemoryUse:
    """Return what is held at an op, given what is held at rest: of that gradients that arrive in the step are no part."""
    return replace(
        rest,
        gradients=rest.gradients - arriving + level.gradients,
        activations=level.activations,
        logits=level.logits,
        buffers=rest.buffers + level.buffers + on_the_way,
        host=rest.host + level.host,
        peak_at=level.op,
    )


def memory_of(programs: tuple[Program, ...], hardware: Hardware, states_per_param: int) -> tuple[MemoryUse, ...]:
    """Return the peak memory of a rank of each stage, with the bytes that the hardware reserves as overhead."""
    return tuple(
        replace(during_step(program, states_per_param), overhead=hardware.reserved_bytes) for program in programs
    )


def during_init(program: Program, rank: int = 0) -> MemoryUse:
    """Return the memory that `rank` holds while weights are drawn: its parts, and a whole one that is cut, cast or copied.

    Masters are split once all are there. Gradients in buckets are there already; states and averages are made in the first step.
    """
    step = program.step.but(states=replace(program.step.states, own={}), averages_weights=False)
    program = replace(program, step=step)
    rest = at_rest(program, 0, rank)
    largest = max((param.numel * step.holding(param).num_parts for param in step.model.params), default=0)
    stays = {*step.layout.weight_axes.values()} == {1} and step.zero == 0 and not step.is_mixed
    drawn = 0 if stays else largest * BYTES_OF[step.master_dtype]
    gradients = rest.gradients if program.buckets else _coded_bytes(program)
    optimizer = at_rest(replace(program, step=step.but(updates_in_chunks=False)), 0, rank).optimizer
    more = max(drawn, _split_bytes(program, rank))
    if program.units:  # room for codes is made once all weights are drawn
        more = max(0, more - gradients)
    return replace(rest, gradients=gradients, optimizer=optimizer, buffers=rest.buffers + more, peak_at="init")


def saving_host_bytes(program: Program, states_per_param: int = 2, rank: int = 0) -> int:
    """Return the bytes of the host that a checkpoint takes until it is on disk: values and states that `rank` updates."""
    step = program.step
    values = sum(piece.numel for piece in _updated_pieces(program, rank)) * BYTES_OF[step.master_dtype]
    return values + _state_bytes(program, states_per_param, rank)


def arriving_bytes(program: Program) -> dict[str, int]:
    """Return the bytes of gradients that a step allocates anew, by the name of the op that brings them.

    Those in buckets stay from step to step. Else a layer's come with its backward, a rank's shard of a unit's when it is
    reduced.
    """
    step = program.step
    if step.zero == 0 and not program.buckets:
        return {
            f"backward:{layer.name}": sum(gradient_bytes(step, index)) for index, layer in enumerate(step.model.layers)
        }
    kind = OpKind.ALL_TO_ALL if step.scatters_codes else OpKind.REDUCE_SCATTER
    return {
        f"{kind}:{unit.name}": unit.padded_grad_numel // unit.num_shards * BYTES_OF[step.master_dtype]
        for unit in program.units
        if unit.num_shards > 1
    }


def on_the_way_bytes(program: Program) -> int:
    """Return the bytes of a stage's next input, received ahead of need, and of the last gradient sent, kept until received."""
    bodies = {task.body for task in program.tasks}
    ahead = sum(is_forward(task.body) for task in program.tasks) > 1
    outputs = (
        op.size_bytes
        for body in bodies
        if any(op.kind is OpKind.FORWARD for op in program.bodies[body])
        for op in program.bodies[body]
        if op.axis == "pp" and op.kind is OpKind.RECV
    )
    return 2 * max(outputs, default=0) if ahead else 0


def _trainable(step: StepSpec) -> Iterator[ParamSpec]:
    return (param for param in step.model.params if param.trainable)


def _weight_bytes(step: StepSpec, trainable: bool) -> int:
    """Return the bytes of the weights as they stand in the module, uncut."""
    params = (param for param in step.model.params if param.trainable or not trainable)
    return sum(map(step.weight_bytes, params))


def _table_bytes(program: Program, embeds: str) -> int:
    """Return the bytes of the tables of embeddings of a kind that are on the device between two steps."""
    size, step = 0, program.step
    away = {name for host_module in program.host_modules for name in host_module.params}
    for param in step.model.params:
        if param.embeds == embeds and param.name not in away:
            shards = step.holding(param).num_shards if step.zero >= 2 else 1
            element = BYTES_OF[step.master_dtype if step.zero >= 2 else step.working_dtype(param)]
            size += padded_rows(param, shards) // shards * element
    return size


def _whole(program: Program) -> tuple[int, int]:
    """Return the bytes of weights and gradients under zero=0, padded where they are in buckets."""
    step = program.step
    weights = _weight_bytes(step, trainable=False)
    numel = sum(b.padded_numel for b in program.buckets) or sum(param.numel for param in _trainable(step))
    return weights, numel * BYTES_OF[step.master_dtype]


def _in_buckets(program: Program) -> tuple[int, int]:
    """Return the bytes of weights and gradients under zero=1: whole, and padded; frozen weights are in no bucket."""
    step = program.step
    frozen = _weight_bytes(step, trainable=False) - _weight_bytes(step, trainable=True)
    weights = frozen + sum(b.padded_numel * BYTES_OF[b.dtype] for b in program.buckets)
    return weights, sum(b.padded_numel for b in program.buckets) * BYTES_OF[step.master_dtype]


def _in_units(program: Program) -> tuple[int, int]:
    """Return the bytes of weights and gradients under zero=2 and 3: the rank's shard of each unit, padded."""
    step = program.step
    master = BYTES_OF[step.master_dtype]
    weights = sum((u.padded_numel * master + u.padded_packed_bytes) // u.num_shards for u in program.units)
    gradients = sum(unit.padded_grad_numel // unit.num_shards for unit in program.units)
    return weights, gradients * master


def _cut_numel(step: StepSpec, param: ParamSpec, rank: int) -> int:
    """Return the elements without padding that FSDP2 gives a rank: dim 0 in equal chunks, the last ones short."""
    holding = step.holding(param)
    shard = step.ranks.coordinate(rank, holding.data_axis)
    each = -(-param.rows // holding.num_shards)
    return min(max(param.rows - shard * each, 0), each) * param.row_numel


def master_copy_bytes(step: StepSpec) -> int:
    """Return the bytes that one element of a master adds to a weight of another dtype."""
    return 2 if step.splits_masters else BYTES_OF[step.master_dtype]
