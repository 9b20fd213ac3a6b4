"""A layer's shape as data: its matrix products, what it keeps for its backward, and what its ranks exchange (`layer_parts.py`).

All counts are those of one sample, before any cut. `cut_by` and `sliced_by` return one rank's part: under a tensor cut, and
under context parallelism, which leaves it a slice of the sequence.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from samestep.models.layer_parts import (
    NO_WORK,
    NO_WORKING_SET,
    BatchNormCall,
    BatchValueCall,
    Boundary,
    Crossing,
    Exchange,
    ExpertDispatch,
    GatheredPart,
    HeadSpec,
    KeptBuffer,
    OtherWork,
    PartialSum,
    Product,
    TokenMove,
    TokenPart,
    WorkingSet,
)

BeginsStage = Literal["", "yes", "if needed", "named", "no"]
"""Whether a pipeline stage begins with a layer: with a block if it is empty; `if needed`: where blocks are fewer than stages;
`named`, `no`: as `model.stages` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: a block, or everything before, between or after the blocks. Counts are those of one sample."""

    name: str
    modules: tuple[str, ...]
    """Paths of the modules that it is the first to call; no two layers share one."""
    again: tuple[str, ...] = ()
    """Paths of modules with weights that an earlier layer has called before."""
    repeats: str = ""
    """Name of the earlier layer whose block it calls again; empty if it is the first to call its block."""
    calls: int = 0
    """Number of calls of top-most modules with weights."""
    entered: tuple[tuple[str, int], ...] = ()
    """Modules that other layers enter too, and how often it does."""
    is_block: bool = False
    begins_stage: BeginsStage = ""
    """Whether a pipeline stage may begin with it, if that is not just what blocks may."""
    forward_flops: int = 0
    output_elements: int = 0
    """Elements that it passes to the next layer."""
    saved_elements: int = 0
    """Elements kept from its forward for its backward, without weights."""
    saved_selective_elements: int = 0
    """Elements kept under recompute=selective: its input and the results of its matrix products."""
    input_elements: int = 0
    """Elements of its input, which recompute=full keeps."""
    input_norm_elements: int = 0
    """The part of these that norms alone keep: under bf16 and fp16, where they keep float32 copies, recompute has it besides."""
    saved_norm_elements: int = 0
    """Additional elements kept under bf16 and fp16, because norms keep float32 copies of 2-byte activations."""
    saved_cut_elements: int = 0
    """The part of `saved_elements` that a tensor cut divides."""
    saved_selective_cut_elements: int = 0
    """The part of `saved_selective_elements` that a tensor cut divides."""
    working: WorkingSet = NO_WORKING_SET
    """What is alive in its backward at most."""
    norm_working: WorkingSet = NO_WORKING_SET
    """What is alive in the backward of its norms at most."""
    loss_elements: int = 0
    """Elements that the loss keeps of the last layer's output, in float32 at least; 0 for other layers."""
    loss_working_elements: int = 0
    """Elements alive in the loss's backward besides those; 0 for other layers."""
    head: HeadSpec | None = None
    """The module of the last layer that makes the logits, if it is known; None of other layers."""
    products: tuple[Product, ...] = ()
    """Its matrix products; empty if only their FLOPs are known."""
    moved: OtherWork = NO_WORK
    """What all other operations of its forward read and write; its `kernels` are those of products too."""
    fusible: OtherWork = NO_WORK
    """The part of `moved` that is spared where a compiler fuses operations."""
    backward_reads_weights: bool = True
    """Whether a gradient flows through its weights to its input; not so in a layer of embeddings."""
    has_backward: bool = True
    """Whether a backward runs in it: not so where its weights are frozen, and those of every layer before it."""
    forward_sums: tuple[PartialSum, ...] = ()
    """Partial sums of a tensor cut in the forward, in order: outputs of row-cut modules and cut embeddings."""
    repeats_last_sum: bool = False
    """Whether something is kept after the last of them, so that recompute repeats that sum as well."""
    backward_sums: tuple[PartialSum, ...] = ()
    """Partial sums of a tensor cut in the backward, in order: input gradients of column-cut modules."""
    exchanges: tuple[Exchange, ...] = ()
    """All_to_alls of its attentions under context parallelism, in order of the forward."""
    gathered_parts: tuple[GatheredPart, ...] = ()
    """Calls of modules that compute all tokens under context parallelism, in order of the forward."""
    token_moves: tuple[TokenMove, ...] = ()
    """Calls that need tokens of neighbours under context parallelism, in order of the forward."""
    saved_pair_elements: int = 0
    """The part of `saved_elements` that context parallelism leaves whole: masks of pairs of tokens."""
    sequence_boundaries: tuple[Boundary, ...] = ()
    """Boundaries of a block under sequence parallelism, in order of the forward; empty if it cannot be used."""
    dispatches: tuple[ExpertDispatch, ...] = ()
    """Rows that it dispatches to experts, in order of the forward."""
    token_parts: tuple[TokenPart, ...] = ()
    """Its modules that act on each token by itself; under `chunk_tokens` those that are computed in chunks."""
    chunk_tokens: int = 0
    """Tokens of such a chunk; 0 where all are computed at once."""
    batch_norms: tuple[BatchNormCall, ...] = ()
    """Its calls of batch norm that take the statistics of samples, in order of the forward."""
    batch_values: tuple[BatchValueCall, ...] = ()
    """Its calls that take values of all samples, in order of the forward."""
    kept: tuple[KeptBuffer, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    """Tensors that cross the boundary before it, if a stage begins with it; empty if that is the output of the layer
    before alone, in the compute dtype."""
    crossing_refusal: str = ""
    """Why no stage can begin with it; empty if one can."""
    cut_crossing: str = ""
    """The maker of a tensor of which a tensor cut leaves a rank a part, and which would cross that boundary; empty if none does."""

    @property
    def called(self) -> tuple[str, ...]:
        """Paths of all modules that it calls."""
        return *self.modules, *self.again

    @property
    def makes_checkpoints(self) -> bool:
        """Whether its code makes checkpoints around what ranks send, where they are not run plainly."""
        places = (
            *(token_sum.place for token_sum in (*self.forward_sums, *self.backward_sums)),
            *(sequence_boundary.place for sequence_boundary in self.sequence_boundaries),
            *(dispatch.place for dispatch in self.dispatches),
            *(exchange.place for exchange in self.exchanges),
            *(gathered_part.place for gathered_part in self.gathered_parts),
            *(token_move.place for token_move in self.token_moves),
        )
        return any(place.inside for place in places)

    @property
    def moved_input_elements(self) -> int:
        """Elements of its input that recompute=offload moves: what the layer before has computed, not angles and masks of all blocks."""
        return min(self.input_elements, self.output_elements)

    @property
    def whole_parts(self) -> tuple[str, ...]:
        """Paths of its parts that compute whole sequences under sequence parallelism, as under tp alone."""
        return tuple(boundary.owner for boundary in self.sequence_boundaries if boundary.kind == "split")

    @property
    def sliced_exchanges(self) -> tuple[Exchange, ...]:
        """The all_to_alls of the attentions that are given a slice of the tokens under context parallelism."""
        return (
            tuple(exchange for exchange in self.exchanges if not exchange.is_within)
            if self.gathered_parts
            else self.exchanges
        )

    def with_attention(self, number: int) -> LayerSpec:
        """Return the layer with one of the attentions alone that are given a slice of the tokens."""
        attentions = [
            product for product in self.products if product.is_attention and not self.is_gathered(product.owner)
        ]
        saved = (
            {id(attention) for attention in attentions[number : number + 1]}
            if self.num_sliced_attentions == len(attentions)
            else ()
        )
        products = tuple(product for product in self.products if id(product) in saved or not product.is_attention)
        return replace(self, products=products, exchanges=self.sliced_exchanges[4 * number : 4 * number + 4])

    @property
    def num_sliced_attentions(self) -> int:
        """Number of attentions that are given a slice of the tokens under context parallelism."""
        return len(self.sliced_exchanges) // 4

    def is_gathered(self, path: str) -> bool:
        """Return whether a module computes all tokens under context parallelism."""
        return any(path == part.owner or path.startswith(f"{part.owner}.") for part in self.gathered_parts)

    @property
    def sends_gradient(self) -> bool:
        """Whether a stage that begins with it sends a gradient to the stage before."""
        return not self.crossings or any(crossing.takes_gradient for crossing in self.crossings)

    @property
    def is_beginning(self) -> bool:
        """Whether a pipeline stage would begin with it, if what crosses the boundary before it can be sent."""
        return self.begins_stage in ("yes", "if needed", "named") or (self.is_block and not self.begins_stage)

    def why_no_stage(self, is_cut: bool) -> str:
        """Return why no pipeline stage can begin with it in a model that a tensor cut divides or not; empty if one can."""
        if is_cut and self.cut_crossing and not self.crossing_refusal:
            return f"tp cuts the output of {self.cut_crossing}, which is read there or later"
        return self.crossing_refusal

    @property
    def may_begin_stage(self) -> bool:
        """Whether a pipeline stage other than the first can begin with it, without a tensor cut."""
        return self.is_beginning and not self.crossing_refusal

    @property
    def backward_flops(self) -> int:
        """FLOPs of one sample's backward: gradients of inputs and of trained weights, and logits that are computed again."""
        if not self.has_backward:
            return 0
        frozen = sum(product.flops for product in self.products if product.factors == "frozen")
        return 2 * self.forward_flops - frozen + sum(product.flops for product in self.products if product.chunk_rows)

    @property
    def deferred_flops(self) -> int:
        """FLOPs of the weight gradients that one sample's backward can defer: those of linear layers."""
        return sum(product.flops for product in self.products if product.is_deferrable)

    def cut_by(self, degree: int) -> LayerSpec:
        """Return one rank's part of the layer under a tensor cut: its work and what it keeps; partial sums stay."""
        products = tuple(product.cut_by(degree) for product in self.products)

        def elsewhere(elements: int) -> int:
            """Return the elements on the other ranks."""
            return elements - elements // degree

        return replace(
            self,
            forward_flops=self._flops_as(products, self.forward_flops // degree),
            products=products,
            head=self.head.cut_by(degree) if self.head else None,
            saved_elements=self.saved_elements - elsewhere(self.saved_cut_elements),
            saved_selective_elements=self.saved_selective_elements - elsewhere(self.saved_selective_cut_elements),
            working=self.working.cut_by(degree),
            norm_working=self.norm_working.cut_by(degree),
            saved_cut_elements=self.saved_cut_elements // degree,
            saved_selective_cut_elements=self.saved_selective_cut_elements // degree,
            moved=self.moved.cut_by(degree),
            fusible=self.fusible.cut_by(degree),
        )

    def separable_products(self, paths: Collection[str]) -> tuple[Product, ...]:
        """Return the products of these modules whose weight gradients can be computed separately from their input gradients."""
        return tuple(
            product
            for product in self.products
            if product.is_deferrable and any(f".{path}".endswith(f".{product.owner}") for path in paths)
        )

    def sliced_by(self, degree: int) -> LayerSpec:
        """Return one rank's part of the layer under context parallelism: its work, its sums and what it keeps."""

        def part(elements: int) -> int:
            """Return one rank's elements, rounded up."""
            return -(-elements // degree)

        def sums(parts: tuple[PartialSum, ...]) -> tuple[PartialSum, ...]:
            """Return the partial sums of one rank's tokens."""
            return tuple(
                gathered if self.is_gathered(gathered.owner) else replace(gathered, elements=part(gathered.elements))
                for gathered in parts
            )

        serial = {move.owner for move in self.token_moves if move.kind == "state"}
        if any(serial) and not self.gathered_parts:
            sliced = replace(self, token_moves=()).sliced_by(degree)
            return self._but_states(replace(sliced, token_moves=self.token_moves), serial)
        sliced = replace(
            self,
            products=tuple(p if self.is_gathered(p.owner) else p.sliced_by(degree) for p in self.products),
            output_elements=part(self.output_elements),
            input_elements=part(self.input_elements),
            forward_sums=sums(self.forward_sums),
            backward_sums=sums(self.backward_sums),
            dispatches=tuple(
                dispatch if self.is_gathered(dispatch.owner) else replace(dispatch, rows=part(dispatch.rows))
                for dispatch in self.dispatches
            ),
            crossings=tuple(crossing.sliced_by(degree) for crossing in self.crossings),
            token_parts=tuple(token_part.sliced_by(degree) for token_part in self.token_parts),
        )
        if (
            self.gathered_parts
        ):  # it keeps and moves at most what one device does: the share of these parts is not known
            return replace(sliced, forward_flops=self._flops_as(sliced.products, self.forward_flops))
        kept_twice = [part(exchange.elements) for exchange in self.exchanges if exchange.is_kept]
        cut_twice = [part(exchange.elements) for exchange in self.exchanges if exchange.is_kept and exchange.is_cut]
        return replace(
            sliced,
            forward_flops=part(self.forward_flops),
            saved_elements=part(self.saved_elements - self.saved_pair_elements)
            + self.saved_pair_elements
            + sum(kept_twice),
            saved_selective_elements=part(self.saved_selective_elements),
            saved_norm_elements=part(self.saved_norm_elements),
            input_norm_elements=part(self.input_norm_elements),
            working=self.working.sliced_by(degree),
            norm_working=self.norm_working.sliced_by(degree),
            saved_cut_elements=part(self.saved_cut_elements) + sum(cut_twice),
            saved_selective_cut_elements=part(self.saved_selective_cut_elements),
            moved=replace(self.moved, elements=part(self.moved.elements), cut_elements=part(self.moved.cut_elements)),
            fusible=self.fusible.of_one(degree),
            loss_elements=part(self.loss_elements),
            loss_working_elements=part(self.loss_working_elements),
            sequence_boundaries=tuple(
                replace(sequence_boundary, elements=part(sequence_boundary.elements))
                for sequence_boundary in self.sequence_boundaries
            ),
            head=self.head.sliced_by(degree) if self.head else None,
        )

    def _flops_as(self, products: tuple[Product, ...], otherwise: int) -> int:
        """Return the FLOPs of the forward with other products; `otherwise` where nothing is known of its products."""
        flops, flops_now = (sum(product.flops for product in parts) for parts in (self.products, products))
        return self.forward_flops * flops_now // flops if flops else otherwise

    def _but_states(self, sliced: LayerSpec, serial: Collection[str]) -> LayerSpec:
        """Return one rank's part of a layer with recurrences, for whose products of activations, and of weights within their functions, it waits
        as long as for those of all tokens."""
        weighing = {move.owner for move in self.token_moves if move.is_of_weights}
        products = tuple(
            p if p.owner in weighing or (p.owner in serial and p.factors == "pair") else product
            for p, product in zip(self.products, sliced.products, strict=True)
        )
        return replace(sliced, products=products, forward_flops=self._flops_as(products, sliced.forward_flops))
