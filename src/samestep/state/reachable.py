"""The state that code can keep outside of modules: variables that a forward, a loss or an optimizer's step reaches from its functions.

One walk, `CodeWalk`, follows each function, class and object once:

    globals             of the file of a function, and of modules that it takes them from, by the names in its code (`code_names.py`)
    closures            the variables around a function, and its default arguments and attributes
    classes             attributes of the class of a module, or of an object that is reached
    objects, modules    that one of these variables holds, followed in turn
    constants           numbers in the code

Whose code is followed is an argument (`Home`): of a forward and a loss the user's alone (`Reached`), of an optimizer's step also that of
installed packages (`StepCode` in `step_code.py`). Libraries keep what they keep.
"""

from __future__ import annotations

import collections
import enum
import functools
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import suppress
from importlib.util import resolve_name
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor, nn

from samestep.datasets.generators import GENERATORS
from samestep.state.code_names import Chain, CodeNames, Import, codes_in, names_in

_LARGEST_NUMBER = 2**53
_MOST = 20_000
"""Objects that are followed at most."""
_PATHS = sysconfig.get_paths()
_OF_PYTHON, _OF_PACKAGES = (
    tuple({_PATHS[name] for name in names}) for names in (("stdlib", "platstdlib"), ("purelib", "platlib"))
)
_LIBRARIES = ("torch", "numpy", __name__.partition(".")[0])
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, Tensor, np.ndarray)
_SINGLE = (bool, int, float, complex, str, bytes, type(None))
_LEAVES = (*_SINGLE, Tensor, np.ndarray)
"""Values that hold nothing to be followed."""
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, nn.Module, functools.partial)
_CALLABLES = (FunctionType, MethodType, functools.partial, nn.Module)
_AROUND_FUNCTIONS = (functools._lru_cache_wrapper, functools.partial, MethodType)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_HOLDERS = (types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap)
"""Classes of Python whose objects are followed like those of a user's class."""


_WAYS_TO_A_FILE = ("globals", "__globals__", "f_globals", "__import__", "import_module", "getmodule")
"""Names by which code may ask for the variables of its own file, besides `sys.modules`."""


class Home(enum.Enum):
    """The origin of a module."""

    LIBRARY = "Python, torch, numpy or samestep"
    PACKAGE = "an installed package, or a module without a file"
    USER = "the user"


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


class Kind(enum.Enum):
    """The kind of reference by which code holds a value."""

    VARIABLE = "by a name of its own: of a closure, a file, a class, a function"
    ITEM = "in a container or an object"
    CONSTANT = "as a number in the code"


class Variable(NamedTuple):
    """A value that code holds, and where."""

    name: str
    """How the user knows it, for messages."""
    holder: Any
    """A dictionary, a list or a class that holds it by its key, a cell of a closure, or None for what cannot be set."""
    key: Any
    value: Any
    """Its value when it was found."""
    kind: Kind = Kind.VARIABLE

    @property
    def present(self) -> Any:
        """Its value now; None if there is none."""
        if isinstance(self.holder, CellType):
            return next(_content(self.holder), None)
        if isinstance(self.holder, list):
            return self.holder[self.key]
        held = vars(self.holder) if isinstance(self.holder, type) else self.holder
        return self.value if held is None else held.get(self.key)

    def put(self, value: Any) -> None:
        """Give the variable a value."""
        if isinstance(self.holder, dict | list):
            self.holder[self.key] = value
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif self.holder is not None:
            setattr(self.holder, self.key, value)


