"""The record of some steps of a run, as each rank writes it: one JSON-lines file, a head and then a line for each step. No torch.

    {"format": "samestep record", "version": 4, "rank": 0, "host": "a", "layout": "dp=2", "ops": [...], ...}
    {"step": 101, "begin_ns": ..., "end_ns": ..., "until_ns": ..., "events": [["task", "F0", 1200, 8100], ...], ...}

Times are nanoseconds of the host's monotonic clock, and those of events are counted from the step's `begin_ns`. `end_ns` is the end
of `run.step`, `until_ns` the begin of the next one. An event is `[form, name, begin, end, ...]`:

    task      a task of the program, `F0`
    layer     a forward of a layer; in the task of a backward it is a recompute
    backward  the point at which the gradient of a layer's output is known
    sent      the issue of a collective or message: owner, begin, end, its number among those of the owner in the step, kind or "",
              1 if the host goes on while it runs, and in the first step of a window the bytes of the buffers that torch was given
    wait      a wait for it: owner, begin, end, number, and the step in which it was issued
    region    other work of the host: `data`, `host:gc`, `watching`, `checkpoint`
    copy      a copy of a layer's input between device and host (`recompute=offload`): the layer, begin, end, `to host` or `from host`
    awaited   a wait of the device for it, with the same
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import InputError, RecordError

FORMAT, VERSION = "samestep record", 4
_READ = (1, 2, 3, 4)
"""Versions that are read: the first one has fewer numbers in a mark of memory, the first two do not say for how long a rank was queued, and
the first three not how many bytes were sent."""
FOLDER = "record"
"""The folder of the records in a run folder."""
MODEL, JOB = "model.json", "job.toml"
"""Files beside the records: the model's shape and the job, from which a prediction is made."""


class MemoryMark(NamedTuple):
    """The memory of a rank at one time of a step, in bytes."""

    time_ns: int
    used: int
    """Allocated on a GPU; on a CPU the resident memory of the process."""
    reserved: int = 0
    """What the allocator of a GPU has taken from the device; 0 on a CPU."""
    most: int = 0
    """The most that has been allocated on a GPU since the step began; 0 on a CPU, where nobody counts it."""
    op: str = ""
    """The op that has just ended."""


class SentOp(NamedTuple):
    """One collective or message of a rank's program."""

    owner: str
    kind: str
    axis: str
    size_bytes: int
    task: str


