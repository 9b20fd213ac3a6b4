"""The `ModelSpec`: the shape of a model as data, which strategies, cost and memory read; and the `ModelAnalysis`, what else an examination finds.

A spec is made by tracing a module on the meta device (`tracing/trace.py`), counted from hyperparameters (`decoder_spec.py`), or
read from JSON. Layers are in the order of the forward: what comes before the blocks, each block, what comes after. All
counts are those of one sample; elements become bytes with the job's precision.

Both are plain data without torch, equal on every rank. All code reads them, so modules are not examined twice.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Concatenate, Literal, TypeVar
from typing import ParamSpec as ParamSpecification

from pydantic import TypeAdapter

from samestep.models.layer_parts import BatchValueCall
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec

VALUES = "values."
"""What stands in front of the name of a value in errors."""
_NONE: Mapping[str, float] = {}
FORMAT_VERSION = 21


def enclosing(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules that it is in, the innermost first, without the model itself."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def owner_of(name: str) -> str:
    """Return the path of the module that owns a weight; also of a module, the path of the one around it."""
    return name.rpartition(".")[0]


def is_below(path: str, root: str) -> bool:
    """Return whether a module's path is `root` or below it; the empty root is the model itself."""
    return not root or path == root or path.startswith(f"{root}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """One dropout mask, or one tensor of random numbers: its module, the index of that module's call, and of the draw."""

    owner: str
    entry: int
    draw: int
    """Index of the draw within the call: masks count from 0 up, random numbers from -1 down."""
    shape: tuple[int, ...]
    """Shape of one sample's part, before any cut."""
    rows: tuple[int, int] | None = (0, 0)
    """Dimension that holds the samples, -1 if the numbers are the same for all; and how many consecutive positions in it belong
    to one sample, 0 for all that it has. None if the samples cannot be distinguished."""

    @property
    def is_numbers(self) -> bool:
        """Whether these are random numbers, which a model may draw in evaluation too."""
        return self.draw < 0

    @property
    def name(self) -> str:
        """Return the kind of the draw, as an error names it."""
        return "random numbers" if self.is_numbers else "a dropout mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTensor:
    """One tensor of the outputs or of the batch that a loss over all samples of the step reads."""

    of: Literal["outputs", "batch"]
    index: int
    """Its number among the tensors of the outputs, or of the batch."""
    elements: int
    """Elements of one sample."""
    dtype: str = ""
    """Its dtype; empty for floating numbers, which the loss is given in master precision."""
    rows: tuple[int, int] | None = (0, 0)
    """Its dimension of samples and the positions of one side by side, as in `MaskSpec.rows`; None if the trace does not show it."""
    is_by_rows: bool = False
    """Whether each rank computes some rows of the loss, so that ranks sum its gradient."""

    @property
    def name(self) -> str:
        """Name of its gather in the program."""
        return f"loss.{self.of}.{self.index}"

    @property
    def is_gathered(self) -> bool:
        """Whether ranks have other samples of it; what depends on no sample is the same on all."""
        return self.rows is None or self.rows[0] >= 0


@dataclass(frozen=True, slots=True)
class LossNames:
    """The names of the terms and the values that a loss returns, in their order; an unnamed term is not among them."""

    terms: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    failure: str = ""
    """The error of the loss when it was to show its names; empty if it did."""

    @property
    def num_numbers(self) -> int:
        """The number of sums and counts of named terms and values."""
        return 2 * (len(self.terms) + len(self.values))

    def means(
        self, numbers: Sequence[float], least: Mapping[str, float] = _NONE
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the means of the terms and of the values, by name, from `num_numbers` summed numbers; nan where nothing counts.

        A count that a loss guards against zero is at `least` that.
        """
        names = (*self.terms, *(f"{VALUES}{name}" for name in self.values))
        counts = [max(count, least.get(name, 0.0)) for name, count in zip(names, numbers[1::2], strict=True)]
        means = [total / count if count else float("nan") for total, count in zip(numbers[::2], counts, strict=True)]
        split = len(self.terms)
        return dict(zip(self.terms, means[:split], strict=True)), dict(zip(self.values, means[split:], strict=True))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a model: layers in the order of the forward, parameters in the module's order, buffers, and
    refusals.

    A refusal is the reason why a kind of parallelism cannot be used, or empty.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    params: tuple[ParamSpec, ...]
    buffer_bytes: int = 0
    coupled_modules: tuple[str, ...] = ()
    """Paths of modules that take statistics of samples, such as batch norm, and that the forward calls."""
    mixes_samples: str = ""
    """The path of a module and the operation in which samples influence each other otherwise; empty if there is none."""
    tried: tuple[str, ...] = ()
    """Operations without a rule: those that passed a trial on drawn values, and those that must be tried on real ones."""
    looks: bool = False
    """Whether code looks at values of tensors at all, of which it may make the way that it takes depend."""
    varies_at: str = ""
    """Path of a module whose shapes or branches depend on values and may differ between samples; empty if none."""
    varies_within: bool = False
    """Whether these shapes and branches stay within calls of modules, so that what blocks pass to each other does not vary."""
    looks_in: tuple[str, ...] = ()
    """Paths of the modules whose code looks at values on which shapes or branches depend; that of the model itself is empty."""
    picks_at: str = ""
    """Path of a module whose code works on rows that integers of the sample pick, so many as these say; empty if none does."""
    called_again: tuple[tuple[str, ...], ...] = ()
    """Paths of modules that a forward of several samples calls several times, as code does that takes samples one by one, in
    groups whose calls alternate."""
    hooks_scale: bool = False
    """Whether the forward puts hooks on gradients that make something else of larger ones than something larger, as a limit does."""
    differentiates_at: str = ""
    """Path of a module whose code takes gradients within the forward; empty if none."""
    cut_refusal: str = "no plan shows where its weights may be cut"
    """Why tensor parallelism cannot cut the model; empty if it can."""
    logit_rows: int = 0
    """Rows of logits of one sample, if the head is cut by vocabulary."""
    chunk_refusal: str = "it is not proven that its loss needs logits row by row"
    """Why logits and loss cannot be computed in chunks of tokens; empty if they can."""
    chunk_reduces: tuple[tuple[str, int], ...] = ()
    """What a loss of one's own in chunks reduces over ranks that cut the vocabulary, in order: `largest` or `sums`, and the elements of
    one sample; empty for the cross entropy."""
    sequence: int = 0
    """Tokens of one sample between blocks, if they can be cut."""
    sequence_refusal: str = "nothing shows where its sequence may be cut"
    """Why sequence parallelism cannot be used between the model's tensor-cut parts; empty if it can."""
    balanced_experts: int = 0
    """Number of experts of a layer that the loss balances; 0 if it does not."""
    masks: tuple[MaskSpec, ...] = ()
    """Dropout masks of one forward, in the order in which they are drawn."""
    length: int = 0
    """Tokens of a sample; 0 if a sample is no sequence."""
    slice_refusal: str = "it is not proven that its blocks work on slices of a sequence"
    """Why context parallelism cannot slice sequences; empty if it can."""
    expert_refusal: str = "it is not proven that its blocks work on a part of the tokens"
    """Why experts may not work on a part of the tokens under sequence parallelism; empty if they may."""
    loss_names: LossNames = field(default_factory=LossNames)
    """The names of the terms of its loss, each a sum with a count of its own, and of the values that it reports."""
    loss_reads: tuple[LossTensor, ...] | None = None
    """What a loss over all samples of the step reads; None where the loss is a sum over samples."""
    loss_pairs: int = 0
    """Elements that such a loss keeps for each pair of samples that it compares."""
    kept_after: tuple[str, ...] = ()
    """Names of the buffers that the forward lets have another value after the step."""
    loss_values: tuple[BatchValueCall, ...] = ()
    """Calls in the loss that take values of all samples."""
    checkpoints: Literal["repeat", "plain", "plain on stages"] = "repeat"
    """How checkpoints of its own code run: plainly where they are around blocks, for which the layout's recompute stands, or around
    what pipeline stages begin with."""
    slices: tuple[tuple[str, int], ...] = ()
    """Arguments of blocks with a row for each token: their place, and the dimension of the tokens."""

    @cached_property
    def num_params(self) -> int:
        """Number of weights, tied ones counted once."""
        return sum(param.numel for param in self.params)

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of one sample's forward."""
        return sum(layer.forward_flops for layer in self.layers)

    @cached_property
    def sample_flops(self) -> int:
        """FLOPs of one sample's forward and backward: neither what a mask leaves out nor gradients of frozen weights."""
        products = [product for layer in self.layers for product in layer.products]
        masked = sum(product.flops - round(product.flops * product.attended_part) for product in products)
        return sum(layer.forward_flops + layer.backward_flops for layer in self.layers) - 3 * masked

    def repeats_own_code(self, on_stages: bool) -> bool:
        """Return whether checkpoints in its code repeat what ranks send, on pipeline stages or without them."""
        return not self.runs_checkpoints_plainly(on_stages) and self._makes_checkpoints

    def runs_checkpoints_plainly(self, on_stages: bool) -> bool:
        """Return whether checkpoints in its code run without repeating anything, on pipeline stages or without them."""
        return self.checkpoints == "plain" or (self.checkpoints == "plain on stages" and on_stages)

    @cached_property
    def _makes_checkpoints(self) -> bool:
        return any(layer.makes_checkpoints for layer in self.layers)

    @cached_property
    def takes_batch_statistics(self) -> bool:
        """Whether a layer calls batch norm on statistics of samples."""
        return any(layer.batch_norms for layer in self.layers)

    @cached_property
    def couples_samples(self) -> bool:
        """Whether samples influence each other by statistics."""
        return (
            bool(self.coupled_modules)
            or self.takes_batch_statistics
            or any(layer.batch_values for layer in self.layers)
        )

    @cached_property
    def uses_batch_values(self) -> bool:
        """Whether the forward or the loss takes values of all samples by name (`samestep.batch_sum`)."""
        return bool(self.loss_values) or any(layer.batch_values for layer in self.layers)

    @cached_property
    def batch_norm_owners(self) -> tuple[str, ...]:
        """Paths of the modules whose code calls batch norm on statistics of samples, each once."""
        return tuple(dict.fromkeys(call.owner for layer in self.layers for call in layer.batch_norms))

    def params_of(self, layer: int) -> tuple[ParamSpec, ...]:
        """Return the parameters that a layer owns, by its index, in the module's order."""
        return self._params_by_layer.get(layer, ())

    @cached_property
    def _params_by_layer(self) -> dict[int, tuple[ParamSpec, ...]]:
        by_layer: dict[int, list[ParamSpec]] = {}
        for param in self.params:
            by_layer.setdefault(param.layer, []).append(param)
        return {layer: tuple(params) for layer, params in by_layer.items()}

    def entered_before(self, start: int) -> Counter[str]:
        """Return the number of times that earlier layers enter the modules that several layers enter, by path."""
        return sum((Counter(dict(layer.entered)) for layer in self.layers[:start]), Counter())


_Rest = ParamSpecification("_Rest")
_Found = TypeVar("_Found")
_MOST_REMEMBERED = 64


def cache_by_model(
    function: Callable[Concatenate[ModelSpec, _Rest], _Found],
) -> Callable[Concatenate[ModelSpec, _Rest], _Found]:
    """Cache the latest results of a function of a model, as `functools.lru_cache` does, by the identity of the model.

    Hashing or comparing models of hundreds of layers would take longer than most of these functions.
    """
    known: dict[tuple[object, ...], tuple[ModelSpec, _Found]] = {}

    @functools.wraps(function)
    def cached(model: ModelSpec, /, *rest: _Rest.args, **named: _Rest.kwargs) -> _Found:
        key = (id(model), rest, tuple(named.items()))
        if key not in known:
            while len(known) >= _MOST_REMEMBERED:
                del known[next(iter(known))]
            known[key] = (
                model,
                function(model, *rest, **named),
            )  # the model is kept, so that no other object gets its id
        return known[key][1]

    return cached


def is_moved(model: ModelSpec, param: ParamSpec) -> bool:
    """Return whether a weight is in no module of the layer that uses it first, by any of its names."""
    roots = [root for root in model.layers[param.layer].called if root]
    return not any(is_below(name, root) for name in (param.name, *param.aliases) for root in roots)


@cache_by_model
def read_by_own_code(model: ModelSpec) -> frozenset[str]:
    """Return the names of the weights that code outside of their layer's modules reads, such as a class token."""
    return frozenset(param.name for param in model.params if param.read_outside or is_moved(model, param))


def gradients_within(model: ModelSpec) -> str:
    """Return why an exchange within the forward is refused where the forward takes gradients."""
    return (
        f"the forward at {model.differentiates_at} takes gradients itself, and a collective within a forward has no "
        "gradient of its gradient"
    )


def to_json(model: ModelSpec) -> str:
    """Return a spec as JSON, with its format version."""
    return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(model)})


