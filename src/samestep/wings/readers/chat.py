"""Conversations as tokens, of which only the assistant's are counted in the loss.

A tokenizer with a chat template writes the conversation in its format, and is given all keys of each message. A reply
is found by writing the conversation twice, up to the template's prompt for the reply and with the reply: the added text
counts, up to the end of the reply's turn; white space after the token that ends a turn does not.

    data.turns   all    one document with all replies, where the template writes earlier turns the same when later ones follow
                 each   one document for each reply, written up to it, of which that reply counts
                 last   one document, written up to the last reply, which alone counts

Without a template the format is

    <|user|>
    What is 2 + 2?
    <|assistant|>
    4{end}              {end} is the tokenizer's end of a document, or a newline if it has none
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from samestep.datasets.tokenizers import Tokenizer
from samestep.errors import DataError
from samestep.job_tables import Turns
from samestep.wings.readers.conversations import Conversation, Message, role_named

_HEAD = "<|{}|>\n"
_PROBES = ("0", "1")
"""The contents of two replies that share no character: text that stands in both results is the template's."""

Counted = list[tuple[list[int], bool]]
"""Consecutive runs of token ids, each with whether its tokens are counted in the loss."""


Render = Callable[[Sequence[Message], bool], str]
"""Writes messages, and where asked to the prompt for a reply after them; raises a `DataError` where the template refuses them."""


def chat_documents(conversation: Conversation, tokenizer: Tokenizer, turns: Turns) -> list[Counted]:
    """Return the documents that a conversation becomes, each as runs of tokens that are counted or not.

    Raises:
        DataError: the template refuses the messages or does not write what they say, or it rewrites earlier turns.
    """
    messages, replies = conversation.messages, conversation.replies
    chosen = {"all": [(len(messages), replies)], "last": [(replies[-1] + 1, replies[-1:])]}.get(turns)
    parts = chosen or [(number + 1, (number,)) for number in replies]
    if not tokenizer.has_template:
        return [_plain(conversation, end, counted, tokenizer) for end, counted in parts]
    conversation_turns = _readable(conversation, tokenizer)
    render = functools.partial(tokenizer.render_chat, settings=conversation.settings)
    return [_encode(_pieces(conversation_turns[:end], counted, render, tokenizer), tokenizer) for end, counted in parts]


def unwritten(conversation: Conversation, tokenizer: Tokenizer, names: AbstractSet[str]) -> list[str]:
    """Return which of some names of `Conversation.said` make no difference to the text that the chat template writes.

    Raises:
        DataError: the template does not write the replies.
    """
    if not tokenizer.has_template or not names:
        return []
    messages, settings = _readable(conversation, tokenizer), conversation.settings

    def text(others: Sequence[Message], end: int, words: Mapping[str, Any]) -> object:
        try:
            return tokenizer.render_chat(others[:end], False, settings=words)
        except DataError:  # the template needs the part that is left out
            return object()

    whole, written = len(messages), text(messages, len(messages), settings)
    lost = {
        f"{key!r}"
        for key in settings
        if f"{key!r}" in names and text(messages, whole, _without(settings, key)) == written
    }
    for number, message in enumerate(messages):
        changed: dict[str, Message] = {f"{key!r}": _without(message, key) for key in message}
        if message["content"]:
            changed[role_named(message)] = {
                **message,
                "content": "0z0" if isinstance(message["content"], str) else [{"type": "text", "text": "0z0"}],
            }
        for name in names & changed.keys():
            others = [*messages[:number], changed[name], *messages[number + 1 :]]
            # Some templates leave out the thoughts of earlier turns: only the last turn shows which parts are written.
            if all(text(messages, end, settings) == text(others, end, settings) for end in (number + 1, whole)):
                lost.add(name)
    if role_named({"role": "assistant"}) in lost:
        raise DataError(
            "chat-template",
            "the tokenizer's chat template does not write the replies of the assistant. Use a template that does, or a folder without the template",
        )
    return sorted(lost)


