"""This process as one that is examined: it answers the questions of the process that leads, each within the time of a probe."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.diagnosis import doors, findings
from samestep.diagnosis.doors import Door, Target
from samestep.diagnosis.findings import HostFindings, at_once, of_record
from samestep.diagnosis.gpus import TorchQuestion
from samestep.diagnosis.identity import Identity
from samestep.diagnosis.names import without_address
from samestep.diagnosis.shared_folder import SharedFiles, Sight
from samestep.job import Job


class Examined:
    """The questions that this process is asked, with the doors and files that it has opened for them; `close` ends all of it."""

    def __init__(self, identity: Identity, job: Job | None, job_folder: Path, folder: Path, token: bytes) -> None:
        self._identity, self._job, self._job_folder, self._folder, self._token = (
            identity,
            job,
            job_folder,
            folder,
            token,
        )
        self._found: HostFindings | None = None
        self._door: Door | None = None
        self._files: SharedFiles | None = None
        self._torch: TorchQuestion | None = None

    def findings(self) -> HostFindings:
        """Return what is found on this host; it is looked for once."""
        if self._found is None:
            self._found = findings.find(self._identity, self._job, self._job_folder, self._folder)
            self._torch = TorchQuestion()
        return self._found

    def torch(self, timeout_s: float) -> dict[str, Any]:
        """Return what torch says here, as plain data."""
        assert self._torch is not None, "findings are asked for before torch is"
        return dataclasses.asdict(self._torch.answer(timeout_s))

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question of the process that leads; `failed` says why it has no answer."""
        asked = {
            "clock": lambda _: {"now_s": time.time()},
            "findings": self._open,
            "names": lambda given: {"unknown": [*without_address(given["names"])]},
            "reach": self._reach,
            "write": self._write,
            "look": lambda given: self._look(given["nonces"]),
            "rate": lambda given: dataclasses.asdict(doors.rate(given["address"], given["port"], self._token)),
            "torch": lambda given: self.torch(given["timeout_s"]),
        }.get(str(question.get("do")))
        if asked is None:
            return {"failed": "it does not know the question"}
        return self._within(asked, question)

    def close(self) -> None:
        """End what is open."""
        for one in (self._door, self._files, self._torch):
            if one is not None:
                one.close()

    def _within(self, asked: Callable[[Any], dict[str, Any]], question: Mapping[str, Any]) -> dict[str, Any]:
        if question["do"] in ("findings", "torch"):  # these have limits of their own
            return asked(question)
        found, late = at_once({"probe": lambda: asked(question)})
        return found["probe"] if found["probe"] is not None else {"failed": late[0].partition(": ")[2]}

    def _open(self, _given: Mapping[str, Any]) -> dict[str, Any]:
        self._door = self._door or Door(self._token)
        return {"findings": self.findings().to_record(), "ports": [*self._door.ports]}

    def _reach(self, given: Mapping[str, Any]) -> dict[str, Any]:
        targets = [found for one in given["targets"] if (found := of_record(Target, one)) is not None]
        extra = [doors.attempt(address, port, self._token) for address, port in given["meeting"]]
        reached = doors.reach(targets, self._token)
        return {
            "reached": [[dataclasses.asdict(one) for one in attempts] for attempts in reached],
            "meeting": [dataclasses.asdict(one) for one in extra],
        }

    def _write(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if self._door is not None:
            self._door.number = int(given["place"])
        self._files = SharedFiles(self._folder, str(given["name"]))
        return {"refused": self._files.write(int(given["place"]), str(given["nonce"]))}

    def _look(self, nonces: Mapping[str, str]) -> dict[str, Any]:
        seen = (
            Sight(error="it has not written")
            if self._files is None
            else self._files.look({int(key): one for key, one in nonces.items()})
        )
        return dataclasses.asdict(seen)
