"""An nn.Module on the meta device becomes a `ModelSpec`: one forward of one sample, watched, with no values.

Layers follow the modules. Blocks are the children of the containers (nn.ModuleList, nn.Sequential) in which the model
repeats itself; the modules that run before, between and after them, each taken as high in the tree as possible, make
up the other layers:

    LlamaForCausalLM ─ model ─ embed_tokens, rotary_emb      layer 0            embed_tokens
                      │       ─ layers ─ 0, 1, ...           a block each       model.layers.0, ...
                      │       ─ norm                         the last layer     norm+lm_head
                      └ lm_head

Costs follow the data. Every operation belongs to the layer that was entered last. A storage is made by one layer; what
another one reads of it is handed over (`output_elements` of the maker, `input_elements` of its first reader), what
autograd keeps of it is saved, once, by the layer that keeps it first. FLOPs are torch's own count (`torch.utils.
flop_counter`): 2 a multiplication and addition, attention without regard to causality.

Whole numbers keep their values, so that code which looks at token positions takes the branch that it would really
take. Attention is taken as the fused kernels do it: queries, keys, values, output and log-sum-exp are kept, no matrix
of scores. Code that needs other values (the `nonzero` of an expert's tokens) is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from samestep.errors import ModelError
from samestep.job import Job
from samestep.model import LayerSpec, ModelSpec, ParamSpec
from samestep.runtime.build import call_model, model_source
from samestep.runtime.init import blueprint

ValueOf = Callable[[str], Tensor]
"""Returns the value of the tensor of this name."""

KNOWN_VALUES = 2**20
"""Whole numbers are followed in tensors of at most so many elements: token ids and positions, not masks of them."""


def model_spec(job: Job, sample: Any) -> ModelSpec:
    """Build the job's model on the meta device and trace it; `sample` is a batch of one real sample.

    Raises:
        ModelError: the model cannot be built or traced.
    """
    plan = blueprint(model_source(job), job.train.seed)
    name = job.model.source.removeprefix("hf:").rpartition(":")[2]
    return trace(plan.module, sample, name, lambda path: plan.materialize(path, torch.device("cpu")))


def trace(module: nn.Module, sample: Any, name: str, value_of: ValueOf | None = None) -> ModelSpec:
    """Trace one forward of a module on the meta device; `sample` is a batch of one real sample.

    `value_of` returns the value of a buffer of whole numbers, for code that looks at one.

    Raises:
        ModelError: the forward fails, or needs values of tensors that have none here.
    """
    coupled = tuple(path for path, part in module.named_modules() if _couples_samples(part))
    # Batch norm refuses a batch of one.
    num_samples = 2 if coupled else 1
    watch = _watch(module, _on_meta(sample, num_samples), name, num_samples, value_of)
    layers = _arrange(module, watch, name)
    return ModelSpec(
        name=name,
        layers=tuple(_layer_spec(module, index, layers, watch, num_samples) for index in range(len(layers))),
        params=_param_specs(module, layers, watch),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        coupled_modules=coupled,
    )


def _couples_samples(module: nn.Module) -> bool:
    """Whether samples of a batch influence each other through this module."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


# -- watching a forward ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Region:
    """What happened since a top-most module was entered, until the next one was."""

    flops: int = 0
    read: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)
    """Storages that matrix products, convolutions and attention wrote."""


class _NeedsValuesError(Exception):
    """Code looked at a value that no tensor on the meta device has."""


class _Watch(TorchDispatchMode):
    """Notes, for each region, what every operation reads, writes and costs. A storage is known by its address."""

    def __init__(self, constant: set[int]) -> None:
        super().__init__()
        self.constant = constant
        """Storages of parameters and buffers."""
        self.current = ""
        """The region: path of the top-most module that was entered last, or nothing before the first."""
        self.regions: dict[str, _Region] = {"": _Region()}
        self.entries: Counter[str] = Counter()
        self.maker: dict[int, str] = {}
        self.saver: dict[int, str] = {}
        self.readers: dict[int, list[str]] = {}
        self.returned: set[int] = set()
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._values: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(given[0])
        outcome = self._run(func, given, args, kwargs)
        written = outcome if isinstance(outcome, (tuple, list)) else (outcome,)
        cost = _flops_of(func, args, kwargs, outcome)
        self.note(given, [tensor for tensor in written if isinstance(tensor, Tensor)], cost)
        return outcome

    def note(self, given: list[Tensor], written: list[Tensor], flops: int | None = None) -> None:
        """Book one operation to the current region; those that have a count of FLOPs have results worth keeping."""
        region = self.regions[self.current]
        for tensor in given:
            key = self.key(tensor)
            if key not in self.constant and key not in region.read:
                region.read.add(key)
                self.readers.setdefault(key, []).append(self.current)
        for tensor in written:
            self.maker.setdefault(self.key(tensor), self.current)
        if flops is not None:
            region.flops += flops
            region.results.update(self.key(tensor) for tensor in written)

    def save(self, tensor: Tensor) -> Tensor:
        """Book what autograd keeps, but for weights."""
        key = self.key(tensor)
        if key not in self.constant:
            self.saver.setdefault(key, self.current)
        return tensor

    def key(self, tensor: Tensor) -> int:
        """The address of a tensor's storage, which is kept, so that no other gets it."""
        storage = tensor.untyped_storage()
        self._alive.setdefault(storage._cdata, storage)
        self._sizes.setdefault(storage._cdata, storage.nbytes() // tensor.element_size())
        return storage._cdata

    def elements(self, keys: set[int]) -> int:
        """Count the elements of storages."""
        return sum(self._sizes[key] for key in keys)
