"""Bytes alive within a step beyond those at rest, followed op by op, and the op at which they are most.

`memory_use.py` lists what comes and goes. A layer's part, what it keeps from its forward to its backward and works on in both, is at the
end of this file, for one micro-batch, with the loss's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from samestep.models.layer_spec import LayerSpec
from samestep.program.ops import BYTES_OF, COPIES, BodyKey, Buffer, Op, OpKind, Ops, Task
from samestep.program.program import Program
from samestep.program.repeated_products import KEEPS_PRODUCTS, dropped_elements
from samestep.program.step import StepSpec
from samestep.schedules import TaskKind


class Peak(NamedTuple):
    """Bytes held at one op beyond those at rest."""

    op: str
    gradients: int
    activations: int
    logits: int
    buffers: int
    host: int = 0
    """Bytes of blocks' inputs in the host's memory, which are no part of the total."""

    @property
    def total(self) -> int:
        """Bytes in all on the device."""
        return self.gradients + self.activations + self.logits + self.buffers


def peak_of(program: Program, arriving: dict[str, int]) -> Peak:
    """Return the op of the step at which most is held; tasks that find the same and do the same are followed once.

    `arriving` is the bytes of gradients that a step allocates anew, by the name of the op that brings them. The host's bytes are
    the most of the step.
    """
    peak: Peak | None = None
    host = 0
    for _, look, sums in _followed(program, arriving, LiveBytes):
        here = sums.added_to(look.peak)
        host = max(host, sums.host + look.most_host)
        peak = here if peak is None or here.total > peak.total else peak
    assert peak is not None, "a program without tasks"
    return peak._replace(host=host)


def levels_of(program: Program, arriving: dict[str, int]) -> Iterator[tuple[Task, Peak]]:
    """Yield, op after op of a step, its task and what is held at it."""
    for task, followed, sums in _followed(program, arriving, _Levels):
        for level in followed.of_ops:
            yield task, sums.added_to(level)


def found_by(
    program: Program, arriving: dict[str, int], follower: Callable[..., LiveBytes]
) -> Iterator[tuple[Task, list[Any]]]:
    """Yield, task after task of a step, what a follower of its ops finds."""
    for task, followed, _ in _followed(program, arriving, follower):
        yield task, followed.of_ops


class _KeptSoFar(NamedTuple):
    """Bytes that forwards have kept for their backwards."""

    activations: int = 0
    logits: int = 0
    host: int = 0

    def added_to(self, level: Peak) -> Peak:
        """Return what is held at an op, with what was kept when its task began."""
        return level._replace(
            activations=level.activations + self.activations,
            logits=level.logits + self.logits,
            host=level.host + self.host,
        )


class _Followed(NamedTuple):
    """What following one body from some buffers has found."""

    peak: Peak
    sums: _KeptSoFar
    buffers: frozenset[Buffer]
    of_ops: list[Any]
    """What the follower has kept of it, op after op."""
    most_host: int


def _followed(
    program: Program, arriving: dict[str, int], follower: Callable[..., LiveBytes]
) -> Iterator[tuple[Task, _Followed, _KeptSoFar]]:
    """Yield each task with what it does, and the bytes that are kept when it begins."""
    sizes = OpSizes.of(program, arriving)
    known: dict[tuple[BodyKey, frozenset[Buffer]], _Followed] = {}
    buffers, sums = frozenset[Buffer](), _KeptSoFar()
    for task in program.tasks:
        key = (task.body, buffers)
        if key not in known:
            live = follower(sizes, buffers, keeps=task.kind is not TaskKind.OUTPUTS)
            live.follow(program.bodies[task.body])
            left = frozenset(live.buffers.values())
            kept_here = _KeptSoFar(live.activations, live.logits, live.host)
            known[key] = _Followed(live.peak, kept_here, left, live.found, live.most_host)
        followed = known[key]
        yield task, followed, sums
        sums, buffers = _KeptSoFar(*map(sum, zip(sums, followed.sums, strict=True))), followed.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSizes:
    """Bytes that the ops of a program keep and work on, by layer and by op."""

    saved: list[Saved]
    """Saved bytes and working memory of each layer."""
    on_host: dict[int, int]
    """Bytes of the inputs that are on the host between forward and backward, by layer."""
    whole_input: dict[int, int]
    """Bytes of what stands in front of the first block, of all tokens of the sequence, where that block keeps another tensor: the
    model's code holds it until its blocks have run. By the layer in front; less than 0 by the layer behind the blocks."""
    gradients: list[LayerGradients]
    """Bytes of gradients of weights that are alive in the backward of each layer, besides those at rest."""
    unpacked: list[int]
    """Bytes of the unpacked values of the largest 4-bit weight of each layer, which a product reads."""
    arriving: dict[str, int]
    """Bytes of gradients that a step allocates anew, by the name of the op that brings them."""
    unit_gradients: bool
    """Whether gradients are those of whole units (zero=2 and 3)."""
    without_gradient: frozenset[str]
    """Names of the tensors between stages whose gradients are not sent back."""
    kept_boundaries: tuple[OpKind, ...]
    """Kinds of the ops whose tensors between stages are kept until their gradients have come, or have gone back."""
    last_kind: OpKind
    """Kind of the op after which a layer's activations are freed."""

    @classmethod
    def of(cls, program: Program, arriving: dict[str, int]) -> OpSizes:
        """Find the sizes of a program."""
        step = program.step
        on_host = {
            op.layer: op.size_bytes
            for ops in program.bodies.values()
            for op in ops
            if op.kind is OpKind.OFFLOAD and op.layer is not None
        }
        return cls(
            saved=[saved_bytes(step, layer, index in on_host) for index, layer in enumerate(step.model.layers)],
            on_host=on_host,
            whole_input=_whole_input(step),
            gradients=_layer_gradients(program),
            unpacked=[_unpacked_bytes(step, i) for i in range(len(step.model.layers))],
            arriving=arriving,
            unit_gradients=step.zero >= 2,
            without_gradient=frozenset(
                crossing.owner
                for layer in step.model.layers
                for crossing in layer.crossings
                if not crossing.takes_gradient
            ),
            # A stage's output is kept until its gradient has come; in mixed precision its input too, of which a norm saves
            # a copy.
            kept_boundaries=(OpKind.SEND, OpKind.RECV) if step.is_mixed else (OpKind.SEND,),
            last_kind=OpKind.WEIGHT if step.splits_backward else OpKind.BACKWARD,
        )


