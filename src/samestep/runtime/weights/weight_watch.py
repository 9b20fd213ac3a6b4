"""The watch of a store for writes into its weights that would be lost, of which guards ask.

Whole weights (here) keep what code writes; gathered ones are freed (`GatheredWatch` in `sharded.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class WeightWatch(Protocol):
    """The writes into a store's weights, of which guards ask; its methods send nothing, and every rank calls them."""

    def compare_values(self, compares: bool) -> None:
        """Compare values too, from the next step on, in `written`: `.data` lets code change them without a trace."""
        ...

    def written(self) -> list[str]:
        """Return the weights that a forward of this step has written where that is lost."""
        ...

    def take_back(self) -> None:
        """Copy weights that a user has given another storage back to the one in use.

        Raises:
            LayoutError: the store cannot take over its values.
        """
        ...


class WholeWatch:
    """The `WeightWatch` of whole weights, in which all that code writes is kept."""

    def __init__(self, params: Mapping[str, nn.Parameter], places: Mapping[str, Tensor]) -> None:
        self._params, self._places = params, places
        self._held = [*params.values()]
        self._addresses = [places[name].data_ptr() for name in params]

    def compare_values(self, compares: bool) -> None:
        """Do nothing, since no write is lost."""

    def written(self) -> list[str]:
        """Return nothing, since no write is lost."""
        return []

    def take_back(self) -> None:
        """Copy weights that a user has given another storage, by `param.data = ...`, back to the one in use."""
        if [*map(Tensor.data_ptr, self._held)] == self._addresses:
            return
        for name, param in self._params.items():
            if param.data_ptr() != self._places[name].data_ptr():
                param.data = self._places[name].copy_(param.data)
