"""The GPUs of a host as its driver and torch describe them; torch is imported in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.wings.cluster.diagnosis.report import shortened

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of CUDA. Source: NVIDIA, CUDA compatibility, minor versions."""
_SMI_S = 2.5
_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_CODE = """
import json, warnings
said = {"version": "", "gpus": 0, "nccl": "", "error": ""}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        import torch
        said["version"], said["gpus"] = torch.__version__, torch.cuda.device_count()
        if said["gpus"]:
            said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            for index in range(said["gpus"]):
                torch.ones(8, device=f"cuda:{index}").sum().item()
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
said["error"] = said["error"] or next((str(one.message) for one in caught if "CUDA" in str(one.message)), "")
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one host by its driver."""

    names: tuple[str, ...]
    driver: str
    error: str
    """What the driver's tool says instead."""
    visible: str
    """The variable that hides GPUs, as NAME=VALUE; empty where none is set."""
    infiniband: tuple[str, ...]
    """The InfiniBand and RoCE devices with a port that is up."""

    @property
    def num_visible(self) -> int:
        """The number of GPUs that a process here may use."""
        name, _, value = self.visible.partition("=")
        if not name:
            return len(self.names)
        words = [word for word in value.split(",") if word.strip() and word.strip() != "-1"]
        return min(len(self.names), len(words))


@dataclass(frozen=True)
class Torch:
    """The answers of torch about one host."""

    version: str
    gpus: int
    nccl: str
    error: str
    is_late: bool = False
    """Whether torch was not imported in time."""


def find_gpus(env: Mapping[str, str] | None = None) -> Gpus:
    """Return the GPUs of this host by its driver."""
    env = os.environ if env is None else env
    visible = next(
        (f"{name}={env[name]}" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in env), ""
    )
    names, driver, error = _by_driver()
    return Gpus(names, driver, error, visible, _infiniband())


def _by_driver() -> tuple[tuple[str, ...], str, str]:
    try:
        said = subprocess.run(["nvidia-smi", *_QUERY], capture_output=True, timeout=_SMI_S, check=False)
    except FileNotFoundError:
        is_driven = Path("/proc/driver/nvidia/version").exists()
        return (), "", "the driver is loaded, and there is no nvidia-smi" if is_driven else ""
    except subprocess.TimeoutExpired:
        return (), "", f"nvidia-smi did not answer within {_SMI_S:g} s"
    except OSError as error:
        return (), "", f"nvidia-smi cannot be run: {error.strerror}"
    text = said.stdout.decode(errors="replace")
    if said.returncode:
        return (
            (),
            "",
            shortened(text or said.stderr.decode(errors="replace") or f"nvidia-smi ended with {said.returncode}"),
        )
    rows = [[cell.strip() for cell in line.rsplit(",", 1)] for line in text.splitlines() if "," in line]
    drivers = [*dict.fromkeys(row[1] for row in rows)]
    return tuple(row[0] for row in rows), drivers[0] if drivers else "", ""


def _infiniband() -> tuple[str, ...]:
    root, adapters = Path("/sys/class/infiniband"), []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            states = [path.read_text() for path in device.glob("ports/*/state")]
        except OSError:
            continue
        if any("ACTIVE" in state for state in states):
            adapters.append(device.name)
    return tuple(adapters)


class TorchQuestion:
    """A process that imports torch and asks it; the process is started at once, and the answer taken later."""

    def __init__(self) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = ""
        try:
            self._process = subprocess.Popen([sys.executable, "-c", _CODE], **pipes)  # type: ignore[call-overload]
        except OSError as error:  # no process is left to this user, or the interpreter is not theirs to run
            self._refused = f"{sys.executable} cannot be started: {(error.strerror or str(error)).lower()}"

    def answer(self, timeout_s: float) -> Torch:
        """Return what torch says, within a number of seconds."""
        if self._process is None:
            return Torch("", 0, "", self._refused)
        try:
            said, _ = self._process.communicate(timeout=timeout_s)
            return Torch(**json.loads(said))
        except subprocess.TimeoutExpired:
            return Torch("", 0, "", f"import torch took more than {timeout_s:.0f} s", is_late=True)
        except (ValueError, TypeError):
            return Torch("", 0, "", f"import torch ends the process with status {self._process.returncode}")
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
