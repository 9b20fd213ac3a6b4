"""None as an argument is the default, or is rejected in one line: each default of each public function, and each optional argument of each command."""

from __future__ import annotations

import inspect
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep import arguments, calls, cli
from samestep.errors import InputError


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in samestep.__all__:
        if inspect.isfunction(function := getattr(samestep, name)):
            yield name, function
    for name, method in inspect.getmembers(samestep.Run, inspect.isfunction):
        if not name.startswith("_"):
            yield f"Run.{name}", method


def _defaults() -> Iterator[Any]:
    """Yield each default of a public function that is neither None nor a switch, for which None is off."""
    for name, function in _public():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default not in (None, False, inspect.Parameter.empty):
                yield pytest.param(function, parameter, id=f"{name} {parameter.name}")


@pytest.mark.parametrize(("function", "parameter"), [*_defaults()])
def test_none_for_a_default_is_the_default_or_rejected_by_its_name(
    function: Callable[..., Any], parameter: inspect.Parameter
) -> None:
    """The required arguments are objects that fail wherever they are used, so that no function does anything."""
    plain = inspect.unwrap(function)
    assert plain is not function, "it is not calls.checked"
    seen: dict[str, Any] = {}

    def record(*args: Any, **options: Any) -> None:
        seen.update(inspect.signature(plain).bind(*args, **options).arguments)

    record.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    rejected = f"{parameter.name} = None"
    try:
        calls.checked(record)(**{parameter.name: None, **_required(plain)})
    except InputError as error:
        rejected = str(error)
    assert rejected.startswith(f"{parameter.name} = None")
    assert not seen or seen[parameter.name] == parameter.default


def _required(function: Callable[..., Any]) -> dict[str, Any]:
    """Return values of the arguments that have no default, of the kinds that their names say."""
    known = {
        "job": samestep.Job(), "devices": 2, "layout": "dp=2", "rows": "a.csv", "layouts": ["dp=2"], "run": "runs/a", "out": "a", "path": "a", "folder": "a",
        "model": lambda: None, "optimizer": lambda params: None, "main": print, "metrics": None,
    }  # fmt: skip
    return {
        name: known.get(name, name)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def _required_arguments() -> Iterator[Any]:
    """Yield each argument of a public function that has no default and whose type has no None; tensors may have any name."""
    for name, function in _public():
        if name.startswith("Run."):
            continue
        for argument in _required(function):
            if "None" not in str(inspect.signature(function).parameters[argument].annotation):
                yield pytest.param(function, argument, id=f"{name} {argument}")


@pytest.mark.parametrize(("function", "argument"), [*_required_arguments()])
def test_none_for_a_required_argument_is_rejected_in_one_line(function: Callable[..., Any], argument: str) -> None:
    usual = {"source": [1], "loss": "mse", "over": "samples", "on": "slurm", "op": torch.ops.aten.relu, "along": 0}
    arguments_of_call = {name: usual.get(name, value) for name, value in _required(function).items()}
    with pytest.raises(InputError, match="None") as rejected:
        function(**arguments_of_call | {argument: None})
    assert "\n" not in str(rejected.value)


@given(
    first=st.none() | st.integers(),
    others=st.lists(st.none() | st.integers(), max_size=2),
    last=st.none() | st.integers(),
)
def test_none_is_the_default_by_position_and_by_name(first: Any, others: list[Any], last: Any) -> None:
    @calls.checked
    def function(a: int | None, b: int = 7, c: int | None = 8, *, d: int = 9) -> tuple[Any, ...]:
        return a, b, c, d

    b, c = (*others, *(7, 8)[len(others) :])
    assert function(first, *others, d=last) == (first, 7 if b is None else b, c, 9 if last is None else last)


COMMANDS = arguments.verbs_of(cli._parser())


@pytest.mark.parametrize("command", [*COMMANDS])
def test_a_command_without_its_optional_arguments_has_a_value_for_each(command: str) -> None:
    """The values are those of the defaults, and help names them or the argument is a switch or may be left out."""
    parser = COMMANDS[command][1]
    needed = [word for action in parser._actions if action.required for word in _words_of(action)]
    words = cli._parser().parse_args([command, *needed])
    for action in parser._actions:
        if action.required or action.dest == "help" or action.default is SUPPRESS:
            continue
        assert getattr(words, action.dest) == action.default, action.dest
        for others in _words_of(action):
            assert cli._parser().parse_args([command, *needed, *_spelt(action, others)]), others


def _spelt(action: Any, value: str) -> list[str]:
    if action.nargs == 0:
        return [action.option_strings[-1]]
    return [f"{action.option_strings[-1]}={value}"] if action.option_strings else []


def _words_of(action: Any) -> list[str]:
    """Return a value of an argument, with its flag if it is required."""
    value = str(next(iter(action.choices))) if action.choices else "1" if action.type is not Path else "a.toml"
    return [f"{action.option_strings[-1]}={value}"] if action.required and action.option_strings else [value]
