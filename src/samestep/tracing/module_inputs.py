"""The inputs of modules at which a traced forward looks: what embeddings look up, weights in whose place code put others, and what calls
are given and return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from samestep.building.torch_seams import autograd_sequence_number
from samestep.tracing.meta_tensors import KnownValues, is_whole
from samestep.trees import tree_leaves

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


@dataclass(slots=True)
class NotedCall:
    """One call of a module: what it is given and returns, and the nodes of autograd that are created in it."""

    given: list[tuple[int, tuple[int, ...]]]
    """Storage and shape of each tensor of its arguments."""
    first: int
    """Autograd's sequence number at its beginning."""
    last: int = 0
    """The same at its end."""
    returned: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


class CallNotes:
    """The calls of the modules of a forward, and the modules whose code ran when autograd kept something first."""

    def __init__(self, key: Callable[[Tensor], int]) -> None:
        self.calls: dict[str, list[NotedCall]] = {}
        self.kept: dict[int, str] = {}
        """Path of that module, by storage."""
        self._key, self._open = key, list[NotedCall]()

    def enter(self, path: str, given: Any) -> None:
        """Note that a module's forward starts."""
        call = NotedCall(self._seen(given), autograd_sequence_number())
        self.calls.setdefault(path, []).append(call)
        self._open.append(call)

    def leave(self, output: Any) -> None:
        """Note that the forward that started last ends."""
        call = self._open.pop()
        call.last, call.returned = autograd_sequence_number(), self._seen(output)

    def _seen(self, values: Any) -> list[tuple[int, tuple[int, ...]]]:
        return [(self._key(one), tuple(one.shape)) for one in tree_leaves(values) if isinstance(one, Tensor)]