_NAME = re.compile(r"steps-(\d+)-(\d+)\.rank\d+\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHead:
    """The description of a rank in front of its steps."""

    rank: int
    world_size: int
    host: str
    clock: str
    """Identity of the monotonic clock: ranks with equal ones share it."""
    layout: str
    stage: int
    device: str
    groups: Mapping[str, Sequence[int]]
    """The ranks of this rank's group of each axis."""
    ops: Sequence[SentOp]
    """What it sends in one step, in the order of the program."""
    layers: Sequence[str]
    num_exchanged: int = 0
    """Number of the last of `ops` of `Program.exchange`, which is not in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of a rank."""

    step: int
    begin_ns: int
    end_ns: int
    until_ns: int
    cpu_ns: int
    """Processor time of the rank's main thread in `run.step`."""
    queued_ns: int | None = None
    """Nanoseconds of `run.step` in which that thread wanted a processor and had none; None where the system does not say."""
    others_queued_ns: int | None = None
    """The same of that other thread of the rank, such as one that sends, which waited most."""
    ahead_ns: int = 0
    """The most by which the host was ahead of the device when it began a task; 0 on a CPU."""
    events: Sequence[Sequence[Any]] = ()
    memory: Sequence[MemoryMark] = ()
    """The memory at the end of each task and of each layer."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the rank keeps between two steps: weights, gradients, optimizer."""


def path_of(folder: Path, steps: range, rank: int) -> Path:
    """Return the path of a rank's record of some steps."""
    return folder / f"steps-{steps.start}-{steps.stop - 1}.rank{rank}.jsonl"


def paths_in(folder: Path) -> list[Path]:
    """Return the paths of the records of ranks in a folder."""
    return [path for path in folder.glob("steps-*.rank*.jsonl") if _NAME.fullmatch(path.name)]


def window_of(path: Path) -> range:
    """Return the steps of a window by the name of one of its files."""
    name = _NAME.fullmatch(path.name)
    assert name is not None, path
    return range(int(name[1]), int(name[2]) + 1)


def head_line(head: RecordHead) -> str:
    """Return the first line of a record."""
    return json.dumps({"format": FORMAT, "version": VERSION, **asdict(head)}) + "\n"


def step_line(step: RecordedStep) -> str:
    """Return the line of a step."""
    values = {name: getattr(step, name) for name in RecordedStep.__slots__}  # asdict would copy every event
    return json.dumps(values, separators=(",", ":"), default=dict) + "\n"


@dataclass(slots=True)
class RankRecord:
    """The record of one rank, as it was read."""

    path: Path
    head: RecordHead
    steps: dict[int, RecordedStep] = field(default_factory=dict)


def read_record(path: Path) -> RankRecord:
    """Read the record of a rank; a last line that was cut off, as of a killed run, is left out.

    Raises:
        RecordError: the file is no record, is damaged, or was written by another version.
    """
    lines = _json_lines(path)
    number, first = next(lines, (1, {}))
    if not first and not path.stat().st_size:
        raise RecordError(
            "record-unreadable", f"{path} is empty: its rank was ended before it could write. Use records of all ranks"
        )
    if not isinstance(first, dict) or first.get("format") != FORMAT:
        raise RecordError(
            "record-unreadable", f"{path} is not a record of samestep: its first line has no format {FORMAT!r}"
        )
    if first.get("version") not in _READ:
        raise RecordError(
            "record-unreadable",
            f"{path} is a record of version {first.get('version')}; this samestep reads version {VERSION}",
        )
    try:
        head = RecordHead(**{key: value for key, value in first.items() if key not in ("format", "version")})
        rank_record = RankRecord(path, _with_ops(head))
        for number, line in lines:  # noqa: B007 - the message names the line
            step = RecordedStep(**{**line, "memory": [MemoryMark(*mark) for mark in line.get("memory", ())]})
            if not step.begin_ns <= step.end_ns <= step.until_ns:
                raise ValueError("ends before it begins")
            for event in step.events:
                form, name, begin, end = event[:4]
                if not (isinstance(form, str) and isinstance(name, str) and isinstance(begin + end, int)):
                    raise TypeError("an event without a name or times")
            rank_record.steps[step.step] = step
    except RecordError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RecordError("record-unreadable", f"{path}:{number}: damaged: {error}") from None
    return rank_record


def _with_ops(head: RecordHead) -> RecordHead:
    known = asdict(head)
    return RecordHead(**{**known, "ops": tuple(SentOp(*op) for op in head.ops)})


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line; a last line that is cut off is left out.

    Raises:
        RecordError: the file cannot be read, or a line is damaged.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    value = json.loads(text)
                except ValueError:
                    if not text.endswith("\n") and number > 1:
                        return
                    raise RecordError("record-unreadable", f"{path}:{number}: damaged: the line is not JSON") from None
                if number > 1 and not isinstance(value, dict):
                    raise RecordError("record-unreadable", f"{path}:{number}: damaged: the line is not a step")
                yield number, value
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RecordError("record-unreadable", f"{path} cannot be read: {reason}") from None


def asked_steps(step: int | str | None) -> range | None:
    """Return the steps that `--step N` or `--step A:B` specifies; None if none are named.

    Raises:
        InputError: `step` names no steps.
    """
    text = str(step)
    return None if step is None else parse_steps(text if ":" in text else f"{text}:{text}", 0)


def parse_steps(text: str, first_step: int) -> range:
    """Return the steps of a window: `FIRST:LAST`, or `N` steps after the third one of a process that begins after `first_step`.

    The first step of a window is recorded too and left out by `explain`, so that N are left.

    Raises:
        InputError: the text is neither.
    """
    first, colon, last = text.partition(":")
    if (
        not (first.isdecimal() and (last.isdecimal() or not colon))
        or not int(first)
        or (colon and int(last) < int(first))
    ):
        raise InputError(
            "steps-range", f"{text!r} names no steps. Use FIRST:LAST, such as 100:104, or a number of steps"
        )
    if colon:
        return range(int(first), int(last) + 1)
    return range(first_step + 4, first_step + 5 + int(first))
