"""Import of a function that a job names as `module:function`, from the path or the working directory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from samestep.errors import InputError, did_you_mean


def imported(source: str, key: str, error: type[InputError]) -> Callable[..., Any]:
    """Return the function `module:function`, looked for in the working directory too; `key` is the job's key.

    Raises:
        error: the text has another form, the import fails, or there is no such function.
    """
    module_name, colon, name = source.partition(":")
    if not colon or not module_name or not name:
        raise error(f"{key} = {source!r} is not of the form module:function")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module_name}.".startswith(f"{missing.name}."):
            raise error(f"{key}: {module_name} needs the module {missing.name}, which is not installed") from missing
        stem = module_name.removesuffix(".py").replace("/", ".")
        works = f": {stem}:{name} works" if stem != module_name and Path(module_name).exists() else ""
        raise error(
            f"{key}: there is no module {module_name!r}, neither in {here} nor among the installed ones{works}"
        ) from None
    except Exception as failed:
        raise error(f"{key}: importing {module_name} failed: {type(failed).__name__}: {failed}") from failed
    function = getattr(module, name, None)
    if function is None:
        public = [word for word in vars(module) if not word.startswith("_")]
        raise error(f"{key}: {module_name} has no function {name!r}{did_you_mean(name, public)}")
    if not callable(function):
        raise error(f"{key}: {source} is a {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)
