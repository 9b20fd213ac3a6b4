"""Tokenizers, from text to token ids and back: `bytes`, or a folder that holds a tokenizer.

A folder's `tokenizer.json` is read with the `tokenizers` library; a folder without that file is read with transformers'
AutoTokenizer, which reads the older formats. Nothing is ever downloaded. A document begins with the ids that the tokenizer
itself puts before a text, which the post-processor in `tokenizer.json` says; as in transformers (from version 5), `bos_token` and
`add_bos_token` of `tokenizer_config.json` add none. A document ends with the id that `tokenizer_config.json` or `special_tokens_map.json`
name as `eos_token`; where none is named, one of the usual end tokens is taken from the vocabulary.

A chat template comes with a folder too, and is a program. Jinja's sandbox keeps it from files and functions, and not from
loops that never end or texts that fill the memory. So before a template writes for this process, it writes two messages in a
forked child, which the system ends where it takes too long or too much; and whatever it writes later has a largest length.
"""

from __future__ import annotations

import bisect
import copy
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from samestep.datasets.columns import stamps
from samestep.datasets.files import existing
from samestep.errors import DataError, first_line
from samestep.job import Job
from samestep.job_files import place_of

Messages = Sequence[Mapping[str, Any]]

_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""The end tokens that are tried where a folder names none."""
_PROBES = ("a", "0", "the", " ")
"""Texts by which a tokenizer shows the ids that it puts before each; a small vocabulary has tokens for few."""
MOST_SECONDS = 20.0
MOST_BYTES = 1 << 30
"""Memory that a template may take for a short conversation, beyond what the process has."""
_MOST_CHARACTERS = 1 << 26
"""Characters that a template may write for any conversation."""
_SHORT: tuple[dict[str, Any], ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@dataclass(frozen=True, eq=False)
class Tokenizer(ABC):
    """A tokenizer: text to token ids and back."""

    vocab_size: int
    """One more than the largest token id; vocabularies may skip ids, so this can exceed the number of tokens."""
    begin_ids: tuple[int, ...]
    """The token ids that the tokenizer puts before each text; mostly one or none."""
    end_id: int | None
    """The token id that the last token of a document predicts; None if there is none."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text, without special tokens before or after it."""

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each piece, encoded separately where the tokenizer gives no offsets."""
        return [self.encode(piece) for piece in pieces]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens written out; incomplete characters become replacement characters."""

    @cached_property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return False

    @cached_property
    def auto(self) -> Any:
        """The tokenizer as transformers reads it, which writes its chat template."""
        raise NotImplementedError

    def render_chat(
        self, messages: Messages, reply_follows: bool, *, settings: Mapping[str, Any] = _NO_SETTINGS
    ) -> str:
        """Return a conversation as the tokenizer's chat template writes it, given tools and other variables in
        `settings`.

        With `reply_follows` the text ends with the template's prompt for the assistant's reply.

        Raises:
            DataError: the template refuses the messages.
        """
        try_template(self.auto)
        copies = copy.deepcopy([dict(message) for message in messages])  # a template may change its arguments
        words = {**settings, "tokenize": False, "add_generation_prompt": reply_follows}
        try:
            rendered = str(self.auto.apply_chat_template(copies, **words))
        except Exception as error:  # a template raises whatever its author wrote
            text = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                "chat-template", f"the tokenizer's chat template rejects the messages: {text[:300]}"
            ) from None
        if len(rendered) > _MOST_CHARACTERS:
            raise DataError(
                "chat-template",
                f"the tokenizer's chat template writes {len(rendered):,} characters. Use at most {_MOST_CHARACTERS:,}",
            )
        return rendered


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """The tokenizer `bytes`: one token for each byte of UTF-8; byte 0, which does not occur in text, ends a document."""

    vocab_size: int = 256
    begin_ids: tuple[int, ...] = ()
    end_id: int | None = 0

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of UTF-8 bytes."""
        return bytes(ids).decode(errors="replace")


@dataclass(frozen=True, eq=False)
class FileTokenizer(Tokenizer):
    """A tokenizer read from a folder's `tokenizer.json`."""

    folder: Path
    core: Any
    """The `Tokenizer` of the library `tokenizers`."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text, without those that a post-processor would add."""
        return list(self.core.encode(text, add_special_tokens=False).ids)

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Encode the joined text once, as a model reads it, and assign its tokens to the pieces by their offsets."""
        # By the last character, because in many vocabularies a token begins with the blank before its word.
        encoding = self.core.encode("".join(pieces), add_special_tokens=False)
        ends = list(itertools.accumulate(len(piece) for piece in pieces))
        ids: list[list[int]] = [[] for _ in pieces]
        for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
            ids[min(bisect.bisect_left(ends, end), len(pieces) - 1)].append(token)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.core.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def has_template(self) -> bool:
        """Whether the folder has a chat template."""
        return (self.folder / "chat_template.jinja").is_file() or bool(_settings(self.folder).get("chat_template"))

    @cached_property
    def auto(self) -> Any:
        """The tokenizer as transformers reads it from the folder."""
        return _auto_tokenizer(self.folder)


@dataclass(frozen=True, eq=False)
class TransformersTokenizer(Tokenizer):
    """A tokenizer read by transformers, from a folder without a `tokenizer.json`."""

    auto: Any

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text, without special tokens."""
        return list(self.auto.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.auto.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def has_template(self) -> bool:
        """Whether the folder has a chat template."""
        return bool(self.auto.chat_template)


def open_tokenizer(job: Job) -> Tokenizer:
    """Return the tokenizer that `job.data.tokenizer` names: `bytes`, or a folder.

    Raises:
        DataError: there is no such folder, it holds no tokenizer, or a library to read it is missing.
    """
    name = job.data.tokenizer
    if name == "bytes":
        return ByteTokenizer()
    folder = existing(str(place_of(job, name)), f"tokenizer {name!r} is neither 'bytes' nor a folder")
    if not folder.is_dir():
        raise DataError("data-missing", f"tokenizer {name!r} is a file; give the folder it is in: {folder.parent}")
    file = folder / "tokenizer.json"
    if not file.is_file():
        auto = _auto_tokenizer(folder)
        begin = _ids_before(lambda text, special: list(auto.encode(text, add_special_tokens=special)))
        return TransformersTokenizer(_size_of(auto), begin, auto.eos_token_id, auto)
    try:
        from tokenizers import Tokenizer as Core  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise DataError(
            "package-missing", f"tokenizer {name!r} needs the library tokenizers: pip install 'samestep[hf]'"
        ) from None
    try:
        core = Core.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and of a panic no Exception at all
        raise DataError("tokenizer-unreadable", f"{file} is not a tokenizer: {first_line(error)}") from None
    core.no_truncation()  # a saved maximum length would cut documents short, padding would add tokens
    core.no_padding()
    begin = _ids_before(lambda text, special: list(core.encode(text, add_special_tokens=special).ids))
    settings = _settings(folder)
    ends = (_special_id(core, end) for end in (settings.get("eos_token"), *USUAL_ENDS))
    return FileTokenizer(_size_of(core), begin, next((end for end in ends if end is not None), None), folder, core)


def _size_of(read: Any) -> int:
    return max(read.get_vocab().values(), default=-1) + 1


def _ids_before(encode: Callable[[str, bool], list[int]]) -> tuple[int, ...]:
    """Return the ids that are put before a text; `encode` returns those of a text, with the special ones or without."""
    for text in _PROBES:
        plain, special = encode(text, False), encode(text, True)
        starts = range(len(special) - len(plain) + 1) if plain else ()
        start = next((at for at in starts if special[at : at + len(plain)] == plain), None)
        if start is not None:
            return tuple(special[:start])
    return ()


def tokenizer_key(job: Job) -> tuple[str, ...]:
    """Return the key of a job's tokenizer: its files as they are now, and the versions of the library that reads
    them."""
    if job.data.tokenizer == "bytes":
        return ("bytes",)
    folder = place_of(job, job.data.tokenizer)
    versions = [
        f"{name} {metadata.version(name)}"
        for name in ("tokenizers", "transformers")
        if importlib.util.find_spec(name) is not None
    ]
    return (*versions, *stamps(sorted(file for file in folder.iterdir() if file.is_file())))


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that holds the vocabulary."""
    return np.min_scalar_type(max(0, tokenizer.vocab_size - 1))


def encode_array(tokenizer: Tokenizer, text: str) -> npt.NDArray[Any]:
    """Return the token ids of a text as an array of the smallest unsigned dtype that holds the vocabulary."""
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode(), dtype=np.uint8)  # a list of the bytes would take 8 times the memory
    return np.array(tokenizer.encode(text), dtype=token_dtype(tokenizer))


def _settings(folder: Path) -> dict[str, Any]:
    """Return the special tokens of the folder's two small files; `tokenizer_config.json` takes precedence."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                settings.update(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError, RecursionError) as error:
                raise DataError("tokenizer-unreadable", f"{path} is not a JSON object: {error}") from None
    return settings


def _special_id(core: Any, token: Any) -> int | None:
    """Return the id of a special token, given by its text or by an object that holds it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return core.token_to_id(text) if isinstance(text, str) else None


def _auto_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that transformers reads from the folder."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise DataError(
            "package-missing", f"{folder} needs the library transformers: pip install 'samestep[hf]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken folder raises errors that differ by family
        raise DataError(
            "tokenizer-unreadable",
            f"{folder} holds no tokenizer that transformers can read ({first_line(error)}). Use "
            "a folder with a tokenizer.json",
        ) from None


@functools.lru_cache(maxsize=8)
def try_template(auto: Any) -> None:
    """Let a tokenizer's template write a short conversation in a child process, once.

    Raises:
        DataError: it takes too long or too much memory; a template that refuses the messages passes.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    child = multiprocessing.get_context("fork").Process(target=_write_short, args=(auto,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads at a fork; the child calls none of them
        child.start()
    child.join(MOST_SECONDS)
    if is_late := child.is_alive():
        child.kill()
        child.join()
    if is_late or child.exitcode:
        what = f"does not end within {MOST_SECONDS:.0f} s" if is_late else f"takes over {MOST_BYTES >> 30} GiB"
        raise DataError(
            "chat-template",
            f"the tokenizer's chat template {what} for two short messages. Use a folder without the template",
        )


def _write_short(auto: Any) -> None:
    """End this process, a child, with status 0 if a text is written or refused within the memory, else with 1."""
    import resource  # noqa: PLC0415 - a module that Windows lacks, where nothing forks

    size = Path("/proc/self/statm")
    if size.exists():
        most = int(size.read_text().split()[0]) * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        os._exit(int(len(str(auto.apply_chat_template([*_SHORT], tokenize=False))) > _MOST_CHARACTERS))
    except MemoryError:
        os._exit(1)
    except Exception:
        os._exit(0)
