"""The names by which code reaches variables that are not local: globals, and attributes by the object that they are taken of.

    count               global count                      the variable `count` of the file
    self.count          a local, its attribute count      none, whatever the file has of that name
    counters.calls      global counters, of it calls      `calls` of the module `counters`, and of no other
    mine = counters     global counters, by itself        any attribute or text of the code may be of that module

The instructions of the interpreter tell them apart; `co_names` alone does not.
"""

from __future__ import annotations

import dis
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import NamedTuple

_OF_FILE = frozenset(["LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])
_OF_CLOSURE = frozenset(["LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"])
_OF_OBJECT = frozenset(["LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"])
_OF_CLASS_BODY = frozenset(["STORE_NAME", "DELETE_NAME", "IMPORT_FROM"])
"""Names that are set where they stand; what is imported stands in the list of the import."""
_BETWEEN = frozenset(["EXTENDED_ARG", "CACHE", "PUSH_NULL", "NOP"])
"""Instructions that may stand between a name and its attribute, besides the copy that `counters.calls += 1` works on."""

Chain = tuple[str, ...]
"""Attributes that are taken one of the other, the first of a variable; none where the variable is used by itself."""


class Import(NamedTuple):
    """A module that code imports when it runs."""

    level: int
    """Dots in front of the name."""
    module: str
    names: tuple[str, ...]
    """What is taken of it; nothing where the module itself is."""


class CodeNames(NamedTuple):
    """The names in the code of a function and of those that are defined in it."""

    of_file: Mapping[str, set[Chain]]
    """Names of variables of the file, and what is taken of each."""
    of_closure: Mapping[str, set[Chain]]
    """Names of variables around functions, and what is taken of each."""
    imports: frozenset[Import]
    attributes: frozenset[str]
    """Names of attributes of anything, and texts."""


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> CodeNames:
    """Return the names in the code of a function and of those that are defined in it."""
    of_file, of_closure = defaultdict[str, set[Chain]](set), defaultdict[str, set[Chain]](set)
    imports, attributes = set[Import](), set[str]()
    for one in codes_in(code):
        attributes.update(constant for constant in one.co_consts if isinstance(constant, str))
        before: list[dis.Instruction] = []
        chain: list[str] = []
        chains = of_file
        for instruction in dis.get_instructions(one):
            operation, name = instruction.opname, instruction.argval
            if operation in _OF_OBJECT:
                chain += [name] if chain else []
                attributes.add(name)
            elif operation not in _BETWEEN and not (operation == "COPY" and instruction.arg == 1):
                if chain:
                    chains[chain[0]].add(tuple(chain[1:]))
                is_known = operation in _OF_FILE or operation in _OF_CLOSURE
                chain, chains = [name] if is_known else [], of_closure if operation in _OF_CLOSURE else of_file
                if operation == "IMPORT_NAME":
                    level, taken = (earlier.argval for earlier in before[-2:])
                    imports.add(Import(level, name, taken or ()))
                elif instruction.opcode in dis.hasname and not is_known and operation not in _OF_CLASS_BODY:
                    of_file[name].add(())  # of an interpreter that is newer than this file: it may be either
                    attributes.add(name)
            before = before if operation in _BETWEEN else [*before[-1:], instruction]
    return CodeNames(dict(of_file), dict(of_closure), frozenset(imports), frozenset(attributes))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