class LiveBytes:
    """Bytes alive beyond those at rest, followed op by op through one body.

    Activations and logits count from the start of the body; buffers are those that ops allocate and free. Every change is one call
    of `_keep`, `_drop`, `_leave`, `_keep_logits`, `_allocate` or `_free`, and what is held for a moment one of `_look`: a follower that
    keeps more than the most of it overrides these.
    """

    def __init__(self, sizes: OpSizes, buffers: frozenset[Buffer], *, keeps: bool = True) -> None:
        """Begin with some buffers; `keeps` is whether forwards keep anything for a backward."""
        self.sizes, self.keeps = sizes, keeps
        self.buffers = {buffer.name: buffer for buffer in buffers}
        self.buffer_bytes = {"gradients": 0, "buffers": 0, "activations": 0}
        for buffer in buffers:
            self.buffer_bytes[buffer.part] += buffer.size_bytes
        self.activations = self.logits = self.host = self.most_host = self._whole_input = 0
        self.peak = Peak("", 0, 0, 0, -1)
        self.found: list[Any] = []

    def follow(self, ops: Ops) -> None:
        """Do all ops of the body."""
        goes_forward = any(op.kind is OpKind.FORWARD for op in ops)
        for op in ops:
            if op.kind is OpKind.BACKWARD and op.layer is not None and self.sizes.saved[op.layer].loss:
                # The loss's backward comes before what it brings about: gathers, and gradients of weights.
                self._look(op, logits=self.sizes.saved[op.layer].loss_working)
        for op in ops:
            if op.kind is OpKind.FORWARD and op.layer in self.sizes.whole_input:
                self._hold_whole_input(self.sizes.whole_input[op.layer])
            self._free(op.frees_before)
            if op.kind in COPIES:
                self.host += op.size_bytes * (op.kind is OpKind.OFFLOAD)
                self.most_host = max(self.most_host, self.host)
                self._allocate(op.allocates, op)
                self._look(op)
            elif op.axis is None:
                self._compute(op, self.sizes.saved[op.layer] if op.layer is not None else Saved())
            elif op.allocates:
                if op.kind is OpKind.ALL_GATHER:
                    self._allocate(op.allocates, op)
                self._look(op)
                self._allocate(op.allocates, op)
            elif op.axis == "pp" and goes_forward and self.keeps and op.kind in self.sizes.kept_boundaries:
                self._keep(MESSAGES, 0 if op.owner in self.sizes.without_gradient else op.size_bytes)
            self._free(op.frees)
            if op.name in self.sizes.arriving:
                self._allocate((Buffer(op.name, "gradients", self.sizes.arriving[op.name]),), op)
        self._hold_whole_input(0)
        if not goes_forward:
            back = {OpKind.RECV: OpKind.SEND, OpKind.SEND: OpKind.RECV}
            freed = {back[kind] for kind in self.sizes.kept_boundaries}
            self._drop(MESSAGES, sum(op.size_bytes for op in ops if op.axis == "pp" and op.kind in freed))

    def _hold_whole_input(self, size_bytes: int) -> None:
        """Hold the input of all tokens in front of the blocks, or of less than 1 byte no longer."""
        if size_bytes > 0:
            self._keep(WHOLE_INPUT, size_bytes)
            self._whole_input += size_bytes
        elif self._whole_input:
            self._drop(WHOLE_INPUT, self._whole_input)
            self._whole_input = 0

    def _compute(self, op: Op, saved: Saved) -> None:
        if op.kind is OpKind.FORWARD and not self.keeps:
            self._look(op, activations=saved.after_forward + self._unpacked(op))
        elif op.kind is OpKind.FORWARD:
            self._keep(op.layer, saved.after_forward)
            self._keep_logits(op.layer, saved.loss)
            self._look(op, logits=saved.loss_made)
            self._look(op, activations=self._unpacked(op))
        elif op.kind is OpKind.RECOMPUTE:
            self._keep(op.layer, saved.in_backward - saved.after_forward)
            self._look(op, activations=self._unpacked(op))
        elif op.kind is OpKind.BACKWARD and op.layer is not None:
            self._backward(op, saved, self.sizes.gradients[op.layer])
            self.host -= self.sizes.on_host.get(op.layer, 0)
        else:
            self._look(op)
        if op.kind is self.sizes.last_kind:
            self._drop(op.layer, saved.in_backward)

    def _backward(self, op: Op, saved: Saved, gradients: LayerGradients) -> None:
        self._keep_logits(op.layer, -saved.loss)
        left = saved.boundaries - max(0, saved.in_backward - saved.boundaries)
        if self.sizes.unit_gradients:
            # A unit keeps the gradients of a layer: there is one already when its backward works on most. The last one
            # comes from the layer's input and what a norm made of it; what else was kept is gone by then.
            self._look(op, activations=saved.working + self._unpacked(op), gradients=gradients.largest)
            self._look(op, activations=saved.in_norms, gradients=gradients.in_norms)
            self._leave(op.layer)
            self._allocate(op.allocates, op)
            self._look(op, activations=left)
        else:
            self._look(op, activations=saved.working + self._unpacked(op), gradients=gradients.most)
            self._look(op, activations=saved.in_norms, gradients=gradients.in_norms)
            self._look(op, activations=saved.boundaries, gradients=gradients.at_start + gradients.largest)
            self._look(op, activations=left, gradients=gradients.behind)

    def _unpacked(self, op: Op) -> int:
        return 0 if op.layer is None else self.sizes.unpacked[op.layer]

    def _look(self, op: Op, *, activations: int = 0, logits: int = 0, gradients: int = 0) -> None:
        """Compare the bytes that are held now, plus the op's working memory, with the peak so far."""
        live = self.buffer_bytes
        allocated = self.activations + live["activations"] + activations
        peak = Peak(op.name, live["gradients"] + gradients, allocated, self.logits + logits, live["buffers"], self.host)
        if peak.total > self.peak.total:
            self.peak = peak

    def _keep(self, owner: int | str | None, size_bytes: int) -> None:
        """Keep activations of a layer, by its index, or others."""
        self.activations += size_bytes

    def _drop(self, owner: int | str | None, size_bytes: int) -> None:
        """Free activations that `_keep` has kept."""
        self.activations -= size_bytes

    def _leave(self, layer: int | None) -> None:
        """Of a layer's activations all but its boundaries are free from here on, which `_look` is given as a number."""

    def _keep_logits(self, layer: int | None, size_bytes: int) -> None:
        """Keep what the loss saves; less than 0 bytes are freed."""
        self.logits += size_bytes

    def _allocate(self, buffers: tuple[Buffer, ...], op: Op) -> None:
        for buffer in buffers:
            self._free((buffer.name,))
            self.buffers[buffer.name] = buffer
            self.buffer_bytes[buffer.part] += buffer.size_bytes

    def _free(self, names: tuple[str, ...]) -> None:
        for name in names:
            if buffer := self.buffers.pop(name, None):
                self.buffer_bytes[buffer.part] -= buffer.size_bytes


