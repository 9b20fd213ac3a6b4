"""The split of the data into the part that is trained on and the part at its end that is held out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from samestep.errors import DataError, did_you_mean

Split = Literal["train", "held_out"]
TRAINED_WORDS = {"train", "training"}
HELD_OUT_WORDS = {"val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation", "heldout", "holdout"}
"""Words in the names of files and folders that, by convention, hold a part of a data set."""
_PART_OF_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
SPLITS: tuple[Split, ...] = ("train", "held_out")


def part_of(length: int, held_out: float, split: Split) -> range:
    """Return the positions of one part among `length` tokens, documents or samples; the two parts never overlap.

    Raises:
        DataError: there is no such part, or nothing is held out.
    """
    if split not in SPLITS:
        raise DataError(f"no split {split!r}{did_you_mean(split, SPLITS)}; the splits are {' and '.join(SPLITS)}")
    cut = length - round(length * held_out)
    if split == "train":
        return range(cut)
    if not held_out:
        raise DataError("data.held_out = 0 holds nothing out, so there is nothing to evaluate; 0.1 works")
    return range(cut, length)


def words_of(path: Path) -> set[str]:
    """Return the words in the names of a path: those that humps, digits and signs divide."""
    return {word.lower() for word in _PART_OF_WORD.findall(path.with_suffix("").as_posix())}


def name_of_part(split: Split, source: str) -> str:
    """Return the name of a part of the data for the text of an error."""
    return f"the {split.replace('_', '-')} part of {source}"
