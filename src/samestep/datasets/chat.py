"""Conversations as tokens, of which only the assistant's are counted in the loss.

A tokenizer with a chat template writes the conversation in its own format. The assistant's part is found by writing the
conversation up to each reply and then with it: the text that the reply adds is counted, with its end-of-turn token. A
template that writes earlier turns differently when later ones follow is refused. Without a template the format is

    <|user|>
    What is 2 + 2?
    <|assistant|>
    4{end}              {end} is the tokenizer's end of a document, or a newline if it has none
"""

from __future__ import annotations

from typing import Any

from samestep.datasets.tokenizers import Messages, Tokenizer
from samestep.errors import DataError

_HEAD = "<|{}|>\n"

Counted = list[tuple[list[int], bool]]
"""Consecutive runs of token ids, each with whether its tokens are counted in the loss."""


def chat_tokens(messages: Any, tokenizer: Tokenizer) -> Counted:
    """Return the tokens of a conversation as runs that are counted or not.

    Raises:
        DataError: the messages are not a conversation with a reply, or the template rewrites earlier turns.
    """
    conversation = _checked(messages)
    if tokenizer.render_chat(conversation, False) is None:
        return _plain(conversation, tokenizer)
    pieces = _pieces(conversation, tokenizer)
    runs = tokenizer.encode_pieces([text for text, _ in pieces])
    return [(run, counted) for run, (_, counted) in zip(runs, pieces, strict=True)]


def opening(message: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a user's message up to where the assistant's reply begins, in the format of `chat_tokens`."""
    text = tokenizer.render_chat([{"role": "user", "content": message}], True)
    if text is not None:
        return tokenizer.encode(text)
    runs = _plain([{"role": "user", "content": message}], tokenizer)
    return [*(token for run, _ in runs for token in run), *tokenizer.encode(_HEAD.format("assistant"))]


def _checked(messages: Any) -> Messages:
    """Return the messages, and refuse them unless each has a role and a content and one is the assistant's."""
    right = 'a list of {"role": "user", "content": "text"} works'
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages is not a list of messages; {right}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"message {number} has no role and content that are text; {right}")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(
            'no message has the role "assistant", so nothing would be learned; add a reply, or leave the conversation out'
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _plain(messages: Messages, tokenizer: Tokenizer) -> Counted:
    """Return the runs of a conversation in the format that the head of this file shows."""
    newline = tokenizer.encode("\n")
    end = newline if tokenizer.end_id is None else [tokenizer.end_id]
    runs: Counted = []
    for message in messages:
        reply = message["role"] == "assistant"
        runs.append((tokenizer.encode(_HEAD.format(message["role"])), False))
        runs.append((tokenizer.encode(message["content"]) + (end if reply else newline), reply))
    return runs


def _pieces(messages: Messages, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the text that the chat template writes in pieces, each with whether it is the assistant's."""
    pieces: list[tuple[str, bool]] = []
    written = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for upto, reply in ((number, False), (number + 1, True)):
            longer = tokenizer.render_chat(messages[:upto], not reply)
            assert longer is not None
            pieces.append((_added(written, longer), reply))
            written = longer
    whole = tokenizer.render_chat(messages, False)
    assert whole is not None
    return [*pieces, (_added(written, whole), False)]


def _added(written: str, longer: str) -> str:
    if not longer.startswith(written):
        raise DataError(
            "the tokenizer's chat template writes earlier messages differently when others follow, so the "
            "assistant's part cannot be found; conversations of one reply, or a folder without the template, work"
        )
    return longer[len(written) :]
