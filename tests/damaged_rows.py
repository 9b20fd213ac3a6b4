"""Files of text, JSON lines, conversations and Parquet that are odd or damaged, drawn from a seed: what copies, crawls and editors do.

    for damage in READERS["jsonl"](folder, seed, count):        # also "chat", "parquet" and "text"
        verdict = judged(damage)                                 # "" where all is well, else what is wrong

Each damage writes its file into the folder, and knows the line or row that is harmed, and what the libraries themselves read of
it. A source of data reads exactly that, or refuses the file in one line that names the file and the row.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samestep.datasets import open_dataset, open_tokenizer
from samestep.errors import DataError
from samestep.job import Job

WORDS = ("the cat", "sat on", "naïve → 猫", "a\tb", "x" * 60, "Grüße\u2028", "0", '"quoted"', "\\n", "\U0001f600")
ODD: tuple[Any, ...] = (
    None, 3, -0.5, True, "", [], {}, [1], ["a", "b"], {"a": 1}, [[]], "\ud83d", "a\udc00b", "None", 10**30, float("nan"), b"".decode(),
)  # fmt: skip
"""Values that stand where others should."""


@dataclass(frozen=True)
class Damage:
    """A file, what is wrong with it, and what should be read of it."""

    source: str
    """The value of `data.source` that reads it."""
    path: Path
    row: int | None
    """The line, from 1, or the row of a table, from 0, that is harmed; None where the file as a whole is."""
    kind: str
    twin: str
    """The source of the same file unharmed, which is never refused."""
    texts: list[str] | None = None
    """Texts that other libraries read of it, where they do: then it must be read, and equal."""
    tokenizer: str = "bytes"
    text_field: str = "text"

    @property
    def job(self) -> Job:
        """A job that reads the file."""
        return job_of(self.source, self.tokenizer, self.text_field)


def job_of(source: str, tokenizer: str = "bytes", text_field: str = "text") -> Job:
    return Job(
        data={
            "source": source, "sequence_length": 1, "held_out": 0.0, "tokenizer": tokenizer, "text_field": text_field,
        }
    )  # fmt: skip


def judged(damage: Damage) -> str:
    """Read a damaged file; return what is wrong with what came of it, or "" where nothing is."""
    what = f"{damage.kind} at row {damage.row} of {damage.path}"
    try:
        dataset = open_dataset(damage.job)
    except DataError as error:
        text = str(error)
        if damage.texts is not None:
            return f"{what}: refused, though other libraries read it: {text}"
        if "\n" in text or len(text) > 1500:
            return f"{what}: not one line: {text}"
        if damage.path.name not in text:
            return f"{what}: the file is not named: {text}"
        return "" if _names_row(damage, text) else f"{what}: the row is not named: {text}"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {str(error)[:200]}"
    if damage.texts is None:
        return ""
    tokenizer = open_tokenizer(damage.job)
    ids = np.asarray(dataset.tokens[: len(dataset.tokens)])  # type: ignore[attr-defined]
    found, wanted = tokenizer.decode(ids.tolist()), "".join(damage.texts)
    return "" if found == wanted else f"{what}: read {found[:80]!r} for {wanted[:80]!r}"


def is_read(source: str, tokenizer: str = "bytes") -> bool:
    """Whether a file is read and not refused."""
    try:
        open_dataset(job_of(source, tokenizer))
    except DataError:
        return False
    return True


def _names_row(damage: Damage, text: str) -> bool:
    if damage.row is None:
        return True
    near = range(damage.row, damage.row + 2)  # what joins two lines may show in the second one
    words = (
        f"{damage.path.name}:",
        "row ",
        "row 0, or one soon after it, is damaged: In column 0: Invalid: Invalid UTF8 sequence at string index ",
    )
    return any(f"{begin}{row}" in text for begin in words for row in near)


# -- lines of JSON ---------------------------------------------------------------------------------

DEEP = b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


def jsonl(folder: Path, seed: int, count: int) -> Iterator[Damage]:
    """Yield damaged files of JSON lines with texts."""
    drawn = random.Random(seed)
    for number in range(count):
        texts = [drawn.choice(WORDS) for _ in range(drawn.randint(2, 9))]
        lines = [
            json.dumps({"id": i, "text": text}, ensure_ascii=drawn.random() < 0.5).encode()
            for i, text in enumerate(texts)
        ]
        twin = folder / f"twin-{number}.jsonl"
        twin.write_bytes(b"\n".join(lines) + b"\n")
        path = folder / f"damaged-{number}.jsonl"
        at = drawn.randrange(len(lines))
        kind, row, content, read = _of_lines(drawn, lines, texts, at)
        path.write_bytes(content)
        known = _json_texts(content) if read is None else read
        yield Damage(f"jsonl:{path}", path, row, kind, f"jsonl:{twin}", known)


LINE_KINDS = (
    "flip", "flip", "flip", "cut", "odd", "odd", "bytes", "surrogate", "deep", "long number", "nan", "missing", "extra", "two",
)  # fmt: skip
WHOLE_KINDS = (
    "mark", "returns", "blank", "gzip", "zstd", "array", "cut gzip", "flipped gzip", "no end",
)  # fmt: skip


def _of_lines(  # noqa: C901 - one case for each kind
    drawn: random.Random, lines: list[bytes], texts: list[str], at: int
) -> tuple[str, int | None, bytes, list[str] | None]:
    """Return the kind of a damage, its line, the damaged content, and what must be read where it is known."""
    whole = b"\n".join(lines) + b"\n"
    kind = drawn.choice(LINE_KINDS + WHOLE_KINDS)
    changed, read = list(lines), None
    match kind:
        case "flip":
            line = bytearray(lines[at])
            line[drawn.randrange(len(line))] ^= 1 << drawn.randrange(8)
            changed[at] = bytes(line)
        case "cut":
            changed[at] = lines[at][: drawn.randrange(1, len(lines[at]))]
        case "odd":
            changed[at] = json.dumps({"text": drawn.choice(ODD)}).encode()
        case "bytes":
            place = drawn.randrange(len(lines[at]))
            junk = drawn.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\xf5\x80\x80\x80"))
            changed[at] = lines[at][:place] + junk + lines[at][place:]
        case "surrogate":
            changed[at], read = b'{"text": "a\\ud83db"}', [*texts[:at], "a\ufffdb", *texts[at + 1 :]]
        case "deep":
            changed[at] = DEEP
        case "long number":
            changed[at] = b'{"text": "n", "id": ' + b"7" * 5000 + b"}"
        case "nan":
            changed[at], read = b'{"text": "n", "id": [NaN, -Infinity]}', [*texts[:at], "n", *texts[at + 1 :]]
        case "missing":
            changed[at] = drawn.choice(
                (b"{}", b"[]", b'"text"', b"null", b'{"texts": "a"}', b"{" + b'"k": 1, ' * 300 + b'"z": 2}')
            )
        case "extra":
            changed[at] += drawn.choice((b"}", b" x", b"]", b',"a"', b"\x0c"))
        case "two":
            changed[at] *= 2
        case "no end":
            return kind, None, whole[:-1], texts
        case _:
            return _whole(drawn, kind, lines, texts)
    return kind, at + 1, b"\n".join(changed) + b"\n", read


def _whole(
    drawn: random.Random, kind: str, lines: list[bytes], texts: list[str]
) -> tuple[str, int | None, bytes, list[str] | None]:
    """Return a content that is written in another way, and what must be read of it."""
    content = b"\n".join(lines) + b"\n"
    match kind:
        case "mark":
            return kind, None, b"\xef\xbb\xbf" + content, texts
        case "returns":
            return kind, None, content.replace(b"\n", b"\r\n"), texts
        case "blank":
            return kind, None, b"\n \n" + content.replace(b"\n", b"\n\n"), texts
        case "zstd":
            return kind, None, zstd(content), texts
        case "array":
            space = drawn.choice((b"", b" ", b"\n", b"\r\n\t"))
            return kind, None, b"[" + space + (b"," + space).join(lines) + space + b"]" + space, texts
    packed = bytearray(gzip.compress(content))
    if kind == "gzip":
        return kind, None, bytes(packed), texts
    if kind == "cut gzip":
        return kind, None, bytes(packed[: drawn.randrange(12, len(packed) - 1)]), None
    packed[drawn.randrange(12, len(packed))] ^= 1 << drawn.randrange(8)
    return kind, None, bytes(packed), None


def zstd(content: bytes) -> bytes:
    """Return a content in two frames of Zstandard."""
    import pyarrow as pa

    half = len(content) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


def _json_texts(content: bytes) -> list[str] | None:
    """Return the texts that `json` reads line by line; None where it reads something else, or nothing."""
    try:
        rows = [json.loads(line.decode("utf-8")) for line in content.split(b"\n") if line.strip(b" \t\r\n")]
        texts = [row["text"] for row in rows]
        "".join(texts).encode()
    except Exception:
        return None
    return texts


# -- conversations ---------------------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "4"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ],
    },
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    {"prompt": "q", "completion": "a"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]]},
)  # fmt: skip
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat(folder: Path, seed: int, count: int) -> Iterator[Damage]:
    """Yield files of JSON lines with conversations in which a value has another's place, for a tokenizer with a template and without."""
    drawn = random.Random(seed)
    tokenizers = ("bytes", template_folder(folder))
    for number in range(count):
        tokenizer = tokenizers[number % 2]
        rows = [
            copy.deepcopy(drawn.choice(ROWS if number % 2 else (ROWS[0], *ROWS[2:])))
            for _ in range(drawn.randint(1, 4))
        ]
        twin = folder / f"twin-chat-{number}.jsonl"
        twin.write_text("".join(json.dumps(row) + "\n" for row in rows))
        at = drawn.randrange(len(rows))
        kind = _exchange(drawn, rows[at])
        path = folder / f"damaged-chat-{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield Damage(f"jsonl:{path}", path, at + 1, kind, f"jsonl:{twin}", tokenizer=tokenizer)


