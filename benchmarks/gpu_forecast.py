"""One device measured as `samestep measure` does, and jobs predicted from that profile beside what they need.

The seconds of a step and the peak that torch's allocator gives away are predicted; the peak that it reserves is shown beside
it, since fragments and streams make it larger. The jobs are those of `single_gpu.py`, which is more thorough.
"""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import single_gpu
from single_gpu import Setting

from samestep import hardware
from samestep.hardware import Hardware
from samestep.program.update_rules import states_per_param
from samestep.runtime.processes.join import RankInfo
from samestep.wings.plan.measurement import microbenchmarks, profile
from samestep.wings.plan.simulation.simulate import predict

SETTINGS = (
    Setting("llama-125m", 16, "none"),
    Setting("llama-350m", 4, "selective"),
    Setting("llama-1b", 4, "none"),
    Setting("llama-1b", 1, "full"),
)

TOY = {"tiny": single_gpu.Size(2, 64, 4, 176)}
TOY_SETTINGS = (Setting("tiny", 2, "none"), Setting("tiny", 2, "full"))


@contextlib.contextmanager
def toy() -> Iterator[None]:
    """Measure a device and run jobs at a size at which nothing but the code is tried."""
    small: dict[str, Any] = {
        "EDGES": (16, 32), "COPIED_BYTES": 2**16, "MESSAGES": (2**10, 2**12), "ENOUGH_S": 1e-3, "TURNS": 1,
    }  # fmt: skip
    with contextlib.ExitStack() as changes:
        for name, value in small.items():
            changes.enter_context(mock.patch.object(microbenchmarks, name, {"cpu": value, "cuda": value}))
        for name, value in {"FULL_QUEUE_EDGE": 16, "ATTENDED_TOKENS": 16, "TINY": 3}.items():
            changes.enter_context(mock.patch.object(microbenchmarks, name, value))
        changes.enter_context(mock.patch.object(single_gpu, "SIZES", single_gpu.SIZES | TOY))
        changes.enter_context(mock.patch.object(single_gpu, "GROUPS", 1))
        changes.enter_context(mock.patch.object(single_gpu, "VOCAB", 256))
        yield


def measured(place: RankInfo, path: Path | None = None) -> Hardware:
    """Measure the device of a lone rank and return its profile, which is written to `path`."""
    text = profile.as_toml(microbenchmarks.device_of(place), microbenchmarks.measure_figures(place), 1)
    with tempfile.TemporaryDirectory() as folder:
        written = path or Path(folder) / "this-device.toml"
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(text, encoding="utf-8")
        return hardware.load(written)


def rows(
    place: RankInfo, machine: Hardware, settings: Sequence[Setting], sequence: int, steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and values of a row for each setting; one that fails holds its error."""
    for setting in settings:
        name = f"{setting.size}, {setting.layout}"
        try:
            yield name, _row(place, machine, setting, sequence, steps)
        except Exception as error:
            traceback.print_exc()
            yield name, {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        single_gpu.empty(place.device)


def _row(place: RankInfo, machine: Hardware, setting: Setting, sequence: int, steps: int) -> dict[str, Any]:
    job, seen = setting.job(sequence), single_gpu.run(place, setting, steps, sequence)
    said = predict(seen.spec, job, setting.layout, machine, states_per_param(job))
    tensors = said.peak.total - said.peak.overhead
    values: dict[str, Any] = {"predicted_step_s": said.step_s, "predicted_bytes": tensors}
    if not seen.step_s:
        return values | ({"error": "out of memory"} if said.fits else {"note": "out of memory, as predicted"})
    return values | {
        "step_s": seen.step_s, "step_error": said.step_s / seen.step_s - 1, "allocated_bytes": seen.allocated_bytes,
        "bytes_error": tensors / seen.allocated_bytes - 1, "reserved_bytes": seen.reserved_bytes,
    }  # fmt: skip
