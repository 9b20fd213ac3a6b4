"""Hosts meet at one address: who knows the token and has the same job is let in, and every message is the other's own."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import InputError, JobError, WorkerError
from samestep.wings.cluster.hosts import channel as channels
from samestep.wings.cluster.hosts.channel import Channel, greet, welcome
from samestep.wings.cluster.hosts.meeting import Meeting, Rendezvous, meet, read_token

TOKEN = b"a secret of thirty-two characters"
MINE = {"samestep": "1.0", "torch": "2.13", "a job of digest": "abc", "--layout": "dp=2"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _meet(*hosts: tuple[bytes, dict[str, str]], num_hosts: int = 2, timeout_s: float = 5.0) -> list[Any]:
    """Let hosts of one machine meet; return the meeting of each, or its error."""
    port = _free_port()
    with ThreadPoolExecutor() as threads:
        came: list[Future[Meeting]] = [
            threads.submit(meet, Rendezvous("127.0.0.1", port, num_hosts, token), mine, timeout_s)
            for token, mine in hosts
        ]
        ends = [one.exception() or one.result() for one in came]
    for end in ends:
        if isinstance(end, Meeting):
            end.__exit__(None, None, None)
    return ends


def test_hosts_that_agree_meet() -> None:
    ends = _meet(*[(TOKEN, MINE)] * 3, num_hosts=3)
    assert sorted((len(end.followers), end.leader is None) for end in ends) == [(0, False), (0, False), (2, True)]
    assert {(end.address, end.interface) for end in ends} == {("127.0.0.1", "lo")}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"torch": "2.11"}, "127.0.0.1 has torch 2.1[13], and the leading host 2.1[13]. Use one for all hosts"),
        ({"a job of digest": "abd"}, "has a job of digest ab[cd]"),
        ({"--layout": "dp=4"}, "has --layout dp=[24]"),
    ],
)
def test_hosts_that_differ_are_refused_by_name_on_all(changed: dict[str, str], words: str) -> None:
    for end in _meet((TOKEN, MINE), (TOKEN, MINE | changed)):
        with pytest.raises(JobError, match=words):
            raise end


@pytest.mark.filterwarnings("ignore:a host at 127.0.0.1 was turned away")
def test_a_wrong_token_is_refused_and_the_run_waits_on() -> None:
    refused, left = sorted(_meet((TOKEN, MINE), (TOKEN[::-1], MINE), timeout_s=2), key=lambda end: str(type(end)))
    with pytest.raises(
        JobError, match=r"--rendezvous 127.0.0.1:\d+: it has another token. Use the token file of the host"
    ):
        raise refused
    with pytest.raises(
        WorkerError, match=r"1 of 2 hosts came to 127.0.0.1:\d+ within 2 s; hosts apart from this one: none"
    ):
        raise left


def test_what_listens_there_may_be_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(target=_say_something_else, args=(other,), daemon=True).start()
        with pytest.raises(JobError, match="what listens there is no run of samestep"):
            meet(Rendezvous("127.0.0.1", port, 2, TOKEN), MINE, 5.0)


def _say_something_else(listening: socket.socket) -> None:
    with listening.accept()[0] as connected:
        connected.sendall(b"SSH-2.0\n")


def _pair() -> tuple[Channel, Channel, socket.socket]:
    """Two ends of a channel, and the socket of the first."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        connected = socket.create_connection(listening.getsockname())
        other = threads.submit(welcome, listening.accept()[0], TOKEN)
        return greet(connected, TOKEN), other.result(), connected


def test_messages_arrive_whole_and_in_order() -> None:
    left, right, _ = _pair()
    sent = [{"number": number, "text": "a\nb" * number} for number in range(50)]
    for message in sent:
        left.send(message)
    assert [right.next() for _ in sent] == sent
    right.send({"back": True})
    assert left.next() == {"back": True}
    left.send({"last": 1})
    threading.Thread(target=left.close).start()
    assert right.next() == {"last": 1}
    assert right.next() is None
    assert right.lost == "its connection ended"
    right.close()


@pytest.mark.parametrize("forged", ["flip", "repeat", "invent", "endless"])
def test_what_the_other_side_did_not_send_ends_the_channel(forged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, wire = _pair()
    monkeypatch.setattr(left, "_socket", _Tampered(wire, forged))
    left._is_closed.set()  # so that nothing else is sent
    threading.Thread(target=lambda: [left.send({"tell": "leave"}) for _ in range(2)]).start()
    heard = []
    while (message := right.next()) is not None:
        heard.append(message)
    assert heard == [{"tell": "leave"}] * {"flip": 0, "repeat": 1, "invent": 0, "endless": 0}[forged]
    assert right.lost == ("a message has no end" if forged == "endless" else "something came that it did not send")
    right.close()
    wire.close()


class _Tampered:
    """A socket whose messages someone on the way changes."""

    def __init__(self, wire: socket.socket, how: str) -> None:
        self.wire, self.how, self.first = wire, how, b""

    def sendall(self, line: bytes) -> None:
        self.first = self.first or line
        changed = {
            "flip": line.replace(b"leave", b"kill!"),
            "repeat": self.first,
            "invent": secrets.token_hex(32).encode() + b" {}\n",
            "endless": b"x" * (1 << 21),
        }[self.how]
        self.wire.sendall(changed)


def test_a_side_that_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_ALIVE_EVERY_S", 0.05)
    left, right, _ = _pair()
    monkeypatch.setattr(channels, "_SILENT_S", 0.5)
    assert threading.Event().wait(1.0) is False
    assert right.receive() == []
    assert not right.lost
    left._is_closed.set()  # it no longer says that it is there
    assert right.next() is None
    assert right.lost == "it was silent for 0 s"
    for one in (right, left):
        one.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            lambda: Rendezvous.of("10.0.0.1", 2, TOKEN),
            "--rendezvous must be HOST:PORT, such as 10.0.0.1:29400, got 10.0.0.1",
        ),
        (lambda: Rendezvous.of("h:99999", 2, TOKEN), "--rendezvous must be HOST:PORT"),
        (
            lambda: Rendezvous.of("h:1", 2, b"short"),
            "--token-file holds 5 bytes, 5 of them different: at least 32 are needed",
        ),
        (lambda: read_token(Path("/nonexistent")), "--token-file /nonexistent: No such file"),
        (lambda: meet(Rendezvous("0.0.0.0", 1234, 2, TOKEN), MINE, 1), "is every interface of a host"),
    ],
)
def test_mistakes_say_what_works(given: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        given()


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o644)
    with pytest.raises(JobError, match=f"can be read by other users. Use chmod 600 {file}"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    assert TOKEN.decode() not in repr(Rendezvous.of("h:1", 2, TOKEN))