class CodeWalk:
    """A walk over functions, classes and objects, each once, in the order in which code holds them."""

    homes: ClassVar[frozenset[Home]] = frozenset([Home.USER])
    """The origins of the code that is followed."""
    most_items: ClassVar[int] = 256
    """Items of a container that are followed."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        """What was followed, held so that no id is given to another object."""

    def note(self, found: Variable) -> None:
        """Take note of a value, each time that one is found."""

    def enter(self, name: str, value: Any) -> None:
        """Take note of what is followed, once."""

    def follow(self, found: Iterable[Variable]) -> None:
        """Follow values, and what they hold."""
        rest = [iter(found)]
        while rest:
            one = next(rest[-1], None)
            if one is None:
                rest.pop()
                continue
            self.note(one)
            value = one.value
            if isinstance(value, _LEAVES) or id(value) in self._seen or len(self._seen) > _MOST:
                continue
            self._seen[id(value)] = value
            self.enter(one.name, value)
            rest.append(self._within(one.name, value))

    def _follows(self, module_name: str | None) -> bool:
        return home_of(module_name) in self.homes

    def _is_object(self, value: Any) -> bool:
        """Return whether a value is an instance of a class whose code is followed, containers included."""
        return not isinstance(value, _CODE) and self._follows(type(value).__module__)

    def _within(self, name: str, value: Any) -> Iterator[Variable]:
        """Yield what a value holds."""
        if isinstance(value, (FunctionType, *_AROUND_FUNCTIONS)):
            yield from self._of_callable(name, value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, nn.Module):
            yield from self._of_modules(name, value)
        elif isinstance(value, dict):
            for key, item in list(items_of(value).items())[: self.most_items]:
                yield Variable(name, value, key, item, Kind.ITEM)
                if isinstance(key, Tensor):
                    yield _item(name, key)
        elif isinstance(value, _CONTAINERS):
            yield from (_item(name, item) for item in list(islice(value, self.most_items)))
        elif isinstance(value, _HOLDERS) or self._follows(type(value).__module__):
            yield from self._of_object(name, value)

    def _of_callable(self, name: str, value: Any) -> Iterator[Variable]:
        if isinstance(value, functools._lru_cache_wrapper):
            yield _item(name, value.__wrapped__)
        elif isinstance(value, functools.partial):
            yield _item(name, value.func)
            for index, item in enumerate((*value.args, *value.keywords.values())):
                yield Variable(f"argument {index} of {name}", None, "", item)
        elif isinstance(value, MethodType):
            yield _item(name, value.__func__)
            yield Variable(name, None, "", value.__self__)
        elif self._follows(value.__globals__.get("__name__")):
            yield from self._of_function(value)
        else:  # a decorator of a library, around other code
            cells = (held for cell in value.__closure__ or () for held in _content(cell))
            for held in (getattr(value, "__wrapped__", None), *cells):
                if self._is_object(held):
                    yield Variable(name, None, "", held)
                elif isinstance(held, _CALLABLES):
                    yield _item(name, held)

    def _of_object(self, name: str, value: Any) -> Iterator[Variable]:
        """Yield the class of an object, and its attributes."""
        yield _item(type(value).__name__, type(value))
        for base in type(value).__mro__:
            for key, slot in list(vars(base).items()):
                if isinstance(slot, types.MemberDescriptorType) and self._follows(base.__module__):
                    with suppress(AttributeError):
                        yield _item(f"{name}.{key}", slot.__get__(value))
        held = getattr(value, "__dict__", {})
        for key, item in list(held.items())[: self.most_items]:
            yield Variable(f"{name}.{key}", held, key, item, Kind.ITEM)

    def _of_modules(self, name: str, root: nn.Module) -> Iterator[Variable]:
        """Yield the classes of a module and its parts, their hooks, and what is among their attributes."""
        parts = [*root.named_modules()]
        self._seen |= {id(part): part for _, part in parts}
        for path, part in parts:
            where = f"{name}.{path}".strip(".")
            yield _item(type(part).__name__, type(part))
            for key, value in list(vars(part).items()):
                if key.endswith("hooks"):
                    for hook in list(value.values()) if isinstance(value, dict) else ():
                        yield _item(f"{where}.{key}", hook)
                elif isinstance(value, FunctionType) or not (key.startswith("_") or isinstance(value, nn.Module)):
                    yield _item(f"{where}.{key}".lstrip("."), value)

    def _of_function(self, function: FunctionType) -> Iterator[Variable]:
        where, code, defaults = function.__qualname__, function.__code__, function.__defaults__ or ()
        positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        named = function.__kwdefaults__ or {}
        for key, value in (*zip(positional, defaults, strict=True), *named.items()):
            kind = Kind.ITEM if isinstance(value, _SINGLE) else Kind.VARIABLE
            yield Variable(f"the default of {key} in {where}", named if key in named else None, key, value, kind)
        for key, value in list(vars(function).items()):
            yield Variable(f"{where}.{key}", vars(function), key, value)
        for constant in (constant for one in codes_in(code) for constant in one.co_consts):
            if isinstance(constant, int | float | tuple) and not isinstance(constant, bool):
                yield Variable(where, None, "", constant, Kind.ITEM if isinstance(constant, tuple) else Kind.CONSTANT)
        yield from self._named_in(function)

    def _named_in(self, function: FunctionType) -> Iterator[Variable]:
        """Yield the variables that the code of a function names: of closures, of its file, and of modules whose code is followed."""
        names = names_in(function.__code__)
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            for value in _content(cell):
                yield Variable(f"{name} around {function.__qualname__}", cell, name, value)
                if isinstance(value, ModuleType):
                    yield from self._of_module(value, names.of_closure.get(name, ()), names.attributes)
        own = function.__globals__
        for name in sorted(names.of_file.keys() & own.keys()):
            yield from self._of_file(own, name, names.of_file[name], names.attributes)
        for taken in sorted(names.imports):
            if (module := _imported(taken, own)) is not None:
                yield from self._of_module(module, [(name,) for name in taken.names] or [()], names.attributes)
        if _takes_variables_by_text(names, own):
            for name in sorted(names.attributes & own.keys() - names.of_file.keys()):
                yield from self._of_file(own, name, [()], names.attributes)

    def _of_file(
        self, held: dict[str, Any], name: str, chains: Collection[Chain], attributes: Set[str]
    ) -> Iterator[Variable]:
        """Yield a variable of a file, or for a module those of its variables that the code takes of it."""
        value = held[name]
        if isinstance(value, ModuleType):
            yield from self._of_module(value, chains, attributes)
        else:
            yield Variable(f"{name} of {held.get('__name__', '')}", held, name, value)

    def _of_module(self, module: ModuleType, chains: Collection[Chain], attributes: Set[str]) -> Iterator[Variable]:
        """Yield the variables of a module to which chains of attributes lead.

        Where the module itself is used, as in `getattr(module, name)`, they may be any that have the name of an attribute or a text.
        """
        if not self._follows(module.__name__):
            return
        held = vars(module)
        for name in sorted({chain[0] for chain in chains if chain} & held.keys()):
            yield from self._of_file(held, name, [chain[1:] for chain in chains if chain[:1] == (name,)], attributes)
        for name in sorted(attributes & held.keys()) if () in chains else ():
            if not isinstance(held[name], ModuleType):
                yield Variable(f"{name} of {module.__name__}", held, name, held[name])

    def _of_class(self, kind: type) -> Iterator[Variable]:
        """Yield the attributes of a class and its bases, the functions of methods and properties among them."""
        for base in kind.__mro__:
            for name, value in list(vars(base).items()) if self._follows(base.__module__) else ():
                function = (
                    getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
                )
                function = value if isinstance(value, FunctionType) else function
                if isinstance(function, FunctionType):
                    yield _item(name, function)
                elif not (name.startswith("__") and name.endswith("__")):
                    holder = None if isinstance(base, enum.EnumMeta) else base  # whose members nobody can replace
                    yield Variable(f"{base.__name__}.{name}", holder, name, value)


class Reached(CodeWalk):
    """The objects that the code of a model, or of a function, reaches, where the user wrote it."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.variables: list[Variable] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.caches: list[tuple[Any, Any]] = []
        """Functions of which `functools.lru_cache` keeps results, and what it has counted."""
        self.constants: set[int] = set()
        """Integers in the code."""
        self._noted: set[tuple[int, Any]] = set()
        if isinstance(root, nn.Module):
            self.follow(self._of_modules("", root))
        else:
            kind = Kind.VARIABLE if self._is_object(root) else Kind.ITEM
            self.follow([Variable(getattr(root, "__name__", type(root).__name__), None, "", root, kind)])

    def note(self, found: Variable) -> None:
        """Note a variable if its value can be kept or replaced."""
        if found.kind is Kind.CONSTANT and abs(found.value) < _LARGEST_NUMBER:
            self.constants.add(int(found.value))
        if found.kind is not Kind.VARIABLE:
            return
        if isinstance(found.value, (*_PLAIN, *GENERATORS)) or self._is_object(found.value):
            at = (id(found.holder), found.key) if found.holder is not None else (id(found.value), "")
            if at not in self._noted:
                self._noted.add(at)
                self.variables.append(found)

    def enter(self, name: str, value: Any) -> None:
        """Note a module that is no part of the root, and a function whose results are kept."""
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches.append((value, value.cache_info()))
        elif isinstance(value, nn.Module):
            self.modules.append((name, value))


