"""samestep without some of its wings, as if their folders were not there: an import hook.

remove(["plan"])                                in a process that has not imported it
pytest -p tests.without_wings tests/ledger      tests, without any wing
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "src" / "samestep" / "wings"
WINGS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


class Missing(importlib.abc.MetaPathFinder):
    """Say of some wings that there is no such module."""

    def __init__(self, wings: Sequence[str]) -> None:
        self.names = {f"samestep.wings.{wing}" for wing in wings}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def remove(wings: Sequence[str]) -> None:
    """Remove wings from this process, and from those that it forks."""
    assert not {f"samestep.wings.{wing}" for wing in wings} & {*sys.modules}, "a wing was imported before"
    sys.meta_path.insert(0, Missing(wings))


def pytest_configure(config: object) -> None:
    """Remove all wings, where pytest loads this file as a plugin."""
    remove(WINGS)
