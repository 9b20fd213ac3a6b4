"""The marks of the runtime: what is sent, waited for and done outside of tasks, for the recorder that listens, if one does.

A mark costs a look at one variable where nobody listens. A listener belongs to the process, since collectives are issued by hooks
and threads of autograd, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from samestep.runtime.contexts import AtEnd


class Listener(Protocol):
    """Hears the marks of one process."""

    def issue(self, owner: str, kind: str) -> Issue:
        """Hear that a collective or message is being issued."""

    def begin(self, region: str) -> Callable[[], None]:
        """Hear that the host begins to do something outside of tasks; the result is called at its end."""

    def begin_copy(self, owner: str, stream: str, *, is_awaited: bool) -> Callable[[], None]:
        """Hear that what is done next on the current stream is a copy between device and host, or waits for one; the result is
        called at its end."""


class Issue(Protocol):
    """One collective or message that is being issued."""

    is_weighed: bool
    """Whether the bytes that torch is given are wanted."""

    def sent(self, work: Any) -> Any:
        """Return the work in a form whose `wait` is heard."""

    def end(self, size_bytes: int | None) -> None:
        """Hear that it was issued, with the bytes of its buffers if they are wanted; without `sent` it has ended, too."""


class _Listeners:
    """The listener of this process, which nothing keeps alive here."""

    current: Callable[[], Listener | None] = staticmethod(lambda: None)


def listener() -> Listener | None:
    """Return who listens."""
    return _Listeners.current()


def listen(one: Listener | None) -> None:
    """Let one listener hear the marks of this process from now on, and no other."""
    _Listeners.current = staticmethod((lambda: None) if one is None else weakref.ref(one))


def region(name: str) -> AbstractContextManager[None]:
    """Return a context of what the host does outside of tasks, such as `data` or `checkpoint`; it begins with the call."""
    one = _Listeners.current()
    return _UNHEARD if one is None else AtEnd(one.begin(name))


def copy(owner: str, stream: str, *, is_awaited: bool = False) -> AbstractContextManager[None]:
    """Return a context of a copy between device and host, or of the wait for one, `stream` being its direction; it begins with the call."""
    one = _Listeners.current()
    return _UNHEARD if one is None else AtEnd(one.begin_copy(owner, stream, is_awaited=is_awaited))


_UNHEARD = nullcontext()
