"""The numbers that a run has logged for each step, read from `metrics.jsonl` beside the folder of its records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.program import recorded
from samestep.training.run_folder import LOG


@dataclass(frozen=True, slots=True)
class LoggedSeries:
    """One number of a run over its steps."""

    steps: Sequence[int]
    values: Sequence[float]


def logged(records: Path, *keys: str) -> dict[str, LoggedSeries]:
    """Return the series of some numbers; of a folder without a log, or a number that was not logged, none.

    A line that is no JSON, as the last one of a killed run, is left out.
    """
    path = records.parent / LOG
    if records.name != recorded.FOLDER or not path.is_file():
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
