"""The environment for a bug report: versions of Python and of the packages, and the devices of this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("samestep", "torch", "numpy", "transformers", "tokenizers", "safetensors")


def as_text() -> str:
    """Return the versions of Python and of the packages that results depend on, and the GPUs, one line each."""
    python = f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"
    packages = (f"{package} {_version(package) or 'is not installed'}" for package in _PACKAGES)
    return "\n".join([python, *packages, *_list_shadowed(), *_gpus()])


def as_record() -> dict[str, object]:
    """Return the same as plain data; a package that is not installed is None."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "shadowed": _list_shadowed(),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Return a line for each GPU, or why torch, which knows them, cannot be imported."""
    try:
        import torch  # noqa: PLC0415 - what stands above is said even where torch cannot be imported
    except Exception as error:
        return [f"torch cannot be imported: {type(error).__name__}: {error}"]
    return [f"GPU {index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]


def _list_shadowed() -> list[str]:
    """Return a line for each package in whose place a file of the same name on the path is imported."""
    lines = []
    for package in _PACKAGES[1:]:
        try:
            files = {
                Path(str(one.locate())).resolve() for one in metadata.files(package) or () if one.name == "__init__.py"
            }
            found = importlib.util.find_spec(package)
        except (metadata.PackageNotFoundError, ImportError, ValueError):
            continue
        origin = Path(found.origin).resolve() if found is not None and found.origin else None
        if origin is not None and files and origin not in files:
            lines.append(
                f"{package} is imported from {origin}, which hides the installed one: another name for that file works"
            )
    return lines


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