class _Levels(LiveBytes):
    """Keeps what is held at every op."""

    def _look(self, op: Op, *, activations: int = 0, logits: int = 0, gradients: int = 0) -> None:
        last_peak, self.peak = self.peak, Peak("", 0, 0, 0, -(2**63))
        super()._look(op, activations=activations, logits=logits, gradients=gradients)
        self.found.append(self.peak)
        self.peak = max(last_peak, self.peak, key=lambda peak: peak.total)


WHOLE_INPUT, MESSAGES = "whole input", "messages"
"""Activations that are no layer's: the input of all tokens in front of the blocks, and what stages have sent each other."""


def _whole_input(step: StepSpec) -> dict[int, int]:
    """Return the bytes of the output of the layer in front of the first block, where blocks keep a slice or a copy of it."""
    layers, layout = step.model.layers, step.layout
    blocks = [index for index, layer in enumerate(layers) if layer.is_block]
    if not blocks or not blocks[0] or not (layout.cp > 1 or layout.sequence_parallel or layout.recompute == "offload"):
        return {}
    previous = layers[blocks[0] - 1]
    size = previous.output_elements * step.microbatch_samples * BYTES_OF[step.compute_dtype]
    return {blocks[0] - 1: size, blocks[-1] + 1: -size}


class LayerGradients(NamedTuple):
    """Bytes of gradients of weights that are alive in the backward of a layer, besides those at rest."""

    largest: int
    """Of its largest weight."""
    at_start: int
    """Those of buckets that are not full, when it begins."""
    most: int
    """The same, where it works on most."""
    in_norms: int
    """The same, where its norms work on most; under zero=2 and 3 those of the layer alone."""
    behind: int
    """The same, at its end."""


