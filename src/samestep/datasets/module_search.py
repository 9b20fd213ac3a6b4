"""The search for modules that a job names: in the folder of the job file, the working directory, and the path of
imports."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def make_importable(name: str, folder: str | None) -> None:
    """Put the working directory in front of the path of imports, and a job's folder before it where the module is found there.

    Both stay there, for imports that the module makes later. A folder without the module is left out, so that no other file in it
    takes the place of an installed module.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    root = name.partition(".")[0]
    if folder is None or folder in (here, *sys.path) or root in sys.modules:
        return
    spec = spec_of(root, folder)
    files = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if any(file is not None and Path(folder) in (Path(file).parent, Path(file).parent.parent) for file in files):
        sys.path.insert(0, folder)


def spec_of(root: str, folder: str | None) -> ModuleSpec | None:
    """Return the module that an import would find at the outermost level, without running it; None where there is
    none."""
    importlib.invalidate_caches()
    return PathFinder.find_spec(root, [*([folder] if folder else []), os.getcwd(), *sys.path])


def looked_in(folder: str | None) -> str:
    """Return the folders in which a job's modules are looked for besides the installed ones, as text."""
    here = os.getcwd()
    return here if folder in (None, here) else f"{folder} nor in {here}"