def from_json(text: str) -> ModelSpec:
    """Return the spec that `to_json` wrote.

    Raises:
        ValueError: the text is of another format version, or a field has another type.
    """
    fields: dict[str, Any] = json.loads(text)
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"a model spec of format {version}; this version reads {FORMAT_VERSION}")
    return _reader().validate_python(fields)


@functools.cache
def _reader() -> TypeAdapter[ModelSpec]:
    return TypeAdapter(ModelSpec)


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The modules of a model that hold experts."""

    counts: Mapping[str, int]
    """Number of experts of each module, by its path."""
    switchable: tuple[str, ...]
    """Paths of the modules whose library offers several implementations of the experts."""


StateKind = Literal["buffer", "weight", "attribute", "variable", "counts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Something that a forward keeps, and that another forward may read."""

    owner: str
    """Path of the module that holds it."""
    name: str
    """Name of the buffer, the parameter or the attribute."""
    kind: StateKind
    """The kind of state: "variable" is one outside of the modules, "counts" a gradient that is divided by the tokens counted in
    a micro-batch."""
    of_samples: bool = False
    """Whether it depends on the samples of the forward, or on their number."""
    is_read: bool = True
    """Whether the outputs depend on it, or the code looks at it."""
    is_restorable: bool = False
    """Whether a module of the model holds it, in a form that can be put back, and it depends on no samples."""

    @property
    def full_name(self) -> str:
        """The path of the module and the name."""
        return f"{self.owner}.{self.name}".lstrip(".")


