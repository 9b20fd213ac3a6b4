"""The inputs of modules at which a traced forward looks: what embeddings look up, and weights in whose place code put others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from samestep.tracing.meta_tensors import KnownValues, is_whole

LookedUp = Literal["tokens", "positions"]


class EmbeddingInputs:
    """The inputs of a model's embeddings: tokens or positions, where it is known."""

    def __init__(self, key: Callable[[Tensor], int]) -> None:
        self._key = key
        self.by_path: dict[str, LookedUp] = {}
        """What each embedding looks up, by its path."""
        self.given: dict[int, LookedUp] = {}
        """What the tensors of a sample are to an embedding, by their storages."""

    def note(self, path: str, indices: Tensor | None, values: KnownValues) -> None:
        """Note an embedding's input: tokens that a sample holds, or numbers that count on from one to the next."""
        if indices is None or not is_whole(indices):
            return
        counts_on = indices.dim() > 0 and indices.shape[-1] > 1 and values.knows(indices)
        if self._key(indices) in self.given:
            self.by_path[path] = self.given[self._key(indices)]
        elif counts_on and bool((values.of(indices).diff(dim=-1) == 1).all()):
            self.by_path[path] = "positions"


class WeightSlots:
    """The weights that each module of a model holds, as identities: a trace may live longer than the model."""

    def __init__(self, module: nn.Module) -> None:
        held = {id(part): part._parameters for part in module.modules() if part._parameters}
        self._held = {part: {leaf: id(own) for leaf, own in params.items()} for part, params in held.items()}
        self.replaced: set[str] = set()
        """Weights in whose place a top-most module had another tensor when it was entered."""

    def note(self, path: str, part: nn.Module) -> None:
        """Note the weights of a module for which `torch.func.functional_call`, or code like it, has put others."""
        for name, inner in part.named_modules(prefix=path):
            for leaf, own in self._held.get(id(inner), {}).items():
                if id(inner._parameters.get(leaf)) != own:
                    self.replaced.add(f"{name}.{leaf}".lstrip("."))
