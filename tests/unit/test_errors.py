"""The tree of errors: the drawing in the head of `errors` is the classes, and the exit status follows from them."""

from __future__ import annotations

import inspect
import re

import pytest

import samestep
from samestep import cli, errors

CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def _drawn() -> dict[str, tuple[str, ...]]:
    """Each class of the drawing with its bases: the class above it that stands further left, and what is in brackets."""
    found: dict[str, tuple[str, ...]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").split("```")[1].strip().splitlines():
        drawn = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>\w+)(?: \((?P<base>\w+)\))?", line)
        assert drawn, line
        depth = len(drawn["branch"])
        above = [(left, name) for left, name in above if left < depth]
        found[drawn["name"]] = (*(name for _, name in above[-1:]), *filter(None, [drawn["base"]]))
        above.append((depth, drawn["name"]))
    return found


def test_the_drawn_tree_is_the_classes() -> None:
    assert _drawn() == {name: tuple(base.__name__ for base in kind.__bases__) for name, kind in CLASSES.items()}


def test_every_error_is_public() -> None:
    assert {name for name in samestep.__all__ if name.endswith("Error")} == set(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"SamestepError"}))
def test_the_exit_status_says_whether_the_input_or_the_run_was_at_fault(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = CLASSES[name]
    assert issubclass(kind, errors.InputError) != issubclass(kind, errors.RunError)

    def failing(_: object) -> int:
        raise kind("what happened")

    monkeypatch.setattr(cli, "_env", failing)
    assert cli.main(["env"]) == (2 if issubclass(kind, ValueError) else 1)
    assert capsys.readouterr().err == "samestep: what happened\n"
