"""Strangers that connect to a meeting, or pretend to lead it, delay and end nobody; hosts may die and come again."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from samestep.errors import InputError, JobError, RunError, WorkerError, of_words
from samestep.runtime.processes.worker import Failure, failure_of
from samestep.wings.cluster.hosts.channel import Channel, GreetingError, TokenError, _hmac, greet, shorten, welcome
from samestep.wings.cluster.hosts.distant_workers import DistantWorkers, Follower, _to_json_value
from samestep.wings.cluster.hosts.meeting import Meeting, Rendezvous, meet

TOKEN = secrets.token_hex(32).encode()
MINE = {"samestep": "1.0", "a job of digest": "abc"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _connected(port: int) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))


def _left(*meetings: Meeting) -> None:
    _closed(*(end for one in meetings for end in (*one.followers, *([one.leader] if one.leader else []))))


def _closed(*ends: Channel) -> None:
    """Close the ends of channels at once: each waits for the other one to close."""
    with ThreadPoolExecutor() as threads:
        [*threads.map(Channel.close, ends)]


@contextlib.contextmanager
def _strangers(port: int, count: int, talk: bytes = b"") -> Iterator[None]:
    """Hold connections that never greet; they say `talk`."""
    held = [_connected(port) for _ in range(count)]
    for one in held:
        with contextlib.suppress(OSError):
            one.sendall(talk)
    yield
    for one in held:
        one.close()


@pytest.mark.filterwarnings("ignore:a host at 127.0.0.1 was turned away")
@pytest.mark.parametrize(
    ("count", "talk"), [(2, b""), (40, b""), (90, b""), (40, b"GET / HTTP/1.1\r\n"), (8, b"a" * 64)]
)
def test_strangers_hold_up_nobody(count: int, talk: bytes) -> None:
    port = _free_port()
    at = Rendezvous("127.0.0.1", port, 3, TOKEN)
    with ThreadPoolExecutor() as threads:
        leading = threads.submit(meet, at, MINE, 20.0)
        with _strangers(port, count, talk):
            following = [threads.submit(meet, at, MINE, 20.0) for _ in range(2)]
            _left(*[one.result(timeout=20.0) for one in (leading, *following)])


@pytest.mark.parametrize("first", [b"", b"\n", b"SSH-2.0-x\n", b"x" * 300, b"half a greeting"])
def test_what_does_not_greet_is_not_listening_yet(first: bytes) -> None:
    """Something else listens at the address for a moment, as a port forward does, before the leading host starts."""
    port = _free_port()
    other = socket.create_server(("127.0.0.1", port))

    def answer() -> None:
        with other, contextlib.suppress(OSError):
            for _ in range(2):
                connected, _ = other.accept()
                connected.sendall(first)
                connected.close()

    at = Rendezvous("127.0.0.1", port, 2, TOKEN)
    with ThreadPoolExecutor() as threads:
        answering = threads.submit(answer)
        following = threads.submit(meet, at, MINE, 30.0)
        answering.result()
        leading = threads.submit(meet, at, MINE, 30.0)
        _left(leading.result(timeout=30.0), following.result(timeout=30.0))


def test_a_false_proof_of_the_token_is_final() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as threads:

        def pretend() -> None:
            with other.accept()[0] as connected:
                connected.sendall(secrets.token_hex(32).encode() + b"\n")
                connected.recv(200)
                connected.sendall(secrets.token_hex(32).encode() + b"\n")

        threads.submit(pretend)
        began_s = time.monotonic()
        with pytest.raises(JobError, match=r"it has another token. Use the token file of the host that listens there"):
            meet(Rendezvous("127.0.0.1", other.getsockname()[1], 2, TOKEN), MINE, 600.0)
        assert time.monotonic() - began_s < 300.0, "it does not wait for the time limit"


def _follower(port: int, **more: str) -> Channel:
    """Come to a meeting as one of its hosts, and wait for nothing."""
    channel = greet(_connected(port), TOKEN)
    channel.send({**MINE, **more})
    return channel


@pytest.mark.filterwarnings("ignore:a host at 127.0.0.1 was turned away")
def test_a_follower_that_dies_leaves_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    port = _free_port()
    at = Rendezvous("127.0.0.1", port, 3, TOKEN)
    with ThreadPoolExecutor() as threads:
        leading = threads.submit(meet, at, MINE, 30.0)
        _connected(port).close()
        lost = _follower(port, process="process 7 of a")
        waits = threads.submit(meet, at, MINE, 30.0)
        lost._socket.shutdown(socket.SHUT_RDWR)  # as of a killed process
        lost.close()
        time.sleep(0.5)
        again = threads.submit(meet, at, MINE, 30.0)
        with warnings.catch_warnings():
            met = leading.result(timeout=30.0)
        assert [one.lost for one in met.followers] == ["", ""]
        _left(waits.result(timeout=30.0), again.result(timeout=30.0), met)
    assert "127.0.0.1 (process 7 of a) left before all hosts had come: its connection ended" in capsys.readouterr().out


def test_a_process_that_comes_twice_is_named_and_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    port = _free_port()
    with ThreadPoolExecutor() as threads:
        leading = threads.submit(meet, Rendezvous("127.0.0.1", port, 3, TOKEN), MINE, 30.0)
        first = _follower(port, process="process 7 of a")
        threading.Thread(target=first.next, daemon=True).start()
        time.sleep(0.5)  # else the leading host may read the words of the second before those of the first
        second = _follower(port, process="process 7 of a")
        third = _follower(port, process="process 8 of a")
        met = leading.result(timeout=30.0)
        assert len(met.followers) == 2
        assert second.next(10.0) == third.next(10.0) == {"agreed": True}
        _closed(first, second, third, *met.followers)
    said = capsys.readouterr().out
    assert "127.0.0.1 (process 7 of a) came twice: its first connection is dropped" in said
    assert "127.0.0.1 (process 8 of a) counts as one more host than 127.0.0.1 (process 7 of a)" in said


@pytest.mark.parametrize("side", ["leads", "follows"])
def test_the_time_limit_holds_against_who_only_says_that_it_is_alive(side: str) -> None:
    port = _free_port()
    at = Rendezvous("127.0.0.1", port, 2, TOKEN)
    with ThreadPoolExecutor() as threads:
        if side == "leads":
            leading = threads.submit(meet, at, MINE, 2.0)
            alive = greet(_connected(port), TOKEN)  # it never says who it is
            with pytest.raises(WorkerError, match="1 of 2 hosts came"):
                leading.result(timeout=30.0)
        else:
            listening = socket.create_server(("127.0.0.1", port))
            following = threads.submit(meet, at, MINE, 1.0)
            alive = welcome(listening.accept()[0], TOKEN)
            with pytest.raises(WorkerError, match="it did not report within 1 s that all hosts have come"):
                following.result(timeout=60.0)
            listening.close()
        alive.close()


def _pair() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        connected = socket.create_connection(listening.getsockname())
        other = threads.submit(welcome, listening.accept()[0], TOKEN)
        return greet(connected, TOKEN), other.result()


GOOD = [
    {"start": 0, "rank": 2, "word": "ready", "value": None},
    {"start": 0, "rank": 3, "word": "joined", "value": None},
    {"start": 0, "rank": 2, "word": "at", "value": {"calls": {"0": 3}, "call": "", "where": ""}},
    {"start": 0, "rank": 3, "word": "done", "value": [None, {"0": 4}]},
    {
        "start": 0,
        "rank": 2,
        "word": "failed",
        "value": {
            "rank": 2,
            "age_s": 0.5,
            "what": "failed",
            "lines": ["a"],
            "text": "t",
            "mistake": "",
            "is_echo": False,
        },
    },
    {"stop": 15, "again": False},
]
ODD: tuple[Any, ...] = (99, -1, None, "x", 1.5, [], {}, [[]], True, "annotations", 1 << 70, {"rank": []}, "failed")


def _mutated(message: Any, draw: random.Random) -> Any:
    """Return a message of which one value, key or item is another one."""
    if isinstance(message, dict) and message:
        key = draw.choice(sorted(message))
        if draw.random() < 0.15:
            return {name: value for name, value in message.items() if name != key}
        if draw.random() < 0.1:
            return {**message, draw.choice(["word", "rank", "x"]): draw.choice(ODD)}
        return {**message, key: _mutated(message[key], draw)}
    if isinstance(message, list) and message and draw.random() < 0.7:
        index = draw.randrange(len(message))
        return [*message[:index], _mutated(message[index], draw), *message[index + 1 :]]
    return draw.choice(ODD)


def test_a_host_that_says_what_no_host_says_is_lost_with_one_line() -> None:
    """2,000 mutated messages of a follower: each is heard with its own rank, or the follower is lost."""
    draw, heard, lost = random.Random(0), 0, 0
    for good in GOOD:
        assert [*_host().hear_one(good)], good
    for number in range(2000):
        message = _mutated(GOOD[number % len(GOOD)], draw)
        host = _host()
        said = [*host.hear_one(message)]
        assert all(rank in range(2, 4) for rank, _, _ in said), message
        if host.lost:
            lost += 1
            assert [(rank, word) for rank, word, _ in said] == [(2, "failed"), (3, "failed")], message
            assert {failure.what for *_, failure in said} == {"is lost with its host: it sent an unknown message"}
        heard += not host.lost
    assert lost > 800
    assert heard > 100


class _Said:
    """The end of a channel that has received one message."""

    peer = "10.0.0.2"

    def __init__(self) -> None:
        self.lost, self.message = "", None

    def receive(self) -> list[Any]:
        return [self.message]

    def lose(self) -> None:
        self.lost = "it sent an unknown message"


class _Host(DistantWorkers):
    def __init__(self) -> None:
        self.end = _Said()  # type: ignore[assignment]
        super().__init__(self.end, range(2, 4), {"start": 0})  # type: ignore[arg-type]

    @property
    def lost(self) -> str:
        return self._channel.lost

    def hear_one(self, message: Any) -> Iterator[tuple[int, str, Any]]:
        self._channel.message = message  # type: ignore[attr-defined]
        yield from self.hear()


def _host() -> _Host:
    return _Host()


ORDER = {
    "hosts": ["10.0.0.2"],
    "layout": "dp=4",
    "folder": "/tmp/run",
    "until": None,
    "resume_from": "",
    "lock": "",
    "ranks": 4,
    "first_rank": 2,
    "local_ranks": 2,
    "ranks_per_node": 2,
    "store": ["10.0.0.1", 4000],
    "start": 0,
}


class _Workers:
    """Workers that do nothing."""

    ranks = range(2, 4)

    def start(self) -> None: ...
    def end(self) -> None: ...
    def signal(self, rank: int, number: int) -> None:
        assert rank in self.ranks

    def tell(self, rank: int, word: str) -> None:
        assert (rank in self.ranks, word in ("at", "leave")) == (True, True)

    def kill(self, rank: int) -> None:
        assert rank in self.ranks


def test_a_leading_host_that_says_what_no_host_says_is_lost() -> None:
    """2,000 mutated messages of the leading host: each is obeyed within its words, or the leading host is lost."""
    draw, lost = random.Random(1), 0
    good = [
        {"run": ORDER},
        {"tell": "at", "rank": 2},
        {"signal": 15, "rank": 3},
        {"kill": True, "rank": 2},
        {"end": True},
    ]
    for number in range(2000):
        said = _Said()
        said.send = lambda message: None  # type: ignore[attr-defined]
        follower = Follower(said, lambda order: _Workers())  # type: ignore[arg-type, return-value]
        follower._obey({"run": ORDER})
        message = _mutated(good[number % len(good)], draw)
        if isinstance(message, dict):
            follower._obey(message)
        lost += bool(said.lost)
    assert lost > 500


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "nul", '"a"', "1", "{" * 5000])
def test_a_message_that_is_none_loses_its_sender(text: str) -> None:
    left, right = _pair()
    with left._lock:
        from samestep.wings.cluster.hosts.channel import _seal

        sealed = _seal(left._key, left._names[0], left._num_sent, text.encode())
        left._socket.sendall(sealed + b" " + text.encode() + b"\n")
    assert right.next(30.0) is None
    assert right.lost == "it sent an unknown message"
    _closed(left, right)


@pytest.mark.parametrize("letter", ["x", "\u20ac", "\U0001f600", "\x00", "\n"])
@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_long_error_is_cut_and_its_host_is_not_lost(letter: str, size: int) -> None:
    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        raise ValueError(letter * size)

    left, right = _pair()
    try:
        fail(30)
    except ValueError as error:
        failure: Failure = failure_of(1, error)
    left.send({"rank": 1, "word": "failed", "value": _to_json_value("failed", failure), "start": 0})
    heard = right.next(30.0)
    assert heard is not None
    assert not right.lost
    text = heard["value"]["text"]
    assert text == letter * size if size == 10 else text.endswith(" ... (3000000 characters)")
    with pytest.raises(WorkerError, match=r"a message of \d+ bytes to 127.0.0.1. Use less than 1048576"):
        left.send({"text": "x" * (1 << 20)})
    _closed(left, right)


def test_a_text_is_shortened_to_its_limit() -> None:
    assert shorten("abc", 3) == "abc"
    assert len(shorten("x" * 1000, 100)) == 100


@pytest.mark.parametrize(
    "name", ["annotations", "Path", "difflib", "of_words", "", "InputError", "Exception", "WorkerError"]
)
def test_an_error_of_another_host_is_one_of_ours(name: str) -> None:
    error = of_words(name, ["a-code", "text"])
    assert isinstance(error, (InputError, RunError))
    assert str(error) == "text"


@pytest.mark.parametrize("token", [b"a" * 64, b"ab" * 40, b"1234567" * 9, bytes(range(31))])
def test_a_token_that_is_no_secret_is_refused(token: bytes) -> None:
    with pytest.raises(JobError, match=r"at least 32 are needed, drawn at random, for example by openssl rand -hex 32"):
        Rendezvous.of("h:1", 2, token)
    assert Rendezvous.of("h:1", 2, os.urandom(32)).port == 1


def test_a_mutated_greeting_lets_nobody_in() -> None:
    """2,000 answers that are a right one but for some bytes, too short, too long or somebody else's."""
    draw, before = random.Random(2), b""
    for _ in range(2000):
        ours, theirs = socket.socketpair()
        with ours, theirs, ThreadPoolExecutor(1) as threads:
            greeted = threads.submit(welcome, ours, TOKEN)
            nonce = theirs.recv(200).strip()
            mine = secrets.token_hex(32).encode()
            right = mine + b" " + _hmac(TOKEN, b"joins", nonce, mine)
            answer = bytearray(right)
            match draw.randrange(5):
                case 0:
                    answer[draw.randrange(len(answer))] ^= 1 << draw.randrange(8)
                case 1:
                    del answer[draw.randrange(len(answer)) :]
                case 2:
                    answer[draw.randrange(len(answer))] = draw.randrange(256)
                case 3:
                    answer = bytearray(before or b"x")  # that of an earlier greeting
                case 4:
                    answer += bytes(draw.randrange(33, 127) for _ in range(draw.randrange(1, 400)))
            before = right
            theirs.sendall(bytes(answer) + b"\n")
            theirs.shutdown(socket.SHUT_WR)
            if bytes(answer) != right:
                with pytest.raises((TokenError, GreetingError), match="it does not know the token"):
                    greeted.result(timeout=30.0)
