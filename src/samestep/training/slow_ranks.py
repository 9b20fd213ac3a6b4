"""The watch on slow ranks of a run, of `samestep train` and of a user's loop that is tracked."""

from __future__ import annotations

from samestep.building.torch_seams import default_store
from samestep.program.ranks import Ranks
from samestep.runtime.recording.stragglers import StragglerWatch
from samestep.runtime.run import Run


def watch_of(run: Run) -> StragglerWatch | None:
    """Return the watch on slow ranks; None where this rank has no peers."""
    world = run.layout.world_size
    if world == 1:
        return None
    ranks = Ranks.of(run.layout, run.place.ranks_per_node)
    stages = [ranks.coordinate(rank, "pp") for rank in range(world)]
    return StragglerWatch(run.place.rank, stages, default_store(), is_gpu=run.place.device.type == "cuda")
