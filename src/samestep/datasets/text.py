"""Plain text as one stream of tokens: two corpora that come with every Python, and files of the user.

`topics` is the language reference behind Python's `help()`, 0.5 MB of English and code; `stdlib` is the source code
of the standard library, about 10 MB. Both differ between versions of Python, so a result should name the version. Files
and topics are joined by a newline and are not kept separate; `documents.py` keeps documents separate.
"""

from __future__ import annotations

import importlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from samestep.datasets.columns import Origin, Piece, columns, stamps
from samestep.datasets.files import existing, files_at, sorted_files, texts_of, without_held_out
from samestep.datasets.split import HELD_OUT_WORDS, TRAINED_WORDS, words_of
from samestep.datasets.tokenizers import Tokenizer, encode_array, token_dtype

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


def topics() -> Iterator[str]:
    """Yield the topics of Python's help in the order of their names, or the standard library if this Python has none."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ModuleNotFoundError:
        warnings.warn("this Python has no pydoc_data.topics; source = 'stdlib' is used instead", stacklevel=2)
        return stdlib()
    return (text for _, text in sorted(module.topics.items()))


def stdlib() -> Iterator[str]:
    """Yield the source files of the standard library in the order of their names, without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted_files(folder, "*.py"):
        own = path.name.startswith("_sysconfigdata")  # written when Python was built; holds this machine's paths
        if not own and EXCLUDED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def text_tokens(path: str, tokenizer: Tokenizer, tokenizer_key: tuple[str, ...]) -> npt.NDArray[Any]:
    """Return the tokens of a text file, or of all files below a folder in the order of their names.

    Where every name says a part of a data set, those of validation and test data are left out.

    Raises:
        DataError: nothing is there, or a file is not UTF-8.
    """
    source = f"text:{path}" if path else "text:"
    place = existing(path, source)
    files = files_at(place, source)
    if all(words_of(file.relative_to(place)) & (TRAINED_WORDS | HELD_OUT_WORDS) for file in files if file != place):
        files = without_held_out(files, place)
    origin = Origin(source, sum(file.stat().st_size for file in files), ("text", *stamps(files), *tokenizer_key))
    return tokens_of((texts_of(file) for file in files), tokenizer, origin)


def tokens_of(documents: Iterable[Iterable[str]], tokenizer: Tokenizer, origin: Origin) -> npt.NDArray[Any]:
    """Return the tokens of documents joined by newlines; each part of a document is encoded separately."""

    def pieces() -> Iterator[tuple[int, Piece]]:
        newline = encode_array(tokenizer, "\n")
        for number, parts in enumerate(documents):
            if number:
                yield 1, {"tokens": newline}
            for text in parts:
                yield len(text), {"tokens": encode_array(tokenizer, text)}

    return columns(origin, {"tokens": token_dtype(tokenizer)}, pieces)["tokens"]
