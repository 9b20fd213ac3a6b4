"""The recorded side of the ledger: the collectives that torch really issued, and the op that each belongs to.

A dispatch mode sees every c10d collective with its tensors and its group. Its owner is known from the context: our own
driven collectives are issued inside `owned(name)`, those of FSDP2 inside its profiler labels `FSDP::all_gather
(layers.0)`. A trace shows both, and so the same names as the program.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from samestep.building.torch_seams import DispatchMode, RecordFunctionFast
from samestep.program.program import LedgerRow, ledger_key
from samestep.runtime.recording import marks
from samestep.trees import operands

_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "alltoall_base_": "all_to_all",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
OWN_GROUPS = ("cp", "dp")
"""Axes with a process group of their own, described by the axis' name; other axes over the same ranks share one."""
_PARTS_OF_CP = "cp_"
LINK = "link of "
"""What describes the group of a link between two stages, before the ranks of all stages: their messages are one list."""
SENDING: dict[str, Callable[..., Any]] = {}
"""The functions that carry out our own operations that communicate, in graphs of a compiler, by the operations' names."""
_FSDP_LABEL = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((?P<owner>.*)\))?$")


class _OwnerStack(threading.local):
    """Owners of the collectives this thread issues, innermost last."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.made: dict[tuple[str, str], OwnedCollectives] = {}
        """The contexts of `owned`."""
        self.is_outside = False


_owners = _OwnerStack()


def owned(name: str, kind: str = "") -> OwnedCollectives:
    """Return the context that labels the collectives issued inside as belonging to the op `name`, in a profile and in the ledger.

    It is made once for each name and thread, and not entered again inside itself. `kind` is needed where a stage sends and receives
    under one name.
    """
    found = _owners.made.get((name, kind))
    if found is None:
        found = _owners.made[name, kind] = OwnedCollectives(name, kind)
    return found


class OwnedCollectives:
    """The context of `owned`.

    Uses torch's fast record function: `torch.profiler.record_function` takes twenty times as long, because it is
    dispatched as an operation.
    """

    __slots__ = ("_issue", "_kind", "_label", "_ledger", "name")

    def __init__(self, name: str, kind: str) -> None:
        self.name, self._kind, self._label = name, kind, RecordFunctionFast(f"samestep::owner {name}")

    def __enter__(self) -> OwnedCollectives:
        _owners.names.append(self.name)
        self._label.__enter__()
        listener = marks.listener()
        self._issue = None if listener is None or _owners.is_outside else listener.issue(self.name, self._kind)
        self._ledger = Ledger().__enter__() if self._issue is not None and self._issue.is_weighed else None
        return self

    def __exit__(self, *error: object) -> None:
        issue, self._issue = self._issue, None  # which would keep the run
        if issue is not None:
            issue.end(None if self._ledger is None else self._weighed(self._ledger))
        self._label.__exit__(*error)
        _owners.names.pop()

    def _weighed(self, ledger: Ledger) -> int:
        """Return the bytes of the buffers that torch was given under this name, and end their count."""
        ledger.__exit__(None, None, None)
        return sum(row.size_bytes for rows in ledger.rows.values() for row in rows if row.owner == self.name)

    def sent(self, work: Any) -> Any:
        """Return the work of a collective for which the host does not wait, so that a recorder hears its waits."""
        return work if self._issue is None else self._issue.sent(work)


@contextmanager
def outside_step() -> Iterator[None]:
    """Keep the collectives issued inside out of the ledger: checks during a run are no part of the step's program."""
    before, _owners.is_outside = _owners.is_outside, True
    try:
        with marks.region("watching"):
            yield
    finally:
        _owners.is_outside = before


class Ledger(DispatchMode):
    """Records the collectives issued while it is active: `rows[group]` in order of issue.

    `group_of` names a process group; collectives of kinds that no program has are listed by their torch name.
    """

    def __init__(self, group_of: Callable[[dist.ProcessGroup], str] | None = None) -> None:
        super().__init__()
        self.rows: dict[str, list[LedgerRow]] = {}
        self._group_of = group_of or _name_of
        self._labels: list[str | None] = []

    supports_higher_order_operators = True
    """Whether it is given operations of graphs that run another one, such as one that keeps the state of a generator. None sends."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled blocks run compiled: what communicates in a graph is an operation of ours, which is looked into."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "higher_order":
            return func(*args, **(kwargs or {}))
        if func.namespace == "samestep" and (carry_out := SENDING.get(func._schema.name)) is not None:
            with self:
                return carry_out(*args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":
            self._record_label(func, args)
        elif func.namespace == "c10d" and not _owners.is_outside:
            self._record_collective(func, args)
        return result

    def _record_label(self, func: Any, args: tuple[Any, ...]) -> None:
        if "_enter" in func._schema.name:
            match = _FSDP_LABEL.match(str(args[0]))
            self._labels.append((match["owner"] or "") if match else None)
        elif self._labels:
            self._labels.pop()

    def _record_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.split("::")[1]
        tensors = operands(*args)
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        # An all_to_all is sized by its second tensor, what is sent: over a group that sums to what is received.
        sized = tensors[1:] if name == "alltoall_base_" else tensors
        largest = max(sized, key=lambda tensor: tensor.numel() * tensor.element_size())
        labels = [*(label for label in self._labels if label is not None), *_owners.names]
        among = dist.ProcessGroup.unbox(group)
        row = LedgerRow(
            "shift" if name == "alltoall_base_" and _is_shift(among, args) else _KINDS.get(name, name),
            str(largest.dtype).removeprefix("torch."),
            largest.numel() * largest.element_size(),
            labels[-1] if labels else "?",
        )
        key = ledger_key(self._group_of(among), row)
        self.rows.setdefault(key, []).append(row)


def has_own_group(axis: str) -> bool:
    """Return whether a process group serves this axis alone: one of `OWN_GROUPS`, or a part of `cp`."""
    return axis in OWN_GROUPS or axis.startswith(_PARTS_OF_CP)


def _name_of(group: dist.ProcessGroup) -> str:
    """Return the name of a group in the form that `Mesh.group_of` uses."""
    if group.group_desc.startswith(LINK):
        return group.group_desc.removeprefix(LINK)
    ranks = ",".join(map(str, sorted(dist.get_process_group_ranks(group))))
    return f"{ranks} {group.group_desc}" if has_own_group(group.group_desc) else ranks


def _is_shift(group: dist.ProcessGroup, args: tuple[Any, ...]) -> bool:
    """Return whether an all_to_all over `cp` sends to one rank alone, and receives from one alone."""
    if group.group_desc != "cp" and not group.group_desc.startswith(_PARTS_OF_CP):
        return False
    splits = [arg for arg in args if isinstance(arg, list) and arg and all(isinstance(size, int) for size in arg)]
    return len(splits) == 2 and all(sum(map(bool, sizes)) == 1 for sizes in splits)
