"""Functions that a job names as `module:function`: the search in the folder of the job file, in the working directory and in the path of
imports; their import; digests of the code that runs.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable
from importlib import resources
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import xxhash

from samestep.errors import InputError, did_you_mean


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


def imported(name: str, folder: str | None) -> ModuleType | None:
    """Import a module, also from a job's folder and the working directory; None if there is none of that name. An error of its own code, or of
    a module that it needs, is raised as it is.
    """
    make_importable(name, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise
        return None


def import_named(source: str, key: str, error: type[InputError], folder: str | None = None) -> Any:
    """Return what `module:name` names, also from a job's folder and the working directory; `key` begins the text of an error.

    Raises:
        error: the text has another form, or there is nothing of that name. Errors of the import are raised as they are.
    """
    module_name, colon, name = source.partition(":")
    if not colon or not module_name or not name:
        raise error("not-module-function", f"{key} = {source!r} is not of the form module:function")
    if (module := imported(module_name, folder)) is None:
        stem = module_name.removesuffix(".py").replace("/", ".")
        works = f". Use {stem}:{name}" if stem != module_name and Path(module_name).exists() else ""
        raise error(
            "module-missing",
            f"{key}: module not found: {module_name!r}, neither in {looked_in(folder)} nor among the installed ones{works}",
        )
    if not hasattr(module, name):
        public = [word for word in vars(module) if not word.startswith("_")]
        raise error("function-missing", f"{key}: {module_name} has no function {name!r}{did_you_mean(name, public)}")
    return getattr(module, name)


def import_function(source: str, key: str, error: type[InputError], folder: str | None = None) -> Callable[..., Any]:
    """Return the function `module:function`, as `import_named` does; `key` is the job's key.

    Raises:
        error: there is no such function, or the import fails.
    """
    module_name = source.partition(":")[0]
    try:
        function = import_named(source, key, error, folder)
    except error:
        raise
    except ModuleNotFoundError as missing:
        raise error(
            "module-missing", f"{key}: {module_name} needs the module {missing.name}, which is not installed"
        ) from missing
    except Exception as failed:
        raise error(
            "module-missing", f"{key}: importing {module_name} failed: {type(failed).__name__}: {failed}"
        ) from failed
    if not callable(function):
        raise error("function-missing", f"{key}: {source} is a {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)


@functools.cache
def own_sources() -> str:
    """Return one digest of all source files of samestep."""
    digest = xxhash.xxh3_128()
    with resources.as_file(resources.files("samestep")) as folder:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def installed_folders() -> set[Path]:
    """Return the folders of installed packages and of Python's standard library."""
    return {Path(path).resolve() for name, path in sysconfig.get_paths().items() if "lib" in name}


def loaded_sources() -> dict[str, str]:
    """Return the digests of the files of the imported modules that are not installed, by module name.

    These are the user's code. The files of samestep have one digest together.
    """
    package, folders = Path(__file__).resolve().parent.parent, installed_folders()
    digests = {"samestep": own_sources()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(file).resolve() if isinstance(file, str) and file.endswith(".py") else None
        if path is None or path.is_relative_to(package) or any(path.is_relative_to(folder) for folder in folders):
            continue
        if path.is_file():
            digests[name] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    return digests
