"""The parts of a layer's shape as data: products, exchanges, gathered tensors, calls that need several samples, written attentions, the head.

All counts are those of one sample, before any cut. `cut_by` and `sliced_by` return one rank's part: under a tensor cut, and
under context parallelism, which leaves it a slice of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Cutting = Literal["", "columns", "inner", "count"]
"""The size of a product that a tensor cut divides; empty for none."""


@dataclass(frozen=True, slots=True)
class ForwardPlace:
    """A place of a layer's forward among the checkpoints in the model's code (`torch.utils.checkpoint`)."""

    at: int = 0
    """Number of checkpoints that have begun or ended before it."""
    inside: tuple[int, ...] = ()
    """The checkpoints around it, the outermost first: each has as its number how many have begun or ended when it has begun."""
    again: tuple[int, ...] = ()
    """Those that keep something behind it, so that they repeat it; 0 is the layer itself, where the layout repeats its forward."""


NOWHERE = ForwardPlace()
"""The place of what stands in a model that makes no checkpoints."""

Factors = Literal["weight", "frozen", "pair", "attention", "causal"]
"""The factors of a product: see `Product.factors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Equal matrix products in the forward of one sample: `count` products [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int
    count: int = 1
    factors: Factors = "weight"
    """weight: the second factor is a trained weight, so more samples are more rows; frozen: it is a weight that is not
    trained. pair: both factors are activations, so more samples are more products. attention: queries x keys, and the
    result x values, in one kernel, with `inner` the sum of both head sizes; causal: the same, of which the kernel skips
    half."""
    within: float = 1.0
    """Part of the pairs of tokens that share a document, of a causal attention that computes packed documents one by one."""
    groups: int = 1
    """Number of weights among which the rows are divided: experts."""
    taps: int = 1
    """Number of rows that share an element of the first factor: the elements of a convolution's kernel."""
    channels_first: bool = False
    """Whether it is a convolution of tensors with their channels before their pixels, torch's default memory format."""
    cut: Cutting = ""
    """Size that a tensor cut divides."""
    most_parts: int = 0
    """Largest number of parts of a tensor cut: heads of keys and values, shared by more ranks; 0 for any number."""
    owner: str = ""
    """Path of the module that runs it."""
    chunk_rows: int = 0
    """Rows of a chunk, if it makes logits in chunks with their loss, and once more in the backward; 0 if at once."""
    is_between: bool = False
    """Whether it runs between the tensor-cut parts of a block, under sequence parallelism on a rank's tokens."""
    is_batched: bool = False
    """Whether one operation multiplies several pairs of matrices, as scores of an attention are made without a fused kernel."""
    keeps_scores: bool = False
    """Whether it is an attention that keeps all its scores for the backward, in float32 at least, as torch's math does."""
    is_hidden: bool = False
    """Whether it is computed within a function of its own backward, as by a ring, so that recompute cannot keep its result."""
    is_repeated: bool = True
    """Whether its layer keeps something for the backward behind it, so that a repeated forward does not end before it."""

    @property
    def result_elements(self) -> int:
        """Elements of its result; of an attention as if its values were as wide as its keys."""
        return self.rows * (self.inner // 2 if self.is_attention else self.columns) * self.count

    @property
    def is_deferrable(self) -> bool:
        """Whether its weight gradient can be deferred: it needs only the input and the gradient of the output."""
        return self.factors == "weight" and self.groups == 1 and self.taps == 1 and not self.chunk_rows

    @property
    def flops(self) -> int:
        """FLOPs of one sample, masked positions included."""
        return 2 * self.rows * self.inner * self.columns * self.count

    @property
    def attended_part(self) -> float:
        """Fraction of the FLOPs that is computed: a causal kernel skips later tokens, and those of other documents."""
        return self.within / 2 if self.factors == "causal" else 1.0

    def cut_by(self, degree: int) -> Product:
        """Return one rank's part of the product under a tensor cut."""
        parts = min(degree, self.most_parts or degree)
        return replace(self, **{self.cut: -(-getattr(self, self.cut) // parts)}) if self.cut else self

    @property
    def is_attention(self) -> bool:
        """Whether it is an attention in one kernel."""
        return self.factors in ("attention", "causal")

    def sliced_by(self, degree: int) -> Product:
        """Return one rank's part of the product under a cut of the sequence: rows, or heads of an attention."""
        if self.is_attention:
            return replace(self, count=-(-self.count // degree))
        return replace(self, rows=-(-self.rows // degree))


@dataclass(frozen=True, slots=True, order=True)
class WorkingSet:
    """The elements that are alive at most at once in a backward, besides those that its forward kept, without gradients of weights."""

    elements: int = 0
    """Less than 0 where more of those that the forward kept have been freed by then."""
    cut_elements: int = 0
    """The part of these that a tensor cut divides."""
    wide_elements: int = 0
    """Additional elements under bf16 and fp16, because norms compute in float32."""
    weights: int = 0
    """Elements of the layer's weights whose gradients have been made by then."""

    def of_one(self, num_samples: int) -> WorkingSet:
        """Return the working set of one of so many samples."""
        alive, cut, wide = (part // num_samples for part in (self.elements, self.cut_elements, self.wide_elements))
        return WorkingSet(alive, cut, wide, self.weights)

    def plus(self, elements: int, cut_elements: int = 0, wide_elements: int = 0) -> WorkingSet:
        """Return the working set with more elements."""
        return WorkingSet(
            self.elements + elements, self.cut_elements + cut_elements, self.wide_elements + wide_elements, self.weights
        )

    def cut_by(self, degree: int) -> WorkingSet:
        """Return one rank's part under a tensor cut."""
        part = self.cut_elements // degree
        return WorkingSet(self.elements - self.cut_elements + part, part, self.wide_elements, self.weights // degree)

    def divided_by(self, degree: int) -> WorkingSet:
        """Return one rank's part under sequence parallelism, which divides what a tensor cut leaves whole."""
        elements = self.cut_elements + (self.elements - self.cut_elements) // degree
        return WorkingSet(elements, self.cut_elements, self.wide_elements // degree, self.weights)

    def sliced_by(self, degree: int) -> WorkingSet:
        """Return one rank's part under context parallelism, rounded up."""
        alive, cut, wide = (-(-part // degree) for part in (self.elements, self.cut_elements, self.wide_elements))
        return WorkingSet(alive, cut, wide, self.weights)


@dataclass(frozen=True, slots=True)
class OtherWork:
    """The work of a forward that is no matrix product: elements that operations read and write, and operations that the host launches."""

    elements: int = 0
    cut_elements: int = 0
    """The part of these that a tensor cut divides."""
    kernels: int = 0
    channel_elements: int = 0
    """Elements that one block of threads reads or writes, of batch norms over tensors with their channels first: a block has a channel."""

    def of_one(self, num_samples: int) -> OtherWork:
        """Return the work for one of so many samples."""
        parts = (part // num_samples for part in (self.elements, self.cut_elements, self.channel_elements))
        return OtherWork(next(parts), next(parts), self.kernels, next(parts))

    def plus(self, elements: int, cut_elements: int = 0, kernels: int = 0) -> OtherWork:
        """Return the work with more of it."""
        more = self.elements + elements, self.cut_elements + cut_elements, self.kernels + kernels
        return OtherWork(*more, self.channel_elements)

    def cut_by(self, degree: int) -> OtherWork:
        """Return one rank's part under a tensor cut."""
        part = self.cut_elements // degree
        return replace(self, elements=self.elements - self.cut_elements + part, cut_elements=part)

    def divided_by(self, degree: int) -> OtherWork:
        """Return one rank's part under sequence parallelism, which divides what a tensor cut leaves whole."""
        elements = self.cut_elements + (self.elements - self.cut_elements) // degree
        return replace(self, elements=elements)


NO_WORKING_SET, NO_WORK = WorkingSet(), OtherWork()
"""Nothing is alive, and nothing is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPart:
    """A module of a block that acts on each token by itself, such as its MLP, and so may be given some of the tokens at a time."""

    owner: str
    """Path of the module."""
    tokens: int
    boundary_elements: int
    """Elements of its input and its output."""
    saved_elements: int
    """Elements that it keeps for its backward, besides its input."""
    saved_norm_elements: int = 0
    """Additional elements of norms within it under bf16 and fp16."""
    results: int = 0
    """Elements of the results of its products, which recompute=selective keeps."""
    working_elements: int = 0
    """Largest number of elements alive in its backward besides those that its layer keeps, with the gradients of input and output."""
    other_working_elements: int = 0
    """The same of the rest of its layer's backward."""
    weights: int = 0
    """Elements of its weights that take a gradient."""

    @property
    def elements_of_token(self) -> int:
        """Elements that are alive for each token of a chunk while the chunk goes backward, input and output aside."""
        alive = self.saved_elements + self.saved_norm_elements + self.working_elements - self.boundary_elements
        return -(-max(alive, 0) // self.tokens)

    def sliced_by(self, degree: int) -> TokenPart:
        """Return one rank's part under context parallelism."""
        names = ("tokens", "boundary_elements", "saved_elements", "saved_norm_elements", "results", "working_elements")
        sizes = {name: -(-getattr(self, name) // degree) for name in (*names, "other_working_elements")}
        return replace(self, **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSum:
    """A tensor that each rank of a tensor cut has a summand of; `elements` are those of one sample."""

    owner: str
    """Path of the module whose output (forward) or input gradient (backward) it is."""
    elements: int
    kind: Literal["sum", "gather", "logits"] = "sum"
    """gather: it is no summand but a part, which is gathered; logits: gathered unless the loss works on cut logits."""
    beside: tuple[str, ...] = ()
    """Paths of the linear modules that read the tensor and have a weight, whose gradient can be computed
    while that of the tensor is summed."""
    place: ForwardPlace = NOWHERE


BoundaryKind = Literal["gather", "scatter", "join", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A boundary of a tensor-cut part of a block, where a rank's tokens become the whole sequence, or the reverse.

    gather    the sequence is gathered; the ranks' gradients of it are summed
    scatter   the ranks' sums are added, and a rank keeps its tokens of them
    join      the sequence is gathered for a part that computes as under tp alone, whose gradient every rank has whole
    split     a rank keeps its tokens of what such a part returns

    `elements` are those of the whole sequence of one sample.
    """

    owner: str
    """Path of the module that takes the gathered sequence (gather, join), or returns the sum or what is split."""
    elements: int
    kind: BoundaryKind
    has_gradient: bool = True
    """Whether a gradient flows back through it."""
    place: ForwardPlace = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One all_to_all of an attention under context parallelism: of its queries, keys, values or output.

    Counts are those of one sample, all tokens, before any cut (`strategies/context.py`).
    """

    role: Literal["query", "key", "value", "output"]
    elements: int
    heads: int
    query_heads: int
    """Number of heads of the same attention's queries; keys and values may have fewer."""
    is_cut: bool = False
    """Whether a tensor cut leaves a rank a part of the heads."""
    takes_gradient: bool = True
    """Whether a gradient flows back through it."""
    is_kept: bool = False
    """Whether the reader of an output keeps it for the backward, before and after the all_to_all."""
    is_within: bool = False
    """Whether its attention is part of a `GatheredPart`, which is given all tokens, so that nothing is exchanged."""
    place: ForwardPlace = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTensor:
    """An argument of a `GatheredPart`; `elements` are those of the whole sequence of one sample."""

    place: str
    """Its place among the arguments."""
    dim: int
    """Its dimension of tokens."""
    elements: int
    takes_gradient: bool = True
    is_known: bool = False
    """Whether every rank holds the whole tensor already, as an argument of the block that is passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPart:
    """One call of a module that every rank of `cp` computes on all tokens, because it mixes them in another way than attention."""

    owner: str
    """Path of the module."""
    given: tuple[GatheredTensor, ...]
    """Arguments that are gathered, in order."""
    returned: tuple[tuple[str, int], ...] = ()
    """Place and dimension of tokens of each result of which a rank keeps its own tokens."""
    before: int = 0
    """Number of attentions of its layer that run before it."""
    reason: str = ""
    """Why its tokens cannot be computed by slices."""
    place: ForwardPlace = NOWHERE

    @property
    def gathered(self) -> tuple[GatheredTensor, ...]:
        """The arguments that ranks send each other."""
        return tuple(mask for mask in self.given if not mask.is_known)


MoveKind = Literal["conv", "pad", "cat", "roll", "write", "edge", "state"]
"""The function that brings a token's result to another one: a convolution, a padding, `torch.cat`, `torch.roll`, or an item that is
set; `edge` sets the first or the last tokens of the sequence alone, and `state` is a recurrence from the state of the rank before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMove:
    """One call of a function that computes a token from those at a fixed distance (`independence/token_moves.py`)."""

    owner: str
    """Path of the module whose code calls it."""
    number: int
    """Number of such calls that the module's own code has made before since its forward began."""
    kind: MoveKind
    dim: int
    """Dimension of tokens of the operand."""
    left: int
    """Number of tokens that are needed of the rank before."""
    right: int
    """Number of tokens that are needed of the rank behind."""
    start: int = 0
    """First token of the operand, of which code may have cut some off."""
    elements: int = 0
    """Elements of one token of one sample, or of the state."""
    is_cut: bool = False
    """Whether a tensor cut leaves a rank a part of these elements."""
    takes_gradient: bool = True
    before: int = 0
    """Number of attentions of its layer that run before it."""
    parts_before: int = 0
    """Number of `GatheredPart` of its layer that run before it."""
    function: str = ""
    """Name of the function of a recurrence."""
    is_of_weights: bool = False
    """Whether that function multiplies by weights, as a recurrent layer does, which is done for one rank's tokens after the other's too."""
    place: ForwardPlace = NOWHERE

    @property
    def messages(self) -> tuple[int, ...]:
        """The elements of each message of one sample in the forward, before a tensor cut: to the next rank, and to the previous one."""
        return tuple(tokens * self.elements for tokens in (self.left, self.right) if tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDispatch:
    """The rows that one sample dispatches to a module of experts: one for each token and each expert chosen for it."""

    owner: str
    """Path of the module that holds the experts."""
    rows: int
    width: int
    """Elements of a row, dispatched or combined."""
    experts: int
    """Number of experts of the module."""
    place: ForwardPlace = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormCall:
    """A call of batch norm that takes the statistics of samples, of a group of them."""

    owner: str
    """Path of the module whose code calls it."""
    channels: int
    keeps_statistics: bool = True
    """Whether it updates running statistics."""
    takes_gradient: bool = True
    """Whether a gradient flows back into its input."""
    views: int = 1
    """How often all samples stand one behind the other among its rows, as those of two views of a batch do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBuffer:
    """A buffer of no layer's modules that the code of a layer lets have a value after the step (`samestep.after_step`)."""

    name: str
    elements: int
    dtype: str = ""
    """Dtype in which it is sent; empty for floating numbers, which are sent in master precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchValueCall:
    """A call that takes the sum, or the rows, of all samples of the step (`samestep.batch_sum`, `batch_cat`)."""

    owner: str
    """Path of the module whose code calls it; empty for the loss, or the model itself."""
    kind: Literal["sum", "cat"]
    elements: int
    """Elements of a row."""
    dtype: str = ""
    """Dtype in which it is sent; empty for floating numbers, which are sent in master precision."""
    takes_gradient: bool = True
    """Whether a gradient flows back into it."""
    is_everywhere: bool = False
    """Whether every stage of a pipeline makes it, in the model's own code and of what depends on no weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that a pipeline stage is sent besides, or in place of, the output of the layer before its first."""

    owner: str
    """Name of the message: that of the layer before, and if there are several, the operation that returned the tensor."""
    elements: int
    """Elements for each sample."""
    fixed_elements: int = 0
    """Elements whatever the number of samples is."""
    dtype: str = ""
    """Dtype of its elements; empty for the compute dtype."""
    takes_gradient: bool = True
    """Whether a gradient is sent back."""
    is_sliced: bool = False
    """Whether it has a row for each token between blocks, so that context parallelism leaves a rank a part of it."""

    def sliced_by(self, degree: int) -> Crossing:
        """Return one rank's part of the tensor under context parallelism."""
        if not self.is_sliced:
            return self
        return replace(self, elements=-(-self.elements // degree), fixed_elements=-(-self.fixed_elements // degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The linear module that makes the logits, and what its layer needs without them; counts are those of one sample."""

    owner: str
    """Path of the module."""
    rows: int
    """Rows of logits."""
    inner: int
    """Elements of a row of its input."""
    columns: int
    """Classes."""
    saved_elements: int = 0
    """Elements that the layer keeps for its backward, without logits and tensors computed from them."""
    working_elements: int = 0
    """Largest number of elements alive in the layer's backward besides these, without gradients of logits and weights."""
    is_frozen: bool = False
    """Whether its weight is not trained."""

    @property
    def logits(self) -> int:
        """Elements of the logits."""
        return self.rows * self.columns

    def cut_by(self, degree: int) -> HeadSpec:
        """Return one rank's part where a tensor cut divides the classes."""
        return replace(self, columns=-(-self.columns // degree))

    def sliced_by(self, degree: int) -> HeadSpec:
        """Return one rank's part under context parallelism."""
        parts = {name: -(-getattr(self, name) // degree) for name in ("rows", "saved_elements", "working_elements")}
        return replace(self, **parts)