def _layer_gradients(program: Program) -> list[LayerGradients]:
    """Return the gradients that are alive in the backward of each layer.

    Those of a bucket stay where autograd has put them until the last of the bucket has come. Those in no bucket stay with their weights, where those of
    later micro-batches are added at once.
    """
    step, sizes_by_layer = program.step, list[LayerGradients]()
    bucket_of = {member.name: bucket.name for bucket in program.buckets for member in bucket.members}
    missing = {bucket.name: len(bucket.members) for bucket in program.buckets}
    arrived, total = dict.fromkeys(missing, 0), 0
    stays = step.zero >= 2 or step.num_microbatches == 1
    for index in reversed(range(len(step.model.layers))):
        layer, sizes, numel, others = step.model.layers[index], gradient_bytes(step, index), 0, 0
        params = [param for param in step.model.params_of(index) if param.trainable]
        alive = [(0, total)]
        for param, size in zip(reversed(params), reversed(sizes), strict=True):
            name = bucket_of.get(param.name)
            numel += param.numel
            if name is None:
                others += size * stays
            else:
                arrived[name], total, missing[name] = arrived[name] + size, total + size, missing[name] - 1
            alive.append((numel, total + others))
            if name is not None and not missing[name]:
                total -= arrived[name]
        most, norms = (
            next((size for number, size in alive if number >= wanted), alive[-1][1])
            for wanted in (layer.working.weights, layer.norm_working.weights)
        )
        sizes_by_layer.append(LayerGradients(max(sizes, default=0), alive[0][1], most, norms, total))
    if step.splits_backward:  # most gradients of weights come in a task of their own
        sizes_by_layer = [LayerGradients(gradients.largest, 0, 0, 0, 0) for gradients in sizes_by_layer]
    return sizes_by_layer[::-1]


def _unpacked_bytes(step: StepSpec, layer: int) -> int:
    """Return the bytes of the unpacked values of a layer's largest 4-bit weight, which come on top of its packed bytes."""
    numel = max((param.numel for param in step.model.params_of(layer) if param.held_as), default=0)
    # In float32, beside the index of each pair of codes, or what they are cast to.
    return numel * (4 + (2 if step.compute_dtype == "float32" else BYTES_OF[step.compute_dtype]))


def gradient_bytes(step: StepSpec, layer: int) -> list[int]:
    """Return the bytes of the gradient of each of a layer's weights."""
    params = (param for param in step.model.params_of(layer) if param.trainable)
    return [param.numel * BYTES_OF[step.working_dtype(param)] for param in params]