def _exchange(drawn: random.Random, row: dict[str, Any]) -> str:
    """Put an odd value into the place of one in a row, or take one away; return what was done."""
    holder, key = drawn.choice(list(_places(row)))
    way = drawn.choice(("odd", "odd", "remove", "double", "deep"))
    match way:
        case "remove":
            del holder[key]
        case "double" if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case "deep":
            value: Any = "x"
            for _ in range(drawn.choice((3, 100, 400))):
                value = [value]
            holder[key] = value
        case _:
            holder[key] = copy.deepcopy(drawn.choice(ODD))
    return f"{way} {key}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where the values of nested objects and lists are: the holder, and the key or the number."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(one)


def template_folder(folder: Path) -> str:
    """Return the folder of a small tokenizer with a chat template that reads tool calls."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    place = folder / "tokenizer"
    place.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["</s>"])
    core.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return str(place)


# -- tables ----------------------------------------------------------------------------------------


def parquet(folder: Path, seed: int, count: int) -> Iterator[Damage]:
    """Yield Parquet files that are damaged, or hold texts in odd columns."""
    import pyarrow as pa
    from pyarrow import parquet as files

    drawn = random.Random(seed)
    for number in range(count):
        texts = [drawn.choice(WORDS) for _ in range(drawn.randint(3, 40))]
        twin, path = folder / f"twin-{number}.parquet", folder / f"damaged-{number}.parquet"
        packing = drawn.choice(("snappy", "gzip", "zstd", "none"))
        files.write_table(pa.table({"text": texts, "more": texts}), twin, row_group_size=7, compression=packing)
        content, at = bytearray(twin.read_bytes()), drawn.randrange(len(texts))
        kind = drawn.choice(("flip", "flip", "cut", "zeros", *COLUMN_KINDS))
        row, field = None, "text"
        if kind in COLUMN_KINDS:
            column, field, row = _column(kind, texts, at)
            files.write_table(pa.table(column), path, row_group_size=7, compression=packing)
        else:
            place = drawn.randrange(len(content))
            if kind == "flip":
                content[place] ^= 1 << drawn.randrange(8)
            elif kind == "cut":
                del content[place:]
            else:
                content[place : place + 50] = bytes(len(content[place : place + 50]))
            path.write_bytes(content)
        known = _parquet_texts(path, field) if kind not in ("list", "number") else None
        yield Damage(f"parquet:{path}", path, row, kind, f"parquet:{twin}", known, text_field=field)


COLUMN_KINDS = (
    "not utf-8", "unread not utf-8", "null", "binary", "binary not utf-8", "large", "dictionary", "nested", "list", "number", "lone",
)  # fmt: skip


def _column(kind: str, texts: list[str], at: int) -> tuple[dict[str, Any], str, int | None]:
    """Return the columns of a table, the field that is read, and the harmed row."""
    import pyarrow as pa

    encoded: list[bytes | None] = [text.encode() for text in texts]
    harmed = [b"a\xffb" if index == at else text for index, text in enumerate(encoded)]
    as_text = pa.Array.from_buffers(pa.string(), len(texts), pa.array(harmed, pa.binary()).buffers())
    match kind:
        case "not utf-8":
            return {"text": as_text}, "text", at
        case "unread not utf-8":
            return {"text": texts, "more": as_text}, "text", None
        case "null":
            return {"text": [None if index == at else text for index, text in enumerate(texts)]}, "text", at
        case "binary":
            return {"text": pa.array(encoded, pa.binary())}, "text", None
        case "binary not utf-8":
            return {"text": pa.array(harmed, pa.binary())}, "text", at
        case "large":
            return {"text": pa.array(texts, pa.large_string())}, "text", None
        case "dictionary":
            return {"text": pa.array(texts).dictionary_encode()}, "text", None
        case "nested":
            return {"doc": [{"text": text, "id": 1} for text in texts]}, "doc.text", None
        case "list":
            return {"text": [[text, text] for text in texts]}, "text", 0
        case "number":
            return {"text": list(range(len(texts)))}, "text", 0
    return {"texts": texts}, "text", 0


def _parquet_texts(path: Path, field: str) -> list[str] | None:
    """Return the texts that pyarrow reads; None where it reads something else, or nothing."""
    from pyarrow import parquet as files

    try:
        rows = files.read_table(path, columns=[field]).to_pylist()
        texts = [row["doc"]["text"] if field == "doc.text" else row["text"] for row in rows]
        return [text.decode() if isinstance(text, bytes) else text.encode().decode() for text in texts]
    except Exception:
        return None


# -- plain text ------------------------------------------------------------------------------------


TEXT_KINDS = (
    "flip", "bytes", "cut", "utf-16", "gzip", "zstd", "cut gzip", "returns", "zeros", "long", "mark", "pointer",
)  # fmt: skip


def text(folder: Path, seed: int, count: int) -> Iterator[Damage]:  # noqa: C901 - one case for each kind
    """Yield text files that are damaged, packed, or in another encoding."""
    drawn = random.Random(seed)
    for number in range(count):
        lines = [drawn.choice(WORDS) for _ in range(drawn.randint(2, 30))]
        content = "\n".join(lines).encode()
        twin, path = folder / f"twin-{number}.txt", folder / f"damaged-{number}.txt"
        twin.write_bytes(content)
        kind = drawn.choice(TEXT_KINDS)
        at = drawn.randrange(len(content))
        row, known = content[:at].count(b"\n") + 1, None
        match kind:
            case "flip":
                harmed = bytearray(content)
                harmed[at] ^= 1 << drawn.randrange(8)
                content = bytes(harmed)
            case "bytes":
                content = content[:at] + drawn.choice((b"\xff", b"\xc3(", b"\xed\xa0\x80")) + content[at:]
            case "cut":
                content = content[: max(2, at)]
            case "utf-16":
                content = content.decode().encode("utf-16")
            case "gzip":
                row, known, content = None, [content.decode()], gzip.compress(content)
            case "zstd":
                row, known, content = None, [content.decode()], zstd(content)
            case "cut gzip":
                row, content = None, gzip.compress(content)[:-9]
            case "returns":
                row, known, content = None, [content.decode()], content.replace(b"\n", drawn.choice((b"\r\n", b"\r")))
            case "zeros":
                content = content[:at] + bytes(5) + content[at:]
            case "mark":
                row, known, content = None, [content.decode()], b"\xef\xbb\xbf" + content
            case "pointer":
                row, content = None, b"version https://git-lfs.github.com/spec/v1\n"
            case "long":
                content = content + b"\n" + "é".encode() * 600_000
        path.write_bytes(content)
        if known is None and kind not in ("cut gzip", "pointer", "zeros"):
            try:
                known = [content.decode().replace("\r\n", "\n").replace("\r", "\n")]
            except UnicodeDecodeError as error:
                row = content[: error.start].count(b"\n") + 1
        yield Damage(f"text:{path}", path, row, kind, f"text:{twin}", known)


Reader = Callable[[Path, int, int], Iterator[Damage]]
READERS: dict[str, Reader] = {"jsonl": jsonl, "chat": chat, "parquet": parquet, "text": text}
"""A function for each reader: (folder, seed, count) -> damaged files, written into the folder one by one as they are asked for."""
