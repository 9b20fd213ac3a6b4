"""Starting the workers of a run again after one of them failed, from the newest checkpoint that is whole.

Pauses grow, since what ended a run may need time to pass: a full network, a device that resets. The same error twice
behind the same step is no accident, and ends the run at once: of a cluster's automatic restarts most repeat what failed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

from samestep.errors import WorkerError
from samestep.runtime.checkpoints import manifests
from samestep.training import run_folder
from samestep.training.check import Checked
from samestep.training.elastic import Elasticity
from samestep.training.metrics import last_step

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


def restarting(
    work: Callable[[Checked], T], checked: Checked, elastic: Elasticity, pause: Callable[[float], None] = time.sleep
) -> T:
    """Return what `work` returns, which is called again after a worker failed, at most `run.restarts` times.

    Ranks that are lost for good are left out, if the run may go on with fewer.

    Raises:
        WorkerError: a worker failed once more, or with the same error behind the same step as before.
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
                raise WorkerError(f"{error}\nthe same error came twice behind step {step}: no restart helps") from None
            seen.add((first, step))
            checked = fewer or checked
        whole, wrong = manifests.newest_whole(checked.folder / run_folder.CHECKPOINTS)
        run_folder.set_aside([path for path, _ in wrong])
        begin = f"from {whole}" if whole else "from the beginning, as there is no checkpoint"
        print(f"{first}\nrestart {number} of {most} in {pause_s:g} s, {begin}", flush=True)
        pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        checked = dataclasses.replace(checked, resume_from=whole, first_weights=None if whole else first_weights)
    return work(checked)