def _without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def opening(message: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a user's message up to where the assistant's reply begins, in the format of `chat_documents`."""
    asked = Conversation([{"role": "user", "content": message}])
    if tokenizer.has_template:
        return tokenizer.encode(tokenizer.render_chat(_readable(asked, tokenizer), True))
    runs = _plain(asked, 1, (), tokenizer)
    return [*(token for run, _ in runs for token in run), *tokenizer.encode(_HEAD.format("assistant"))]


def _plain(conversation: Conversation, end: int, counted: Sequence[int], tokenizer: Tokenizer) -> Counted:
    """Return the runs of the first messages in the format that the head of this file shows."""
    if unsaid := [key for key in ("tools", "documents") if key in conversation.settings]:
        raise DataError("chat-template", f"{unsaid[0]!r} is written by a chat template alone. Use a tokenizer with one")
    newline = tokenizer.encode("\n")
    closing = newline if tokenizer.end_id is None else [tokenizer.end_id]
    runs: Counted = [(list(tokenizer.begin_ids), False)]
    for number, message in enumerate(conversation.messages[:end]):
        if unsaid := [key for key in ("tool_calls", "function_call", "reasoning_content") if message.get(key)]:
            raise DataError(
                "chat-template",
                f"{unsaid[0]!r} of message {number} is written by a chat template alone. Use a tokenizer with one",
            )
        is_reply = message["role"] == "assistant"
        runs.append((tokenizer.encode(_HEAD.format(message["role"])), False))
        text = tokenizer.encode(_join_parts(message["content"]) or "")
        runs.append((text + (closing if is_reply else newline), number in counted))
    return runs


def _encode(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> Counted:
    runs = tokenizer.encode_pieces([text for text, _ in pieces])
    return [(run, counted) for run, (_, counted) in zip(runs, pieces, strict=True)]


# -- the messages as a template reads them ---------------------------------------------------------


def _readable(conversation: Conversation, tokenizer: Tokenizer) -> list[Message]:
    """Return the messages with contents of the form that the template reads: texts, or lists of parts.

    Raises:
        DataError: the template does not write the tool calls of a reply.
    """
    messages: list[Message] = [
        {**message, "content": _in_form(message["content"], tokenizer)} for message in conversation.messages
    ]
    render = functools.partial(tokenizer.render_chat, settings=conversation.settings)
    messages = _with_objects(messages, render)
    if any(message["content"] is None for message in messages):
        messages = _without_none(messages, render)
    for number in conversation.replies:
        _check_calls(messages, number, render)
    return messages


def _with_objects(messages: list[Message], render: Render) -> list[Message]:
    """Return messages whose calls have objects as arguments in place of JSON texts, which most templates would
    quote."""

    def opened(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        text = function.get("arguments")
        try:
            arguments = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            return call
        return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call

    messages_: list[Message] = [
        {**message, "tool_calls": [opened(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    if messages_ == messages:
        return messages
    try:
        render(messages_, False)
    except DataError:  # the template asks for a text
        return messages
    return messages_


def _in_form(content: Any, tokenizer: Tokenizer) -> Any:
    """Return a content as a text or as a list of parts, whichever the template writes."""
    reads_texts, reads_parts = _forms(tokenizer)
    if isinstance(content, str) and not reads_texts:
        return [{"type": "text", "text": content}]
    return content if reads_parts else _join_parts(content)


@functools.lru_cache(maxsize=8)
def _forms(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Return whether the tokenizer's template writes contents that are texts, and contents that are lists of parts."""
    forms = []
    for content in ("0z0", [{"type": "text", "text": "0z0"}]):
        try:
            text = tokenizer.render_chat([{"role": "user", "content": content}], True)
        except DataError:
            forms.append(False)
            continue
        forms.append("0z0" in text and "'type'" not in text and '"type"' not in text)
    return (forms[0] or not forms[1], forms[1])


def _join_parts(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _without_none(messages: list[Message], render: Render) -> list[Message]:
    """Return messages with an empty text for each content that is null, if the template would write the word None for it."""
    emptied = [{**message, "content": ""} if message["content"] is None else message for message in messages]
    try:
        written = render(messages, False)
    except DataError:  # the template asks for a text
        return emptied
    others = render(emptied, False)
    number = sum(message["content"] is None for message in messages)
    is_word = written.count("None") == others.count("None") + number
    return emptied if is_word and written.replace("None", "") == others.replace("None", "") else messages


def _check_calls(messages: Sequence[Message], number: int, render: Render) -> None:
    """Refuse a reply whose tool calls the template does not write, so that they would not be learned."""
    message = messages[number]
    calls = next((key for key in ("tool_calls", "function_call") if message.get(key)), None)
    if calls is None:
        return
    if render(messages[: number + 1], False) == render([*messages[:number], _without(message, calls)], False):
        raise DataError(
            "chat-template",
            f"the tokenizer's chat template does not write {calls!r} of message {number}. Use one that does, or messages "
            "without the key",
        )


# -- where replies are -----------------------------------------------------------------------------


def _pieces(
    messages: Sequence[Message], counted: Sequence[int], render: Render, tokenizer: Tokenizer
) -> list[tuple[str, bool]]:
    """Return the text that the chat template writes in pieces, each with whether it is a reply that counts."""
    pieces: list[tuple[str, bool]] = []
    written = ""
    for number in counted:
        prompt, text = _reply(messages[: number + 1], render, tokenizer)
        reply = text[len(prompt) :]
        length = len(reply if _ends_with_words(reply, messages[number]) else reply.rstrip())
        pieces += [(_added_text(written, prompt), False), (reply[:length], True), (reply[length:], False)]
        written = text
    if counted[-1] + 1 < len(messages):
        pieces.append((_added_text(written, render(messages, False)), False))
    return pieces


def _ends_with_words(reply: str, message: Message) -> bool:
    """Return whether nothing but white space follows the words of a reply, so that this ends its turn."""
    words, text = (_join_parts(message["content"]) or "").rstrip(), reply.rstrip()
    return words.endswith(text) or (words != "" and text.endswith(words))


def _reply(messages: Sequence[Message], render: Render, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text before the last message, a reply, with all that opens it, and the text with the reply.

    Raises:
        DataError: the template writes no such opening.
    """
    *earlier, _ = messages
    text = render(messages, False)
    if earlier and text.startswith(opened := render(earlier, True)):
        return opened, text
    # Some templates prompt for thoughts that they leave out of a reply: the common beginning of any two replies opens
    # it.
    probes = [{"role": "assistant", "content": _in_form(probe, tokenizer)} for probe in _PROBES]
    opened = os.path.commonprefix([render([*earlier, probe], False) for probe in probes])  # noqa: RUF071 - of characters
    if text.startswith(opened):
        return opened, text
    raise DataError(
        "chat-template",
        "the tokenizer's chat template writes a reply otherwise than it prompts for one, so the assistant's part cannot be "
        "found. Use a folder without the template",
    )


def _added_text(written: str, longer: str) -> str:
    if not longer.startswith(written):
        raise DataError(
            "chat-template",
            "the tokenizer's chat template writes earlier messages differently when others follow, so not all replies can be learned at once. "
            'Set data.turns = "each" for a document for each reply, or "last" for one of the last reply',
        )
    return longer[len(written) :]
