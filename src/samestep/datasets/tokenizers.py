"""Tokenizers, from text to token ids and back: `bytes`, or a folder that holds a tokenizer.

A folder's `tokenizer.json` is read with the `tokenizers` library; a folder without that file is read with transformers'
AutoTokenizer, which reads the older formats. Nothing is ever downloaded. The ids that begin and end a document are those
that `tokenizer_config.json` or `special_tokens_map.json` name as `bos_token` and `eos_token`; where no end is named, one of
the usual end tokens is taken from the vocabulary. `add_bos_token = false` is respected.
"""

from __future__ import annotations

import bisect
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from samestep.datasets.columns import stamps
from samestep.datasets.files import existing
from samestep.errors import DataError
from samestep.job import Job

Messages = Sequence[Mapping[str, str]]

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""The end tokens that are tried where a folder names none."""


class Tokenizer(Protocol):
    """A tokenizer: text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: one more than the largest token id."""
        ...

    @property
    def begin_id(self) -> int | None:
        """The token id that is put before each document; None if the tokenizer uses none."""
        ...

    @property
    def end_id(self) -> int | None:
        """The token id that the last token of a document predicts; None if there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text, without special tokens before or after it."""
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the token ids of the joined pieces; each token is listed under the piece that its last character is in."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; incomplete characters become replacement characters."""
        ...

    def render_chat(self, messages: Messages, reply_follows: bool) -> str | None:
        """Return a conversation as the tokenizer's own chat template writes it; None if it has no template.

        With `reply_follows` the text ends with the template's prompt for the assistant's reply.
        """
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The tokenizer `bytes`: one token for each byte of UTF-8; byte 0, which does not occur in text, ends a document."""

    vocab_size: int = 256
    begin_id: int | None = None
    end_id: int | None = 0

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text."""
        return list(text.encode())

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each piece."""
        return [self.encode(piece) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of UTF-8 bytes; incomplete characters become replacement characters."""
        return bytes(ids).decode(errors="replace")

    def render_chat(self, messages: Messages, reply_follows: bool) -> str | None:
        """Return None, since bytes have no chat template."""
        return None


@dataclass(frozen=True, eq=False)
class FileTokenizer:
    """A tokenizer read from a folder's `tokenizer.json`."""

    folder: Path
    core: Any
    """The `Tokenizer` of the library `tokenizers`."""
    begin_id: int | None
    end_id: int | None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; vocabularies may skip ids, so this can exceed the number of tokens."""
        return max(self.core.get_vocab().values(), default=-1) + 1

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
        """Return the text of token ids, with special tokens written out."""
        return str(self.core.decode(list(ids), skip_special_tokens=False))

    def render_chat(self, messages: Messages, reply_follows: bool) -> str | None:
        """Return the conversation as the folder's chat template writes it, rendered by transformers; None without one."""
        has_template = (self.folder / "chat_template.jinja").is_file() or "chat_template" in _settings(self.folder)
        return _render(self._auto, messages, reply_follows) if has_template else None

    @cached_property
    def _auto(self) -> Any:
        return _auto_tokenizer(self.folder)


@dataclass(frozen=True, eq=False)
class TransformersTokenizer:
    """A tokenizer read by transformers, from a folder without a `tokenizer.json`."""

    auto: Any
    """The object that `AutoTokenizer.from_pretrained` returned."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: one more than the largest token id."""
        return max(self.auto.get_vocab().values(), default=-1) + 1

    @property
    def begin_id(self) -> int | None:
        """The token id of `bos_token`; None where the tokenizer sets `add_bos_token = false`."""
        return self.auto.bos_token_id if getattr(self.auto, "add_bos_token", None) is not False else None

    @property
    def end_id(self) -> int | None:
        """The token id of `eos_token`."""
        return self.auto.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text, without special tokens."""
        return list(self.auto.encode(text, add_special_tokens=False))

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each piece, encoded on its own: these tokenizers give no offsets."""
        return [self.encode(piece) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens written out."""
        return str(self.auto.decode(list(ids), skip_special_tokens=False))

    def render_chat(self, messages: Messages, reply_follows: bool) -> str | None:
        """Return the conversation as the tokenizer's chat template writes it; None without one."""
        return _render(self.auto, messages, reply_follows) if self.auto.chat_template else None


def open_tokenizer(job: Job) -> Tokenizer:
    """Return the tokenizer that `job.data.tokenizer` names: `bytes`, or a folder.

    Raises:
        DataError: there is no such folder, it holds no tokenizer, or a library to read it is missing.
    """
    name = job.data.tokenizer
    if name == "bytes":
        return ByteTokenizer()
    folder = existing(name, f"tokenizer {name!r} is neither 'bytes' nor a folder")
    if not folder.is_dir():
        raise DataError(f"tokenizer {name!r} is a file; give the folder it is in: {folder.parent}")
    file = folder / "tokenizer.json"
    if not file.is_file():
        return TransformersTokenizer(_auto_tokenizer(folder))
    try:
        from tokenizers import Tokenizer as Core  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise DataError(f"tokenizer {name!r} needs the library tokenizers: pip install 'samestep[hf]'") from None
    try:
        core = Core.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{file} is not a tokenizer: {error}") from None
    core.no_truncation()  # a saved maximum length would cut documents short, padding would add tokens
    core.no_padding()
    settings = _settings(folder)
    begin = _special_id(core, settings.get("bos_token")) if settings.get("add_bos_token") is not False else None
    ends = (_special_id(core, end) for end in (settings.get("eos_token"), *USUAL_ENDS))
    return FileTokenizer(folder, core, begin, next((end for end in ends if end is not None), None))


def tokenizer_key(job: Job) -> tuple[str, ...]:
    """Return what names the tokenizer of a job: its files as they are now, and the library that reads them."""
    if job.data.tokenizer == "bytes":
        return ("bytes",)
    folder = Path(job.data.tokenizer).expanduser()
    versions = [f"{name} {metadata.version(name)}" for name in ("tokenizers", "transformers") if _is_installed(name)]
    return (*versions, *stamps(sorted(file for file in folder.iterdir() if file.is_file())))


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


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
            except (ValueError, TypeError) as error:
                raise DataError(f"{path} is not a JSON object: {error}") from None
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
        raise DataError(f"{folder} needs the library transformers: pip install 'samestep[hf]'") from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a broken folder raises differs by family
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{folder} holds no tokenizer that transformers can read ({said}); a folder with a tokenizer.json works"
        ) from None


def _render(auto: Any, messages: Messages, reply_follows: bool) -> str:
    try:
        rendered = auto.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply_follows)
    except Exception as error:  # a template raises whatever its author wrote
        raise DataError(f"the tokenizer's chat template refuses the messages: {error}") from None
    return str(rendered)
