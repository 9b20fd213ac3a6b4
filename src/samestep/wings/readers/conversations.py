"""The document of a row: a text, a prompt with its completion, or a conversation; several layouts of rows are read.

    {"text": "..."}                                                     `data.text_field` names the key, `doc.text` one within another
    {"messages": [{"role": "user", "content": "..."}, ...]}             keys that a chat template reads stay as they are
    {"conversations": [{"from": "human", "value": "..."}, ...]}         ShareGPT: `from` becomes a role, by `ROLES`; in `messages` too
    {"prompt": ..., "completion": ...}                                  two texts, or two lists of messages, as TRL reads them
    {"instruction": "...", "input": "...", "output": "..."}             Alpaca: a user's message and a reply

Of a prompt nothing counts in the loss, of a completion and of a conversation what the assistant says, without messages of `weight` 0 or
`train` false. `tools`, `documents` and `chat_template_kwargs` of a row are given to the chat template. `system` is the system's message of
a conversation that has none, and `history` a list of pairs of earlier messages and replies of the last layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.errors import DataError, did_you_mean, short_repr

Message = Mapping[str, Any]

ROLES = {
    "system": "system", "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "bot": "assistant", "chatbot": "assistant",
    "ai": "assistant", "function_call": "assistant", "tool_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
    "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""The roles of ShareGPT's `from`."""
_CALLS = ("function_call", "tool_call")
_TEMPLATE_KEYS = ("tools", "documents", "chat_template_kwargs")
_CHAT_KEYS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "history",
    *_TEMPLATE_KEYS,
)  # fmt: skip
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_SAYS = ("tool_calls", "function_call", *_THOUGHTS)
"""Keys of a message that say something more than its content."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A text that counts in the loss, after one that does not."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, of which replies count in the loss from one message on."""

    messages: Sequence[Message]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Tools, documents and further variables that the chat template is given."""
    first_counted: int = 0
    """The number of the first message that may count."""

    @property
    def replies(self) -> tuple[int, ...]:
        """The numbers of the assistant's messages that count."""
        numbers = range(self.first_counted, len(self.messages))
        return tuple(number for number in numbers if _counts(self.messages[number]))

    @property
    def said(self) -> set[str]:
        """The names of the parts that a chat template may leave out: settings, keys of messages, and roles."""
        keys = {f"{key!r}" for message in self.messages for key in message if key in _THOUGHTS and message[key]}
        settings = (f"{key!r}" for key in ("tools", "documents") if key in self.settings)
        return {*settings, *keys, *map(role_named, self.messages)}


def role_named(message: Message) -> str:
    """Return the name of all messages of a role, for a remark."""
    return f"messages of the role {message['role']!r}"


