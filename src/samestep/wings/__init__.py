"""The wings: what samestep offers besides training and proving. Each is a folder that can be left out.

    core:   job, layout, program, strategies, examination, runtime, proof, training     never imports a wing
    wings:  plan, explain, pages, cluster, readers, adapters, slow_links                         import the core, and the wings that they name

The core reaches a wing through `optional`, which returns None if its folder is missing, or through `required`, for what a user
asked for by name. Nothing else loads a wing, so a run without it neither imports nor needs it.
"""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import Any

from samestep.errors import InputError


def optional(wing: str, module: str) -> Any:
    """Return a module of a wing, such as `optional("plan", "search")`; None if that wing, or one that it needs, is not installed."""
    return _load(wing, module)[0]


def required(wing: str, module: str) -> Any:
    """Return a module of a wing that the user asked for.

    Raises:
        InputError: the wing, or one that it needs, is not installed.
    """
    loaded, missing = _load(wing, module)
    if loaded is None:
        folder = missing.removeprefix("samestep.").replace(".", "/")
        raise InputError(
            "wing-missing", f"this installation of samestep has no folder {folder}: install the whole package to use it"
        )
    return loaded


def _load(wing: str, module: str) -> tuple[Any, str]:
    """Return a module of a wing, and without it the name of the wing that is missing."""
    try:
        return import_module(f"samestep.wings.{wing}.{module}"), ""
    except ModuleNotFoundError as error:
        if error.name is None or error.name.rpartition(".")[0] != "samestep.wings":
            raise
        return None, error.name


def in_notebook(page_module: str, result: object, height: int = 560) -> str | None:
    """Return the page of a result for a cell of a notebook, as HTML; None without the wing `pages`, so that its text is shown.

    `page_module` is the file of `wings/pages/` whose `page_of` makes the page. The frame separates the styles of page and
    notebook. The timeline has no boxes to zoom into, so that a saved notebook stays small.
    """
    pages = optional("pages", page_module)
    if pages is None:
        return None
    return (
        f'<iframe srcdoc="{escape(pages.page_of(result, small=True).to_html(), quote=True)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0" title="samestep"></iframe>'
    )
