"""How far predictions have been from what was measured, by class of machine: the intervals of `record.toml` (docs/foresight.md)."""

from __future__ import annotations

import functools
import math
import statistics
import tomllib
from dataclasses import dataclass
from importlib import resources

from samestep.hardware import Hardware

_TENTH = statistics.NormalDist().inv_cdf(0.9)
"""The standard deviations from the middle of a normal distribution beyond which a tenth of it is."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The range of measured / predicted that covers 8 of 10 published rows of a source that had no part in it."""

    rows: int
    """Number of published rows."""
    low: float
    """Lower end of measured / predicted."""
    high: float
    """Upper end of measured / predicted."""

    def of(self, predicted: float) -> tuple[float, float]:
        """Return the interval in which the measured value is to be expected, in the unit of the predicted one."""
        return self.low * predicted, self.high * predicted

    def chance_below(self, limit: float, predicted: float) -> float:
        """Return the probability that the measured value is at most `limit`."""
        if limit <= 0 or predicted <= 0:
            return float(predicted <= limit)
        return self._log_ratio.cdf(math.log(limit / predicted))

    def safe_below(self, limit: float, chance: float) -> float:
        """Return the largest prediction whose measured value is at most `limit` with a probability of `chance`, in the unit of `limit` (seconds or bytes)."""
        return limit / math.exp(self._log_ratio.inv_cdf(chance))

    @property
    def _log_ratio(self) -> statistics.NormalDist:
        """The logarithm of measured / predicted, of which a tenth lies beyond either end."""
        low, high = math.log(self.low), math.log(self.high)
        return statistics.NormalDist((low + high) / 2, (high - low) / (2 * _TENTH))


CARD_BYTES_PER_S = 50e9
"""More than the link of a card has that hangs on PCIe, of any generation, or on a bridge to one other card."""
FEW = 8
"""Devices from which on a machine is a node, and no part of one."""


def class_of(hardware: Hardware, devices: int) -> str:
    """Return the class of machine of which the record of predictions has intervals: `cards` on PCIe, `few` devices of a server, `nodes`."""
    if hardware.intra.bytes_per_s < CARD_BYTES_PER_S and hardware.library != "gloo":
        return "cards"
    return "few" if devices < FEW else "nodes"


@functools.cache
def intervals(kind: str) -> dict[str, Interval]:
    """Return the intervals of `time` and `memory` of a class of machines from the record of predictions (docs/foresight.md)."""
    tables = tomllib.loads(resources.files("samestep").joinpath("record.toml").read_text(encoding="utf-8"))
    return {name: Interval(**figures) for name, figures in {**tables["all"], **tables.get(kind, {})}.items()}


POOR = 1.8
"""The upper end of an interval over its lower one from which on the record is called poor."""
_KINDS = {"cards": "cards on PCIe", "few": "parts of a node", "nodes": "nodes"}


def describe_accuracy(hardware: Hardware, devices: int) -> list[str]:
    """Return a line on how far predictions for such machines have been from what was measured, and one where that is far."""
    kind = class_of(hardware, devices)
    time, memory = intervals(kind)["time"], intervals(kind)["memory"]
    lines = [
        f"accuracy: 80% of {time.rows:,} published steps of {_KINDS[kind]} took {time.low:.2f} to {time.high:.2f} times the predicted time, "
        f"and 80% of {memory.rows:,} runs needed {memory.low:.2f} to {memory.high:.2f} times the predicted memory (docs/foresight.md)"
    ]
    if time.high / time.low >= POOR:
        lines.append(
            f"predictions for {_KINDS[kind]} are inaccurate: measure this machine before you rely on the seconds (samestep measure)"
        )
    return lines