def _counts(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0 and message.get("train") is not False


Document = str | Completion | Conversation


def wanted_columns(names: Iterable[str], text_field: str) -> list[str]:
    """Return the columns of a table from which documents are read; none where it holds no documents."""
    names = list(names)
    top = text_field if text_field in names else text_field.partition(".")[0]
    keys = ("messages", "conversations", "system", *_TEMPLATE_KEYS) if top in names else _CHAT_KEYS
    columns = [name for name in keys if name in names and name != top]
    return [text_field, *columns] if top in names else columns


def document_of(row: Any, text_field: str, *, may_lack_nulls: bool = False) -> Document:
    """Return the document of a row; with `may_lack_nulls` a key without a value counts as absent.

    Raises:
        DataError: the row holds no document, or a badly formed one.
    """
    if not isinstance(row, Mapping):
        raise DataError(
            "conversation-form", f'a line must be an object such as {{"{text_field}": "..."}}, not {type(row).__name__}'
        )
    text = value_at(row, text_field)
    values = {key: value for key, value in row.items() if value is not None}
    is_chat = isinstance(text, list) and text != [] and isinstance(text[0], Mapping)
    if text is not None and not is_chat and not (text == "" and ("messages" in values or "conversations" in values)):
        return _text(text, text_field)
    if is_chat:
        values = {**values, "messages": text}
    if may_lack_nulls:
        values = {key: _without_nulls(value) for key, value in values.items()}
    if (name := next((key for key in ("messages", "conversations") if key in values), None)) is not None:
        turns = [_turn(number, turn) for number, turn in enumerate(_parse_messages(values[name], name))]
        return _conversation(values, _with_system(values, turns))
    if "prompt" in values and "completion" in values:
        return _document_of_prompt(values)
    if "instruction" in values and "output" in values:
        return _conversation(values, _alpaca(values))
    if text_field in row:
        raise DataError(
            "conversation-form",
            f"{text_field!r} is null, and the row has no conversation. Use a text, or a file without the row",
        )
    raise no_document(row, text_field)


def no_document(names: Iterable[str], text_field: str, where: str = "") -> DataError:
    """Return the error for a row whose keys hold no document, with the keys that would."""
    names = list(names)
    keys = ", ".join(short_repr(name) for name in names[:8]) + ", ..." * (len(names) > 8)
    return DataError(
        "text-field-missing",
        f"{where}neither {text_field!r} nor 'messages'{did_you_mean(text_field, names[:100])}; it has {keys or 'no keys'}; data.text_field "
        "names the text's key, and 'conversations', 'prompt' with 'completion', and 'instruction' with 'output' are read too",
    )


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return a row's value under a key, or under nested keys that dots separate; None where there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _text(value: Any, name: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise DataError("data-damaged", f"{name!r} is not UTF-8 text (byte {error.start})") from None
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        raise DataError(
            "conversation-form",
            f"{name!r} is a list of {len(value)} texts, not one text. Use a row for each of them, or one text that joins them",
        )
    raise DataError("conversation-form", f"{name!r} is {type(value).__name__}, not text")


def _conversation(row: Mapping[str, Any], messages: Sequence[Any], first_counted: int = 0) -> Conversation:
    settings: dict[str, Any] = {}
    for key in _TEMPLATE_KEYS:
        value = _parse_json(row[key], key) if key in row else None
        if not value:
            continue
        if key == "chat_template_kwargs" and isinstance(value, Mapping):
            settings |= value
        elif key != "chat_template_kwargs" and isinstance(value, list):
            settings[key] = value
        else:
            raise DataError(
                "conversation-form",
                f"{key!r} is {type(value).__name__}. Use a list of objects, or of chat_template_kwargs an object",
            )
    conversation = Conversation(
        [_message(number, message) for number, message in enumerate(messages)], settings, first_counted
    )
    if not conversation.replies:
        which = " of the completion" if first_counted else ""
        counted = " and counts" if any(message["role"] == "assistant" for message in conversation.messages) else ""
        raise DataError(
            "conversation-form",
            f'no message{which} has the role "assistant"{counted}, so nothing would be learned; add a reply, or leave the conversation out',
        )
    return conversation


def _message(number: int, turn_value: Any) -> Message:
    """Return a message with all its keys that have a value, and its content, which may be null where it has tool calls."""
    right = 'Use a list of {"role": "user", "content": "text"}'
    if not isinstance(turn_value, Mapping) or not isinstance(turn_value.get("role"), str):
        raise DataError("conversation-form", f"message {number} has no role and content that are text. {right}")
    role, content = turn_value["role"], turn_value.get("content")
    message = {key: value for key, value in turn_value.items() if value is not None}
    if role == "assistant" and message.get("weight", 1) not in (0, 1):
        raise DataError(
            "conversation-form",
            f"message {number} has the weight {short_repr(message['weight'])}. Use 0, which does not count, or 1",
        )
    if isinstance(content, str):
        return message
    if content is None:
        if role == "tool" or any(message.get(key) for key in _SAYS):
            return {**message, "content": None}
        raise DataError(
            "conversation-form",
            f"message {number} has no role and content that are text. {right}, or tool_calls without content",
        )
    if not isinstance(content, list):
        raise DataError(
            "conversation-form", f"the content of message {number} is {type(content).__name__}, not text. {right}"
        )
    return {**message, "content": [_part(number, part) for part in content]}


def _part(number: int, part: Any) -> Message:
    """Return a part of a message's content as an object with its text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(
        "conversation-form",
        f'the content of message {number} has a part of type {short_repr(kind)}. Use {{"type": "text", "text": "..."}}',
    )


def _turn(number: int, turn: Any) -> Any:
    """Return a turn as a message: one of ShareGPT, or one whose role has another name."""
    if not isinstance(turn, Mapping):
        return turn
    if "from" not in turn:
        named = turn["role"].lower() if isinstance(turn.get("role"), str) else ""
        role = ROLES.get(named, "tool")
        # Roles of tools have names that templates know.
        return turn if role == "tool" or named in _CALLS else {**_with_content(turn), "role": role}
    word = turn["from"].lower() if isinstance(turn["from"], str) else ""
    if word not in ROLES:
        raise DataError(
            "conversation-form", f"turn {number} is from {short_repr(turn['from'])}. Use {', '.join(ROLES)}"
        )
    message = {**_with_content(turn), "role": ROLES[word]}
    del message["from"]
    if word not in _CALLS:
        return message
    called = _parse_json(message["content"], f"the {word} of turn {number}")
    calls = called if isinstance(called, list) else [called]
    return {**message, "content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _with_content(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn whose content has that name; ShareGPT's is `value`."""
    others = {key: value for key, value in turn.items() if key not in ("content", "value")}
    contents = [turn[key] for key in ("content", "value") if turn.get(key) is not None]
    if len(contents) == 2:  # both are kept: which of them is meant is not known
        return dict(turn)
    return {**others, "content": contents[0] if contents else None}


def _document_of_prompt(row: Mapping[str, Any]) -> Document:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, answered = ([_turn(number, turn) for number, turn in enumerate(part)] for part in (prompt, completion))
        messages = _with_system(row, asked)
        return _conversation(row, [*messages, *answered], len(messages))
    raise DataError(
        "conversation-form",
        f"'prompt' is {type(prompt).__name__} and 'completion' {type(completion).__name__}. Use two texts, or two lists of messages",
    )


def _alpaca(row: Mapping[str, Any]) -> list[Any]:
    """Return a row of Alpaca as messages: an instruction and its input are one message, on separate lines."""
    pairs = [*_parse_messages(row.get("history", []), "history"), None]
    messages: list[Any] = []
    for number, pair in enumerate(pairs[:-1]):
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError("conversation-form", f"pair {number} of 'history' must list a message and its reply")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = [_text(row[key], key) for key in ("instruction", "input") if row.get(key)]
    messages += [
        {"role": "user", "content": "\n".join(asked)},
        {"role": "assistant", "content": _text(row["output"], "output")},
    ]
    return _with_system(row, messages)


def _with_system(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """Return the messages with the row's system message before them, if it has one.

    Raises:
        DataError: the messages begin with another system message.
    """
    if not row.get("system"):
        return messages
    content = _text(row["system"], "system")
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": content}, *messages]
    if first.get("content") == content:
        return messages
    raise DataError(
        "conversation-form", "the row has a 'system', and its messages begin with another one. Use one of them"
    )


def _parse_messages(value: Any, name: str) -> list[Any]:
    messages = _parse_json(value, name)
    if (
        isinstance(messages, Mapping)
        and len({len(values) if isinstance(values, list) else -1 for values in messages.values()} - {-1}) == 1
    ):
        # Some tables have a list for each key in place of an object for each message.
        lists = {key: values for key, values in messages.items() if isinstance(values, list)}
        messages = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    if isinstance(messages, list) and (messages or name == "history"):
        return messages
    raise DataError(
        "conversation-form", f'{name} must be a list of messages. Use [{{"role": "user", "content": "text"}}, ...]'
    )


def _parse_json(value: Any, name: str) -> Any:
    """Return a value, decoded if it is a JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise DataError("data-damaged", f"{name!r} is a text that is not JSON") from None


def _without_nulls(value: Any) -> Any:
    """Return a table's value without the keys that have none: there, all objects of a column have the same keys."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