class Saved(NamedTuple):
    """Bytes that a layer keeps and works on for a micro-batch."""

    after_forward: int = 0
    """Activations after its forward."""
    in_backward: int = 0
    """Activations that its backward reads."""
    working: int = 0
    """Peak working memory of its backward, without weight gradients."""
    in_norms: int = 0
    """The same in the backward of its norms; less than 0 where more of what was kept has been freed by then."""
    boundaries: int = 0
    """The gradients of its input and its output."""
    loss_made: int = 0
    """Working memory of the forward of the loss after it."""
    loss: int = 0
    """Activations that the loss after it saves for its backward, in master precision."""
    loss_working: int = 0
    """Working memory of the backward of the loss."""
    loss_fixed: int = 0
    """The part of that which a larger micro-batch does not need more of."""
    working_fixed: int = 0
    """The part of `working` which a larger micro-batch does not need more of: that of a chunk of tokens."""


def saved_bytes(step: StepSpec, layer: LayerSpec, is_on_host: bool = False) -> Saved:
    """Return the bytes that a layer saves and works on for a micro-batch; the last layer's include the loss.

    `is_on_host` is whether its input is in the host's memory between forward and backward.
    """
    element_bytes = step.microbatch_samples * BYTES_OF[step.compute_dtype]
    elements = layer.saved_elements + layer.saved_norm_elements * step.is_mixed
    recompute = step.layout.recompute if layer.is_block and layer.has_backward else "none"
    input_elements = layer.input_elements - (layer.moved_input_elements if is_on_host else 0)
    saved = elements if recompute == "none" else input_elements
    if recompute in KEEPS_PRODUCTS:
        saved = max(input_elements, layer.saved_selective_elements - dropped_elements(step, layer))
    if recompute != "none" and step.is_mixed:
        elements += layer.input_norm_elements
    working = layer.working.elements * element_bytes
    most = max((working, *_in_chunks(step, layer, element_bytes)))
    return Saved(
        after_forward=saved * element_bytes,
        in_backward=max(saved, elements) * element_bytes,
        working=most,
        working_fixed=most - working,
        in_norms=(layer.norm_working.elements + layer.norm_working.wide_elements * step.is_mixed) * element_bytes,
        boundaries=min(layer.working.elements, layer.input_elements + layer.output_elements) * element_bytes,
        **_with_pairs(step, layer, _of_loss(step, layer)),
    )


def _in_chunks(step: StepSpec, layer: LayerSpec, element_bytes: int) -> list[int]:
    """Return the working memory of each part of a layer that is computed in chunks of tokens: the gradients of its input and output,
    what a chunk makes, and the gradients of its weights, which are added up over the chunks in master precision."""
    if not layer.chunk_tokens:
        return []
    size = BYTES_OF[step.compute_dtype]
    return [
        part.boundary_elements * element_bytes
        + min(layer.chunk_tokens, part.tokens * step.microbatch_samples) * part.elements_of_token * size
        + part.weights * BYTES_OF[step.master_dtype]
        for part in layer.token_parts
    ]


def _with_pairs(step: StepSpec, layer: LayerSpec, sizes: dict[str, int]) -> dict[str, int]:
    """Add what a loss over all samples keeps for pairs of samples: of all, or of those of a micro-batch with all."""
    if not (layer.loss_elements and step.model.loss_pairs):
        return sizes
    by_rows = any(read.is_by_rows for read in step.model.loss_reads or ())
    rows = step.microbatch_samples if by_rows else step.global_batch
    pairs = step.model.loss_pairs * rows * step.global_batch * BYTES_OF[step.master_dtype]
    return {**sizes, "loss_made": sizes["loss_made"] + pairs}


def _of_loss(step: StepSpec, layer: LayerSpec) -> dict[str, int]:
    """Return the bytes that the loss after a layer saves and works on."""
    samples, compute, master = step.microbatch_samples, BYTES_OF[step.compute_dtype], BYTES_OF[step.master_dtype]
    head, chunk = layer.head, step.layout.loss_chunk
    if head is None or chunk is None:
        return {
            # Behind the forward the output is there too, and its copy in master precision.
            "loss_made": layer.loss_elements * samples * (compute + master * step.is_mixed),
            "loss": layer.loss_elements * samples * master,
            "loss_working": layer.loss_working_elements * samples * master,
        }
    tokens = head.rows * samples
    logits = min(chunk, tokens) * head.columns * (master + compute * step.is_mixed)
    weight = 0 if head.is_frozen else head.columns * head.inner
    # Several chunks' gradients of a weight in half precision are added up in master precision.
    adds_up = tokens > chunk and step.is_mixed
    fixed = logits + weight * (compute + master * adds_up)
    return {
        "loss_made": logits,
        "loss": tokens * master,
        "loss_working": fixed + tokens * head.inner * compute,
        "loss_fixed": fixed,
    }
