"""The results file of eval/accept.py: answers and tallies by prompt, written after every step, so that a stopped run goes on where it was.

Layout: {settings, versions, command, answers: {set: {prompt: [ids]}}, tallies: {policy: {set: {prompt: Tally}}},
summary: {policy: {set or "all": Acceptance}}}.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from eval.results import ResultsError, versions
from eval.rounds import Tally, acceptance
from train.paths import write_whole


class AcceptFile:
    """Raises ResultsError when `path` exists but holds other settings or is no such file."""

    def __init__(self, path: Path, settings: dict, command: str):
        self.path, self.settings, self.command = path, settings, command
        self.answers: dict[str, dict[str, list[int]]] = {}
        self.tallies: dict[str, dict[str, dict[str, Tally]]] = {}
        self._saved_at = 0.0
        if path.exists():
            self._load()

    def summary(self) -> dict[str, dict[str, dict]]:
        """Figures by policy, over each prompt set and over all; sets whose answers have no round are left out."""
        table = {policy: self.summary_of(policy) for policy in self.tallies}
        return {policy: by_set for policy, by_set in table.items() if by_set}

    def summary_of(self, policy: str) -> dict[str, dict]:
        groups = {name: list(tallies.values()) for name, tallies in self.tallies[policy].items()}
        groups["all"] = [tally for group in groups.values() for tally in group]
        return {name: asdict(acceptance(group)) for name, group in groups.items() if any(tally.rounds for tally in group)}

    def body(self) -> dict:
        tallies = {
            policy: {name: {prompt: tally.to_json() for prompt, tally in found.items()} for name, found in sets.items()}
            for policy, sets in self.tallies.items()
        }
        head = {"settings": self.settings, "versions": versions(), "command": self.command}
        return {**head, "answers": self.answers, "tallies": tallies, "summary": self.summary()}

    def save(self) -> None:
        write_whole(self.path, json.dumps(self.body()) + "\n")
        self._saved_at = time.monotonic()

    def save_soon(self, every_s: float = 10.0) -> None:
        """Save, unless that was done less than `every_s` seconds ago: the file of a large grid takes a while to write."""
        if time.monotonic() - self._saved_at > every_s:
            self.save()

    @classmethod
    def read(cls, path: Path) -> AcceptFile:
        """A finished file, whatever its settings. Raises ResultsError when there is none."""
        try:
            body = json.loads(path.read_text())
            return cls(path, body["settings"], body["command"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path} is not a results file of eval/accept.py ({error!r}); pass what its --out named.") from error

    def _load(self) -> None:
        try:
            body = json.loads(self.path.read_text())
            found, self.answers = body["settings"], body["answers"]
            self.tallies = {
                policy: {name: {prompt: Tally.from_json(data) for prompt, data in rows.items()} for name, rows in sets.items()}
                for policy, sets in body["tallies"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(f"{self.path} is not a results file of eval/accept.py ({error!r}); choose another --out.") from error
        refuse_other_settings(self.path, found, self.settings)


def refuse_other_settings(path: Path, found: dict, wanted: dict) -> None:
    """Raises ResultsError naming the first setting in which a results file differs from this call."""
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            raise ResultsError(
                f"{path} was measured with {key} = {found.get(key)!r}, this call has {wanted.get(key)!r}; "
                "choose another --out, or pass --fresh to measure again."
            )
