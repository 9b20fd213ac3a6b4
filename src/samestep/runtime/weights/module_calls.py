"""Calls of modules for which a store gathers weights: a part of a store, with nothing to do where the weights are whole on each rank."""

from __future__ import annotations


class ModuleCalls:
    """The calls of modules whose weights are whole on each rank."""

    gave_up = ""
    """The path of the module at which this rank has given the step up, in whose other tasks it only takes part in what others wait
    for; empty if it has not."""

    def before_exchange(self, path: str) -> None:
        """Reduce what the program lists before the exchange of a module, whose backward starts.

        Collective over the data axes, see [Note: collective calls].
        """

    def give_up_forward(self) -> None:
        """Take part in what others wait for in a forward that a `CalledAgainError` has ended on this rank alone.

        Collective over the axes of the units, see [Note: collective calls].
        """

    def end_forward_only(self) -> None:
        """Free the weights that forwards without a backward left gathered; every rank calls it, and sends nothing."""
