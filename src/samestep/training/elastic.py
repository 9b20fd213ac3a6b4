"""Restarts of a run whose workers fail, from the newest undamaged checkpoint, and with fewer ranks where some are lost
for good.

Pauses grow, since the cause of a failure may need time to pass: a full network, a device that resets. The same error
twice after the same step is no accident, and ends the run at once: most automatic restarts of a cluster repeat such a
failure.

Ranks are lost for good with hosts, or with a worker that fails wherever it starts. The job says what is computed, so
the global batch and the samples of every step stay as they are; of the layout only the data degrees shrink, or
`--layout auto` plans again. A run does so within `--ranks MIN:MAX`, or else it ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from samestep.errors import InputError, LayoutError, WorkerError
from samestep.layout import Layout, layout_from
from samestep.runtime.checkpoints import manifests
from samestep.runtime.processes.local_workers import OtherHosts
from samestep.training import run_folder
from samestep.training.check import Checked, place_workload, search_layout
from samestep.training.metrics import last_step


class RunHosts(Protocol):
    """The hosts of a run, of which this one leads the others."""

    @property
    def num_hosts(self) -> int:
        """The number of hosts, this one included."""

    def drop_lost(self) -> Sequence[object]:
        """Leave out the hosts whose connection is lost, and return them."""

    def away(self, checked: Checked) -> OtherHosts:
        """Return the part that the other hosts take in one start of a run's workers."""


@dataclass(frozen=True)
class Elasticity:
    """The ways in which a run may go on after it has lost ranks for good."""

    least: int | None
    """The smallest number of ranks to go on with; None where the run needs all."""
    plans_anew: bool
    """Whether the layout is searched, so that all of it may change."""
    hosts: RunHosts | None = None
    """The hosts of the run, if there are several."""

    def without_lost(self, checked: Checked, error: WorkerError, *, is_again: bool) -> Checked | None:
        """Return the run on the ranks that are left after a failure; None where no rank is known to be lost for good.

        A host is lost with its connection; and where the same failure occurs again, one rank counts as lost.

        Raises:
            WorkerError: no layout of the ranks that are left is allowed and legal; the text says what would be.
        """
        world = checked.layout.world_size
        hosts = self.hosts.num_hosts if self.hosts else 1
        lost = self.hosts.drop_lost() if self.hosts else ()
        if not lost and (not is_again or self.least is None):
            return None
        left = world // hosts * (hosts - len(lost)) if lost else world - 1
        if self.least is None:
            raise WorkerError(
                "no-layout-fits",
                f"{error}\n{left} ranks are left: --ranks {left}:{world} lets a run continue with them",
            )
        return self._fewer(checked, left, hosts - len(lost), error)

    def _fewer(self, checked: Checked, left: int, hosts: int, error: WorkerError) -> Checked:
        """Return the run in the first legal layout of at most `left` ranks, equally many on each host."""
        refused, least = "", self.least or 1
        for ranks in range(left, least - 1, -1):
            if ranks % hosts:
                continue
            for layout in self._layouts(checked, ranks, hosts):
                try:
                    per_node = checked.workload.job.run.ranks_per_node or (ranks // hosts if hosts > 1 else None)
                    layout, why = place_workload(checked.workload, layout, per_node)
                except InputError as reason:
                    refused = refused or f": {reason}"
                    continue
                world_size = checked.layout.world_size
                print(f"continues with {layout.world_size} of {world_size} ranks, layout {str(layout)!r}", flush=True)
                return dataclasses.replace(checked, layout=layout, why=why, ranks_per_node=per_node)
        of_run, together = checked.layout, checked.layout.world_size // checked.layout.dp
        works = f"Use a number of ranks that {together} divides, or --layout auto, which plans again"
        if self.plans_anew:
            works = "Use a smaller minimum of --ranks"
        raise WorkerError(
            "no-layout-fits",
            f"{error}\n{left} ranks are left, and no layout of {least} to {left} ranks is {str(of_run)!r} with smaller data "
            f"degrees{refused}. {works}",
        )

    def _layouts(self, checked: Checked, ranks: int, hosts: int) -> Iterator[Layout]:
        """Yield the layouts of a number of ranks, the best one first."""
        if self.plans_anew:
            try:
                yield Layout(search_layout(checked.workload, ranks, hosts)[0])
            except InputError:
                return
        else:
            yield from shrunk(checked.layout, ranks)


def shrunk(layout: Layout, ranks: int) -> Iterator[Layout]:
    """Yield the layouts of fewer ranks of which only the data degrees are smaller, those with the most shards first."""
    data, rest = divmod(ranks * layout.dp, layout.world_size)
    if rest:
        return
    for shards in range(min(layout.dp_shard, data), 0, -1):
        replicas, uneven = divmod(data, shards)
        if not uneven and replicas <= layout.dp_replicate:
            yield dataclasses.replace(layout, dp_replicate=replicas, dp_shard=shards)


def fitted_layout(layout: Layout | str | Mapping[str, Any] | None, world: int) -> Layout | str | None:
    """Return a layout for the ranks that a launcher has started: the given one, or one with smaller data degrees.

    Raises:
        LayoutError: no layout of so many ranks is the given one with smaller data degrees.
    """
    if layout is None or (isinstance(layout, str) and layout == "auto"):
        return layout
    of_run = layout_from(layout)
    if of_run.world_size == world:
        return of_run
    for fewer in shrunk(of_run, world) if world < of_run.world_size else ():
        return fewer
    raise LayoutError(
        "devices-and-ranks",
        f"layout {str(of_run)!r} has {of_run.world_size} ranks, and the launcher started {world}: its data degrees shrink to numbers of "
        f"ranks that {of_run.world_size // of_run.dp} divides",
    )


T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


def restarting(
    work: Callable[[Checked], T], checked: Checked, elastic: Elasticity, pause: Callable[[float], None] = time.sleep
) -> T:
    """Return what `work` returns, which is called again after a worker failed, at most `run.restarts` times.

    Ranks that are lost for good are left out, if the run may go on with fewer.

    Raises:
        WorkerError: a worker failed once more, or with the same error after the same step as before.
    """
    first_weights = checked.first_weights
    most, seen, pause_s = checked.workload.job.run.restarts, set[tuple[str, int]](), _FIRST_PAUSE_S
    for number in range(1, most + 1):
        try:
            return work(checked)
        except WorkerError as error:
            first, step = str(error).partition("\n")[0], last_step(checked.folder / run_folder.LOG)
            fewer = elastic.without_lost(checked, error, is_again=(first, step) in seen)
            if fewer is None and (first, step) in seen:
                raise WorkerError(
                    "restart-failed", f"{error}\nthe same error came twice after step {step}: no restart helps"
                ) from None
            seen.add((first, step))
            checked = fewer or checked
        newest, wrong = manifests.newest_whole(checked.folder / run_folder.CHECKPOINTS)
        run_folder.set_aside([path for path, _ in wrong])
        begin = f"from {newest}" if newest else "from the beginning, as there is no checkpoint"
        print(f"{first}\nrestart {number} of {most} in {pause_s:g} s, {begin}", flush=True)
        pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        checked = dataclasses.replace(checked, resume_from=newest, first_weights=None if newest else first_weights)
    return work(checked)