@dataclass(frozen=True, slots=True)
class ModelAnalysis:
    """The findings about one model: its shape, and how tensor, sequence and expert parallelism apply to its modules."""

    spec: ModelSpec
    """Shape of the model, with its cuts, boundaries and slices."""
    experts: ExpertModules
    has_dropout: bool
    """Whether a module or a configuration has a dropout probability above 0."""
    cut_styles: Mapping[str, str] = field(default_factory=dict)
    """Style of the tensor cut of each module that is cut, by its path: a style of `independence/tensor_plan.py`."""
    gathered: Mapping[str, str] = field(default_factory=dict)
    """Modules that a plan cuts otherwise, whose outputs are gathered or which stay whole under a tensor cut, and why."""
    copied: frozenset[str] = frozenset()
    """Modules whose input goes through `copy` under a tensor cut, by their paths."""
    counts: Mapping[int, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)
    """Attributes that a rank divides, for each degree of a tensor cut that was tried: the path of a module that has it,
    its name, and the divisor."""
    shareable_heads: Mapping[str, int] = field(default_factory=dict)
    """Number of heads of keys or values that ranks may share, by the path of the projection."""
    sequence_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Children of each block that take whole sequences, by the block's path; empty without sequence parallelism."""
    slices_between: tuple[int, ...] = ()
    """Degrees of sequence parallelism for which it has been examined whether blocks work token by token."""
    expert_calls: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The call of each module of experts, by its path: positional and named arguments, on the meta device."""
    parts_examined: tuple[int, ...] = ()
    """Numbers of slices into which it has been examined whether sequences can be cut."""
    samples_examined: tuple[int, ...] = ()
    """Samples of micro-batches of which it has been examined which modules their forward calls several times."""
    chunks_examined: bool = True
    """Whether it has been examined whether logits and loss can be computed in chunks of tokens."""
    states: tuple[StateSpec, ...] = ()
    """State that a forward keeps, other than the statistics of torch's norms."""
    stages: tuple[str, ...] = ()
    """The modules that `model.stages` names."""
    detached_checkpoints: bool = False
    """Whether it has reentrant checkpoints whose inputs take no gradient, inside of which torch trains nothing."""
