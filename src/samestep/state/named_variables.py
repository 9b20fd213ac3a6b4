"""Variables outside of modules: the globals, closures, classes and default values that code of the user's names.

State is what modules contain, and what objects contain that a model or a loss holds (`snapshot.py`). A function may keep values in a
variable that none of them holds, so its code is searched for names, as is that of the functions and classes which it names:

    count                 a global, or a variable around the function     that variable
    counters.calls        counters is a file of the user's                variables of that file, by all attributes and texts of the code
    globals()["count"]    the file of the function itself                 the same
    self.count            an attribute                                    none, whatever the file has of that name

Whose code is searched is an argument (`Home`): of a forward and a loss the user's alone, of an optimizer's step also that of installed
packages (`step_code.py`). Libraries keep what they keep.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from importlib.util import resolve_name
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from samestep.trees import tree_leaves

SEARCHED = (FunctionType, MethodType, functools.partial, functools._lru_cache_wrapper, type)
"""Values of which the code is searched."""
_PATHS = sysconfig.get_paths()
_OF_PYTHON, _OF_PACKAGES = (
    tuple({_PATHS[name] for name in names}) for names in (("stdlib", "platstdlib"), ("purelib", "platlib"))
)
_LIBRARIES = ("torch", "numpy", __name__.partition(".")[0])
_OF_FILE = frozenset(["LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])
"""Instructions that name a variable of the file; all others that have a name take an attribute of something."""
_WAYS_TO_A_FILE = frozenset(["globals", "__globals__", "f_globals", "__import__", "import_module", "getmodule"])
"""Names by which code may ask for the variables of its own file, besides `sys.modules`."""


class Home(enum.Enum):
    """The origin of a module."""

    LIBRARY = "Python, torch, numpy or samestep"
    PACKAGE = "an installed package, or a module without a file"
    USER = "the user"


OF_USER = frozenset([Home.USER])


@functools.lru_cache(maxsize=4096)
def home_of(module_name: str | None) -> Home:
    """Return the origin of a module, by its name and its file."""
    top = (module_name or "").partition(".")[0]
    if not module_name or top in _LIBRARIES:
        return Home.LIBRARY
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None:
        known = Home.LIBRARY if top in sys.stdlib_module_names else Home.PACKAGE
        return Home.USER if module_name == "__main__" else known
    places = (file, str(Path(file).resolve()))
    if any(place.startswith(_OF_PACKAGES) for place in places):
        return Home.PACKAGE
    if any(place.startswith(_OF_PYTHON) for place in places):
        return Home.LIBRARY
    depth = module_name.count(".") + (Path(file).name == "__init__.py")
    installed = any(_holds_packages(folder) for place in places for folder in [*Path(place).parents][depth : depth + 1])
    return Home.PACKAGE if installed else Home.USER


@functools.cache
def _holds_packages(folder: Path) -> bool:
    """Return whether packages are installed in a folder, as by pip with `--user` or `--target`, or below another environment."""
    return next(folder.glob("*.dist-info"), None) is not None


class Variable(NamedTuple):
    """A value that code holds, and where."""

    name: str
    """How the user knows it, for messages."""
    holder: Any
    """A dictionary, a list or a class that holds it by its key, a cell of a closure, or None for a value that cannot be set."""
    key: Any
    value: Any
    """Its value when it was found."""

    @property
    def present(self) -> Any:
        """Its value now; None if there is none."""
        if isinstance(self.holder, CellType):
            return next(_content(self.holder), None)
        if isinstance(self.holder, list):
            return self.holder[self.key]
        items = vars(self.holder) if isinstance(self.holder, type) else self.holder
        return self.value if items is None else items.get(self.key)

    def put(self, value: Any) -> None:
        """Give the variable a value."""
        if isinstance(self.holder, dict | list):
            self.holder[self.key] = value
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif self.holder is not None:
            setattr(self.holder, self.key, value)


def variables_of(name: str, value: Any, homes: Collection[Home] = OF_USER) -> Iterator[Variable]:
    """Yield what a function, a class, or what stands around a function names or holds, where its code is of these homes."""
    if isinstance(value, type):
        yield from _of_class(value, homes)
    elif isinstance(value, functools.partial):
        for index, argument in enumerate((*value.args, *value.keywords.values())):
            yield Variable(f"argument {index} of {name}", None, "", argument)
        yield Variable(name, None, "", value.func)
    elif isinstance(value, MethodType):
        yield Variable(name, None, "", value.__func__)
        yield Variable(name, None, "", value.__self__)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield Variable(name, None, "", value.__wrapped__)
    elif home_of(value.__globals__.get("__name__")) in homes:
        yield from _of_function(value, homes)
    else:  # a decorator of a library, around other code
        contents = [*_content(*value.__closure__ or ()), getattr(value, "__wrapped__", None)]
        for inner in contents:
            if isinstance(inner, (*SEARCHED, nn.Module)) or home_of(type(inner).__module__) in homes:
                yield Variable(name, None, "", inner)


def _of_class(kind: type, homes: Collection[Home]) -> Iterator[Variable]:
    """Yield the attributes of a class and its bases, the functions of methods and properties among them."""
    for base in kind.__mro__:
        for name, value in list(vars(base).items()) if home_of(base.__module__) in homes else ():
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
            function = value if isinstance(value, FunctionType) else inner
            if isinstance(function, FunctionType):
                yield Variable(name, None, "", function)
            elif not (name.startswith("__") and name.endswith("__")):
                holder = None if isinstance(base, enum.EnumMeta) else base  # whose members nobody can replace
                yield Variable(f"{base.__name__}.{name}", holder, name, value)


# -- the search of one function ----------------------------------------------------------------------


class _Names(NamedTuple):
    """The names and numbers in the code of a function and of those that are defined in it."""

    of_file: frozenset[str]
    imported: frozenset[str]
    """Modules that it imports when it runs."""
    others: frozenset[str]
    """Attributes of anything, and texts."""
    numbers: frozenset[float]


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> _Names:
    codes = [*_codes_in(code)]
    steps = [step for inner in codes for step in dis.get_instructions(inner) if step.opcode in dis.hasname]
    of_file = frozenset(step.argval for step in steps if step.opname in _OF_FILE)
    imported = frozenset(step.argval for step in steps if step.opname == "IMPORT_NAME")
    others = {step.argval for step in steps if step.opname not in (*_OF_FILE, "IMPORT_NAME")}
    constants = tree_leaves([inner.co_consts for inner in codes])
    numbers = frozenset(leaf for leaf in constants if isinstance(leaf, int | float) and not isinstance(leaf, bool))
    return _Names(of_file, imported, frozenset(others.union(x for x in constants if isinstance(x, str))), numbers)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _of_function(function: FunctionType, homes: Collection[Home]) -> Iterator[Variable]:
    """Yield the variables that a function names, its default values and attributes, and the numbers in its code."""
    where, code, variables, names = (
        function.__qualname__, function.__code__, function.__globals__, _names_in(function.__code__)
    )  # fmt: skip
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for key, value in (*zip(positional, defaults, strict=True), *(function.__kwdefaults__ or {}).items()):
        yield Variable(f"the default of {key} in {where}", None, key, value)
    for key, value in list(vars(function).items()):
        yield Variable(f"{where}.{key}", vars(function), key, value)
    yield from (Variable(where, None, "", number) for number in sorted(names.numbers))
    around = list(zip(function.__closure__ or (), code.co_freevars, strict=True))
    yield from (
        Variable(f"{name} around {where}", cell, name, value) for cell, name in around for value in _content(cell)
    )
    modules = [value for name in names.of_file if isinstance(value := variables.get(name), ModuleType)]
    modules += [value for value in _content(*function.__closure__ or ()) if isinstance(value, ModuleType)]
    modules += _imported(names.imported, variables.get("__package__"))
    is_by_text = not _WAYS_TO_A_FILE.isdisjoint(names.of_file | names.others) or (
        "modules" in names.others and sys in modules
    )
    files = [(variables, names.of_file | (names.others if is_by_text else set())), *_files_of(modules, names, homes)]
    for items, wanted in files:
        for key in sorted(wanted & items.keys()):
            yield Variable(f"{key} of {items.get('__name__', '')}", items, key, items[key])


def _files_of(
    modules: list[ModuleType], names: _Names, homes: Collection[Home]
) -> Iterator[tuple[Any, frozenset[str]]]:
    """Yield the variables of modules whose code is searched, and of the modules in them that the code names; with the names."""
    rest, known = list(modules), set[str]()
    while rest:
        module = rest.pop()
        if module.__name__ not in known and home_of(module.__name__) in homes:
            known.add(module.__name__)
            inner = [vars(module)[name] for name in names.others & vars(module).keys()]
            rest += [value for value in inner if isinstance(value, ModuleType)]
            yield vars(module), names.others


def _imported(names: Iterable[str], package: str | None) -> Iterator[ModuleType]:
    """Yield the modules of these names that are imported already, in front of which the code may have had dots."""
    for name in names:
        for full in (name, *(f"{'.' * level}{name}" for level in (1, 2, 3) if package)):
            with suppress(ImportError):
                if isinstance(module := sys.modules.get(resolve_name(full, package)), ModuleType):
                    yield module


def _content(*cells: CellType) -> Iterator[Any]:
    """Yield what cells of closures hold, of those that hold something yet."""
    for cell in cells:
        with suppress(ValueError):
            yield cell.cell_contents
