"""The kernels of a recorded step, as `train.record_kernels` lets each rank write them: one JSON-lines file next to its record. No torch.

    {"format": "samestep kernels", "version": 1, "rank": 0, "missing": ""}
    {"step": 101, "names": ["aten::mm", ...], "kernels": [[0, 1200, 1200, 5100, 3100], ...], "events": []}

A kernel is `[name, issued, begin, end, own]`: the index of its name, the middle of the time in which the host issued it, and the
times at which it ran, in nanoseconds since the step's `begin_ns`, and the nanoseconds that are its own and not those of an operation
that it called. On a GPU,
where the events of the record have the device's times, `events` are the same with those of the host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import RecordError
from samestep.program.recorded import json_lines

FORMAT, VERSION = "samestep kernels", 1


class Kernel(NamedTuple):
    """A kernel of a GPU or an operation of torch, in nanoseconds since the begin of its step."""

    name: int
    """Index among the names of its step."""
    issued: int
    begin: int
    end: int
    own: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKernels:
    """The kernels of one step of a rank."""

    step: int
    names: Sequence[str]
    kernels: Sequence[Kernel]
    events: Sequence[Sequence[Any]] = ()
    """The events of the record with times of the host; empty where the record has them."""


def path_beside(record: Path) -> Path:
    """Return the path of the kernels of a rank's record."""
    return record.with_name(f"kernels-{record.name}")


def head_line(rank: int, missing: str) -> str:
    """Return the first line of a file; `missing` says why there are no kernels, where there are none."""
    return json.dumps({"format": FORMAT, "version": VERSION, "rank": rank, "missing": missing}) + "\n"


def step_line(step: StepKernels) -> str:
    """Return the line of a step."""
    return json.dumps(asdict(step), separators=(",", ":")) + "\n"


def read_kernels(path: Path) -> tuple[Mapping[int, StepKernels], str]:
    """Return the kernels of each step of a rank, and what the file says is missing; nothing where there is no file.

    Raises:
        RecordError: the file is damaged, or was written by another version.
    """
    if not path.is_file():
        return {}, ""
    lines = json_lines(path)
    number, head = next(lines, (1, {}))
    if not isinstance(head, dict) or (head.get("format"), head.get("version")) != (FORMAT, VERSION):
        raise RecordError(
            f"{path} holds no kernels that this samestep reads: its first line has no format {FORMAT!r} of version {VERSION}"
        )
    found = {}
    try:
        for number, line in lines:  # noqa: B007 - the message names the line
            step = StepKernels(**{**line, "kernels": [Kernel(*map(int, one)) for one in line["kernels"]]})
            if any(not 0 <= one.name < len(step.names) for one in step.kernels):
                raise ValueError("a kernel without a name")
            found[step.step] = step
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RecordError(f"{path}:{number}: damaged: {error}") from None
    return found, str(head.get("missing", ""))