def _item(name: str, value: Any) -> Variable:
    return Variable(name, None, "", value, Kind.ITEM)


def _content(cell: CellType) -> Iterator[Any]:
    """Yield what a cell of a closure holds, if it holds something yet."""
    with suppress(ValueError):
        yield cell.cell_contents


def _imported(taken: Import, own: dict[str, Any]) -> ModuleType | None:
    """Return the module that code of a file imports when it runs, if it is known yet."""
    with suppress(ImportError):  # it begins with more dots than the file has packages
        return sys.modules.get(resolve_name("." * taken.level + taken.module, own.get("__package__")))
    return None


def _takes_variables_by_text(names: CodeNames, own: dict[str, Any]) -> bool:
    """Return whether code can reach the variables of its file by other ways than their names, as `globals()` is one."""
    has_sys = any(own.get(name) is sys for name in names.of_file) or any(one.module == "sys" for one in names.imports)
    called = names.of_file.keys() | names.attributes
    return (has_sys and "modules" in called) or not called.isdisjoint(_WAYS_TO_A_FILE)


def built_in_kind(held: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the built-in class that stores a dict's items, below subclasses that read or write them otherwise."""
    return OrderedDict if isinstance(held, OrderedDict) else dict


def items_of(held: dict[Any, Any]) -> dict[Any, Any]:
    """Return the items that a dict holds; a subclass may compute others when it is asked for them."""
    return {key: dict.__getitem__(held, key) for key in built_in_kind(held).__iter__(held)}
