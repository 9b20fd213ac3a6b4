"""The numbers that a run has logged for each step, read from its `metrics.jsonl`, and their curves on a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.output.page.charts import curve
from samestep.output.page.page import Section
from samestep.training.run_folder import LOG


@dataclass(frozen=True, slots=True)
class LoggedSeries:
    """One number of a run over its steps."""

    steps: Sequence[int]
    values: Sequence[float]


def logged(folder: Path, *keys: str) -> dict[str, LoggedSeries]:
    """Return the series of some numbers of a run folder; without a log, or of a number that was not logged, none.

    A line that is no JSON, as the last one of a killed run, is left out.
    """
    path = folder / LOG
    if not path.is_file():
        return {}
    found: dict[str, tuple[list[int], list[float]]] = {key: ([], []) for key in keys}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, TypeError, KeyError):
            continue
        for key, (steps, values) in found.items():
            if isinstance(value := line.get(key), int | float):
                steps.append(step)
                values.append(float(value))
    return {key: LoggedSeries(*series) for key, series in found.items() if series[0]}


def curves(series: Mapping[str, LoggedSeries]) -> Iterator[Section]:
    """Yield the curves of loss and speed as a section of a page; nothing where fewer than two steps are logged."""
    words = {"loss": "loss", "tokens_per_s": "tokens a second", "samples_per_s": "samples a second"}
    shown = {words[key]: one for key, one in series.items() if key in words and len(one.steps) > 1}
    if shown:
        charts = "".join(curve(label, one.steps, one.values) for label, one in shown.items())
        yield Section("The run", f'<div class="grid wide">{charts}</div>', "Every logged step.")
