"""The model's shape, as data: what the strategies, the memory and the clock know of a model.

A `ModelSpec` is made by tracing a module on the meta device (`tracing/trace.py`) or read from JSON. Its layers
stand in the order in which the forward runs them: what comes before the blocks, each block, what comes after.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, TypeVar
from typing import ParamSpec as ParamSpecification

FORMAT_VERSION = 8

Cutting = Literal["", "columns", "inner", "count"]
Factors = Literal["weight", "frozen", "pair", "attention", "causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Equal matrix products in the forward of one sample: `count` times [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int
    count: int = 1
    factors: Factors = "weight"
    """weight: by a trained weight, so more samples are more rows; frozen: by a weight that is not trained.
    pair: both from the sample, so more samples are more products. attention: queries x keys and the result x values in
    one kernel, `inner` the size of both heads together; causal: the same, of which the kernel leaves out half."""
    groups: int = 1
    """Weights that the rows are dealt to: experts."""
    taps: int = 1
    """Rows that share an element of the first factor: of a convolution, the size of its kernel."""
    cut: Cutting = ""
    """What a tensor cut divides."""
    most_parts: int = 0
    """Parts that it divides at most: heads of keys and values, which ranks share where there are more; 0: any number."""
    owner: str = ""
    """Path of the module that runs it."""
    is_between: bool = False
    """It runs between the tensor-cut parts of a block: under sequence parallelism on a rank's tokens."""

    @property
    def is_deferrable(self) -> bool:
        """Whether the gradient of its weight needs nothing but its input and the gradient of its output."""
        return self.factors == "weight" and self.groups == 1 and self.taps == 1

    @property
    def flops(self) -> int:
        """FLOPs of one sample, as if nothing were masked."""
        return 2 * self.rows * self.inner * self.columns * self.count

    def cut_by(self, degree: int) -> Product:
        """Return one rank's part of it under a tensor cut."""
        parts = min(degree, self.most_parts or degree)
        return replace(self, **{self.cut: -(-getattr(self, self.cut) // parts)}) if self.cut else self

    def sliced_by(self, degree: int) -> Product:
        """Return one rank's part of it under a cut of the sequence: rows, or of an attention heads."""
        if self.factors in ("attention", "causal"):
            return replace(self, count=-(-self.count // degree))
        return replace(self, rows=-(-self.rows // degree))


def is_below(path: str, root: str) -> bool:
    """Whether a module's path is `root` or within it; all are within the model itself, the path of nothing."""
    return not root or path == root or path.startswith(f"{root}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How tensor parallelism may cut a weight: along `dim`, between its `groups` (heads, columns, tokens)."""

    style: Literal["column", "row", "vocab"]
    dim: int
    groups: int
    parts: int = 1
    """Weights lying side by side along `dim`, each cut by itself: 3 where q, k and v are fused."""
    is_shareable: bool = False
    """Whether several ranks may compute on one of its groups: heads of keys and values, fewer than those of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSum:
    """A tensor that is only the sum over all ranks of a tensor cut: of one sample, in elements."""

    owner: str
    """Path of the module that makes it (forward) or reads it (backward)."""
    elements: int


Partial = Literal["", "cut", "sequence"]
"""A weight is used on what a tensor cut divides, as the norm of each head; on a rank's tokens, under sequence parallelism."""

BoundaryKind = Literal["gather", "scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a cut part of a block is given the whole sequence, or gives its sum back: of one sample, in elements."""

    owner: str
    """Path of the module that is given it (gather) or gives it (scatter)."""
    elements: int
    kind: BoundaryKind
    has_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Queries, keys, values or output of an attention, of one sample: all tokens, before any cut.

    Context parallelism exchanges heads for tokens of it (`strategies/context.py`).
    """

    role: Literal["query", "key", "value", "output"]
    elements: int
    heads: int
    query_heads: int
    """Heads of the same attention's queries: keys and values may have fewer."""
    is_cut: bool = False
    """Whether a tensor cut leaves a rank a part of the heads."""
    takes_gradient: bool = True
    is_kept: bool = False
    """Of an output: kept for the backward by what reads it as well, so that there are two of it behind an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDispatch:
    """What a module of experts is given for one sample: a row for each token and each expert chosen for it."""

    owner: str
    """Path of the module that holds the experts."""
    rows: int
    width: int
    """Elements of a row; experts give back as many as they are given."""
    experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """A dropout mask that a forward draws: of which module, in which of its entries, and the how manieth there."""

    owner: str
    entry: int
    draw: int
    shape: tuple[int, ...]
    """Of one sample, before any cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of the model, by its full name."""

    name: str
    shape: tuple[int, ...]
    layer: int
    """Index of the layer that owns it."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor: a tied weight has them."""
    shared: bool = False
    """Used more than once in a forward (tied, or its module is called again): gradients meet in it."""
    calls: int = 1
    """How often a forward calls the module that owns it, at most."""
    called: tuple[int, int] = (0, 0)
    """When the forward first enters the module it is gathered with, and last leaves it: a count of such events."""
    last_layer: int | None = None
    """Index of the layer within which it is used last; None where that is the one that owns it."""
    read_outside: bool = False
    """Read by code outside the layer that owns it, as the embedding's weight by a model that multiplies by it."""
    takes_gradient: bool = True
    """Whether a gradient flows back into what is given to the module it is gathered with: not into tokens."""
    sparse_gradient: bool = False
    """Its gradient comes as a sparse tensor, as an embedding's may."""
    trainable: bool = True
    cut: Cut | None = None
    """How tensor parallelism may cut it; None keeps it whole on every rank."""
    partial: Partial = ""
    """Where the gradient of a weight that is whole on every rank of a tensor cut is that of a part, to be summed."""
    experts: int = 0
    """Experts that lie along its first dimension; 0 where it belongs to none."""
    tied_stages: bool = False
    """Tied across two pipeline stages: each holds it, and their gradients are summed."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: a block, or all that stands before or after the blocks. Costs are those of one sample."""

    name: str
    modules: tuple[str, ...]
    """Paths of the modules it consists of; no two layers share one."""
    is_block: bool = False
    forward_flops: int = 0
    output_elements: int = 0
    """Elements it hands to the next layer."""
    saved_elements: int = 0
    """Elements kept from its forward for its backward, without weights."""
    saved_selective_elements: int = 0
    """The same under recompute=selective: its input and the results of its matrix products."""
    input_elements: int = 0
    """Elements it is given: what recompute=full keeps."""
    saved_norm_elements: int = 0
    """As many more under bf16 and fp16: norms work in twice as many bytes, and what others keep too is there twice."""
    saved_cut_elements: int = 0
    """The part of `saved_elements` that a tensor cut divides."""
    saved_selective_cut_elements: int = 0
    """The part of `saved_selective_elements` that a tensor cut divides."""
    working_elements: int = 0
    """Most that its backward has alive at one time beside what its forward kept, gradients of weights left out."""
    working_cut_elements: int = 0
    """The part of `working_elements` that a tensor cut divides."""
    loss_elements: int = 0
    """Of the last layer: what the loss behind it keeps of its output, in float32 at least."""
    loss_working_elements: int = 0
    """Of the last layer: what the loss's backward has alive beside that."""
    products: tuple[Product, ...] = ()
    """Its matrix products; empty where only their FLOPs are known."""
    moved_elements: int = 0
    """Elements that all other operations of its forward read and write."""
    moved_cut_elements: int = 0
    """The part of `moved_elements` that a tensor cut divides."""
    kernels: int = 0
    """Operations of its forward that the host launches."""
    backward_reads_weights: bool = True
    """False where no gradient flows through the weights to an input, as in a layer of embeddings."""
    forward_sums: tuple[PartialSum, ...] = ()
    """Under a tensor cut: outputs of row-cut modules and cut embeddings, in order of the forward."""
    repeats_last_sum: bool = False
    """Something is kept after the last of them, so a repeated forward runs on to it."""
    backward_sums: tuple[PartialSum, ...] = ()
    """Under a tensor cut: gradients of the inputs of column-cut modules, in order of the backward."""
    exchanges: tuple[Exchange, ...] = ()
    """Under a cut of the sequence: what its attentions read and make, in order of the forward."""
    saved_pair_elements: int = 0
    """The part of `saved_elements` that a cut of the sequence leaves whole: masks of pairs of tokens."""
    sequence_boundaries: tuple[Boundary, ...] = ()
    """Of a block whose sequence can be cut too: boundaries of its tensor-cut parts, in order of the forward."""
    dispatches: tuple[ExpertDispatch, ...] = ()
    """Rows that go to its experts, in order of the forward."""

    @property
    def backward_flops(self) -> int:
        """FLOPs of one sample's backward: gradients of inputs and of weights; a frozen weight has none."""
        return 2 * self.forward_flops - sum(product.flops for product in self.products if product.factors == "frozen")

    @property
    def deferred_flops(self) -> int:
        """FLOPs of the gradients of weights that one sample's backward can leave for later: of linear layers."""
        return sum(product.flops for product in self.products if product.is_deferrable)

    def cut_by(self, degree: int) -> LayerSpec:
        """Return one rank's part of a layer that is cut: its work and what it keeps, not its sums."""
        products = tuple(product.cut_by(degree) for product in self.products)
        whole, mine = (sum(product.flops for product in parts) for parts in (self.products, products))

        def rest(part: int) -> int:
            return part - part // degree

        return replace(
            self,
            forward_flops=self.forward_flops * mine // whole if whole else self.forward_flops // degree,
            products=products,
            saved_elements=self.saved_elements - rest(self.saved_cut_elements),
            saved_selective_elements=self.saved_selective_elements - rest(self.saved_selective_cut_elements),
            working_elements=self.working_elements - rest(self.working_cut_elements),
            working_cut_elements=self.working_cut_elements // degree,
            saved_cut_elements=self.saved_cut_elements // degree,
            saved_selective_cut_elements=self.saved_selective_cut_elements // degree,
            moved_elements=self.moved_elements - rest(self.moved_cut_elements),
            moved_cut_elements=self.moved_cut_elements // degree,
        )

    def sliced_by(self, degree: int) -> LayerSpec:
        """Return one rank's part of a layer that works on slices of the sequence: its work, sums and what it keeps."""

        def part(elements: int) -> int:
            return -(-elements // degree)

        def sums(parts: tuple[PartialSum, ...]) -> tuple[PartialSum, ...]:
            return tuple(replace(one, elements=part(one.elements)) for one in parts)

        kept_twice = [part(exchange.elements) for exchange in self.exchanges if exchange.is_kept]
        cut_twice = [part(exchange.elements) for exchange in self.exchanges if exchange.is_kept and exchange.is_cut]
        return replace(
            self,
            forward_flops=part(self.forward_flops),
            products=tuple(product.sliced_by(degree) for product in self.products),
            output_elements=part(self.output_elements),
            input_elements=part(self.input_elements),
            saved_elements=part(self.saved_elements - self.saved_pair_elements)
            + self.saved_pair_elements
            + sum(kept_twice),
            saved_selective_elements=part(self.saved_selective_elements),
            saved_norm_elements=part(self.saved_norm_elements),
            working_elements=part(self.working_elements),
            working_cut_elements=part(self.working_cut_elements),
            saved_cut_elements=part(self.saved_cut_elements) + sum(cut_twice),
            saved_selective_cut_elements=part(self.saved_selective_cut_elements),
            moved_elements=part(self.moved_elements),
            moved_cut_elements=part(self.moved_cut_elements),
            forward_sums=sums(self.forward_sums),
            backward_sums=sums(self.backward_sums),
            loss_elements=part(self.loss_elements),
            loss_working_elements=part(self.loss_working_elements),
            dispatches=tuple(replace(dealing, rows=part(dealing.rows)) for dealing in self.dispatches),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model: layers in forward order, parameters in the module's own order, buffers."""

    name: str
    layers: tuple[LayerSpec, ...]
    params: tuple[ParamSpec, ...]
    buffer_bytes: int = 0
    coupled_modules: tuple[str, ...] = ()
    """Modules through which samples influence each other, as batch norm."""
    varies_at: str = ""
    """Path of a module whose code looks at values, so that shapes or branches may be others for the next sample."""
    cut_refusal: str = "no plan says where its weights may be cut"
    """Why tensor parallelism cannot cut the model; empty where it can."""
    logit_rows: int = 0
    """Rows of logits of one sample, where the head is cut by vocabulary."""
    sequence: int = 0
    """Tokens of one sample between blocks, where they can be cut."""
    sequence_refusal: str = "nothing says where its sequence may be cut"
    """Why sequence parallelism cannot cut the model between its tensor-cut parts; empty where it can."""
    balanced_experts: int = 0
    """Experts of a layer that the loss wants chosen alike; 0 where it does not ask."""
    masks: tuple[MaskSpec, ...] = ()
    """Dropout masks of one forward, in its order."""
    length: int = 0
    """Tokens of a sample; 0 where a sample is no sequence."""
    slice_refusal: str = "nobody has shown that its blocks work on slices of a sequence"
    """Why context parallelism cannot slice sequences; empty where it can."""
    expert_refusal: str = "nobody has shown that its blocks work on a part of the tokens"
    """Why experts that stand between tensor-cut parts may not be given a part of the tokens; empty where they may."""
    slices: tuple[tuple[str, int], ...] = ()
    """Arguments of blocks that have a row for each token, by their place, and which dimension that is."""

    @property
    def num_params(self) -> int:
        """Number of weights, each tied one counted once."""
        return sum(param.numel for param in self.params)

    @property
    def forward_flops(self) -> int:
        """FLOPs of one sample's forward."""
        return sum(layer.forward_flops for layer in self.layers)

    def params_of(self, layer: int) -> tuple[ParamSpec, ...]:
        """Parameters that layer number `layer` owns, in the module's order."""
        return tuple(param for param in self.params if param.layer == layer)

    def to_json(self) -> str:
        """Write the spec with its format version."""
        return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text was written by another version.
        """
        fields: dict[str, Any] = json.loads(text)
        version = fields.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"a model spec of format {version}; this version reads {FORMAT_VERSION}")
        layers = tuple(_layer_from(layer) for layer in fields.pop("layers"))
        params = tuple(_param_from(param) for param in fields.pop("params"))
        coupled = tuple(fields.pop("coupled_modules"))
        masks = tuple(MaskSpec(**{**mask, "shape": tuple(mask["shape"])}) for mask in fields.pop("masks", ()))
        slices = tuple((name, dim) for name, dim in fields.pop("slices"))
        return cls(layers=layers, params=params, coupled_modules=coupled, masks=masks, slices=slices, **fields)


def _layer_from(fields: dict[str, Any]) -> LayerSpec:
    sums = {name: tuple(PartialSum(**part) for part in fields[name]) for name in ("forward_sums", "backward_sums")}
    products = tuple(Product(**product) for product in fields["products"])
    exchanges = tuple(Exchange(**exchange) for exchange in fields["exchanges"])
    boundaries = tuple(Boundary(**boundary) for boundary in fields["sequence_boundaries"])
    dispatches = tuple(ExpertDispatch(**dispatch) for dispatch in fields["dispatches"])
    given = {"modules": tuple(fields["modules"]), "products": products, "sequence_boundaries": boundaries}
    return LayerSpec(**{**fields, **given, "exchanges": exchanges, "dispatches": dispatches, **sums})


def _param_from(fields: dict[str, Any]) -> ParamSpec:
    cut = Cut(**fields["cut"]) if fields["cut"] else None
    tuples = {name: tuple(fields[name]) for name in ("shape", "aliases", "called")}
    return ParamSpec(**{**fields, **tuples, "cut": cut})


_Rest = ParamSpecification("_Rest")
_Found = TypeVar("_Found")
_MOST_REMEMBERED = 64


def remembered(
    function: Callable[Concatenate[ModelSpec, _Rest], _Found],
) -> Callable[Concatenate[ModelSpec, _Rest], _Found]:
    """Remember the latest answers of a function of a model.

    By the very model, not by what it says: to hash or to compare two of hundreds of layers takes longer than most answers.
    """
    known: dict[tuple[object, ...], tuple[ModelSpec, _Found]] = {}

    @functools.wraps(function)
    def ask(model: ModelSpec, /, *rest: _Rest.args, **named: _Rest.kwargs) -> _Found:
        key = (id(model), rest, tuple(named.items()))
        if key not in known:
            while len(known) >= _MOST_REMEMBERED:
                del known[next(iter(known))]
            known[key] = (model, function(model, *rest, **named))  # with the model, so that its id stays its own
        return known[key][1]

    return ask
