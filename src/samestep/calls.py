"""Checks of the arguments with which a user calls a public function: one of a wrong type is refused in one line, with what works."""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, ParamSpec, TypeVar

from samestep.errors import InputError, JobError, LayoutError, ModelError, did_you_mean, short_repr
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout

P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that refuses an argument of another kind than its name says, such as a dict for `job`, and for which None is
    the default of any other argument.

    Raises:
        InputError: the returned function: an argument is of another kind.
    """
    parameters = inspect.signature(function).parameters
    known = {name: _KINDS[name] for name in parameters if name in _KINDS}
    optional = {name for name, parameter in parameters.items() if _is_optional(parameter)}
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in known and name not in optional
    }

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in (*zip(parameters, args, strict=False), *kwargs.items()):
            if name not in parameters and not takes_others:
                others = ", ".join(parameters)
                hint = did_you_mean(name, parameters)
                raise InputError("argument-type", f"{function.__name__} has no argument {name}{hint}. Use {others}")
            if name in known and not (value is None and name in optional):
                known[name](name, value)
        values: Any = [
            defaults.get(name) if value is None else value for name, value in zip(parameters, args, strict=False)
        ]
        options: Any = {name: defaults.get(name) if value is None else value for name, value in kwargs.items()}
        return function(*[*values, *args[len(values) :]], **options)

    return call


def _is_optional(parameter: inspect.Parameter) -> bool:
    """Return whether None may be given: it is the default, or the annotation has it."""
    return parameter.default is None or "None" in str(parameter.annotation).replace("|", " ").split()


def _refuse(name: str, value: Any, works: str, error: type[InputError] = InputError) -> NoReturn:
    """Raise the error of an argument of a wrong kind.

    Raises:
        error: always.
    """
    raise error("argument-type", f"{name} = {short_repr(value)} is {_kind(value)}. Use {works}")


def _rule(
    is_right: Callable[[Any], bool], works: str, error: type[InputError] = InputError
) -> Callable[[str, Any], None]:
    """Return the function that refuses a value of another kind."""

    def refuse_others(name: str, value: Any) -> None:
        if not is_right(value):
            _refuse(name, value, works, error)

    return refuse_others


def _count(name: str, value: Any) -> None:
    try:
        operator.index(value)
    except TypeError:
        _refuse(name, value, f"a whole number, such as {name}=2")


def _several(name: str, value: Any) -> None:
    works = {
        "layouts": 'a list, such as layouts=["dp=2", "tp=2"]',
        "rows": "the path of a file, or a list of paths",
        "args": "a tuple of further arguments of the function, such as args=(3,)",
    }
    is_single = isinstance(value, (str, Layout)) and name != "rows"
    if is_single or not isinstance(value, (Iterable, os.PathLike)):
        _refuse(name, value, works[name])


def _model(name: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _model(f"{name}[{key!r}]", item)
        return
    if not callable(value):
        _refuse(name, value, "a function that builds an nn.Module, or a module", ModelError)
    if not hasattr(value, "named_parameters") or isinstance(value, type):
        _takes(name, value, (), "nothing. Use a lambda that calls it with its arguments", ModelError)


def _optimizer(name: str, value: Any) -> None:
    if hasattr(value, "param_groups"):
        return
    if isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _optimizer(f"{name}[{key!r}]", item)
        return
    works = "lambda params: torch.optim.AdamW(params, lr=1e-3)"
    if not callable(value):
        _refuse(name, value, f"a function of the parameters, such as {works}", JobError)
    _takes(name, value, ([],), f"one argument, a list of parameters. Use {works}", JobError)


def _measure(name: str, value: Any) -> None:
    works = "a function of (outputs, batch) -> {'name': (sum, count)}"
    if not callable(value):
        _refuse(name, value, works, JobError)
    _takes(name, value, (None, None), f"two arguments. Use {works}", JobError)


def _takes(name: str, function: Any, args: tuple[Any, ...], what: str, error: type[InputError]) -> None:
    """Refuse a function that cannot be called with these arguments.

    Raises:
        error: it cannot.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # code in C need not have one
        return
    try:
        signature.bind(*args)
    except TypeError as failed:
        word = getattr(function, "__qualname__", type(function).__name__)
        raise error(
            "argument-type", f"{name} = {word} cannot be called as it will be ({failed}), with {what}"
        ) from None


def _kind(value: Any) -> str:
    if value is None:
        return "not accepted"
    word = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return word if isinstance(value, type) else f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def _is_a(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_job = _rule(_is_a(Job), "a samestep.Job: samestep.Job(train={...}), or samestep.load(path) of a file", JobError)
_path = _rule(_is_a(str, os.PathLike), "the path of a file or a folder")
_hardware = _rule(_is_a(str, os.PathLike, Hardware), "the name of a profile, its file, or a samestep.Hardware")
_layout = _rule(_is_a(str, Layout), 'one line of text, such as layout="dp=2 tp=2"', LayoutError)
_loss = _rule(
    lambda value: callable(value) or isinstance(value, str),
    "a loss of torch, such as nn.CrossEntropyLoss(), a function of (outputs, batch) -> (sum, count), "
    'or "model" for the loss that the forward returns',
    JobError,
)
_op = _rule(
    lambda value: hasattr(value, "overloads") or hasattr(value, "overloadpacket"),
    "an operation of torch.ops, such as torch.ops.mylib.scan",
    ModelError,
)
_main = _rule(
    callable,
    "a function, which every rank calls; samestep.train(job) trains a job, and samestep.write_submission(job, on) writes the "
    "script for a scheduler",
)
_KINDS: dict[str, Callable[[str, Any], None]] = {
    "job": _job, "layout": _layout, "model": _model, "loss": _loss, "optimizer": _optimizer, "metrics": _measure, "main": _main, "op": _op, "along": _count,
    "devices": _count, "steps": _count, "ranks": _count, "top": _count, "samples": _count, "tokens": _count, "first_step": _count,
    "layouts": _several, "rows": _several, "args": _several, "hardware": _hardware, "run": _path, "out": _path, "path": _path, "folder": _path, "init_from": _path,
}  # fmt: skip
"""The arguments that public functions share, by name, and the function that refuses another kind of value."""
