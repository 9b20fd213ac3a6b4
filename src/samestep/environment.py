"""What a bug report needs to know of a machine: versions of what is installed, and devices."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

_PACKAGES = ("samestep", "torch", "numpy", "transformers", "tokenizers", "safetensors")


def as_text() -> str:
    """Write the versions of Python and of the packages that results depend on, and the GPUs."""
    gpus = [f"GPU {index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    python = f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"
    return "\n".join([python, *map(_version, _PACKAGES), *gpus])


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"
