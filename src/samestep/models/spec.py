"""The `ModelSpec`: the shape of a model as data, which strategies, cost and memory read.

It is made by tracing a module on the meta device (`tracing/trace.py`), counted from hyperparameters (`decoder_spec.py`), or
read from JSON. Layers are in the order of the forward: what comes before the blocks, each block, what comes after. All
counts are those of one sample; elements become bytes with the job's precision.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Concatenate, Literal, TypeVar
from typing import ParamSpec as ParamSpecification

from samestep.models.layer_parts import BatchValueCall
from samestep.models.layer_spec import LayerSpec
from samestep.models.loss_names import LossNames
from samestep.models.param_spec import ParamSpec


def enclosing(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules that it is in, the innermost first, without the model itself."""
    while path:
        yield path
        path = path.rpartition(".")[0]


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
    """Paths of modules that take statistics of samples, such as batch norm, whether the forward calls them or not."""
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
    differentiates_at: str = ""
    """Path of a module whose code takes gradients within the forward; empty if none."""
    cut_refusal: str = "no plan says where its weights may be cut"
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
    sequence_refusal: str = "nothing says where its sequence may be cut"
    """Why sequence parallelism cannot be used between the model's tensor-cut parts; empty if it can."""
    balanced_experts: int = 0
    """Number of experts of a layer that the loss balances; 0 if it does not."""
    masks: tuple[MaskSpec, ...] = ()
    """Dropout masks of one forward, in the order in which they are drawn."""
    length: int = 0
    """Tokens of a sample; 0 if a sample is no sequence."""
    attending: tuple[LayerSpec, ...] = ()
    """Its layers with the attentions exchanged that blocks write out, which they are under context parallelism; empty where there are none."""
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

    def repeats_own_code(self, on_stages: bool) -> bool:
        """Return whether checkpoints in its code repeat what ranks send, on pipeline stages or without them."""
        return not self.runs_checkpoints_plainly(on_stages) and self._makes_checkpoints

    def runs_checkpoints_plainly(self, on_stages: bool) -> bool:
        """Return whether checkpoints in its code run without repeating anything, on pipeline stages or without them."""
        return self.checkpoints == "plain" or (self.checkpoints == "plain on stages" and on_stages)

    @cached_property
    def _makes_checkpoints(self) -> bool:
        return any(layer.makes_checkpoints for layer in (*self.layers, *self.attending))

    @cached_property
    def takes_batch_statistics(self) -> bool:
        """Whether a layer calls batch norm on statistics of samples."""
        return any(layer.batch_norms for layer in self.layers)

    @cached_property
    def couples_samples(self) -> bool:
        """Whether samples influence each other by statistics."""
        return bool(self.coupled_modules) or self.takes_batch_statistics or any(one.batch_values for one in self.layers)

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
        found: dict[int, list[ParamSpec]] = {}
        for param in self.params:
            found.setdefault(param.layer, []).append(param)
        return {layer: tuple(params) for layer, params in found.items()}

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


COUNTS = (
    "forward_flops", "saved_elements", "saved_pair_elements", "saved_norm_elements", "saved_selective_elements", "saved_cut_elements",
    "saved_selective_cut_elements", "working_elements", "working_cut_elements", "moved_elements", "moved_cut_elements", "kernels",
    "fusible_elements", "fusible_cut_elements", "fusible_kernels",
)  # fmt: skip
"""Fields of a layer that add up what its operations do and keep, attentions among them."""
_OF_ATTENTIONS = (
    *COUNTS, "products", "exchanges", "gathered_parts", "token_moves", "written",
)  # fmt: skip
"""What the attentions of a layer, exchanged or not, make of it."""


@cache_by_model
def with_attentions(model: ModelSpec) -> ModelSpec:
    """Return the model as ranks of `cp` compute it, with the attentions exchanged that its blocks write out."""
    if not model.attending:
        return model
    layers = (
        replace(layer, **{name: getattr(other, name) for name in _OF_ATTENTIONS})
        for layer, other in zip(model.layers, model.attending, strict=True)
    )
    return replace(model, layers=tuple(layers), attending=())


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
        f"the forward at {model.differentiates_at} takes gradients itself, and what ranks exchange within a forward has no "
        "gradient of its gradient"
    )
