"""The environment for a bug report: versions of Python and of the packages, and the devices of this machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

_PACKAGES = ("samestep", "torch", "numpy", "transformers", "tokenizers", "safetensors")


def as_text() -> str:
    """Return the versions of Python and of the packages that results depend on, and the GPUs, one line each."""
    gpus = [f"GPU {index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    python = f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"
    return "\n".join([python, *map(_version, _PACKAGES), *gpus])


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"
