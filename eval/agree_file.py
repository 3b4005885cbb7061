"""The results file of eval/agree.py: what the servers answered, written after every answer, and how it compares with eval/accept.py.

Layout: {settings, versions, command, replies: {policy: {set: {prompt: Reply}}}, agreements: {policy: Agreement}}.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.accept_file import AcceptFile, refuse_other_settings
from eval.results import ResultsError, versions
from eval.rounds import acceptance, ratio_error
from train.paths import write_whole


@dataclass(frozen=True)
class Reply:
    output_ids: list[int]
    rounds: int


@dataclass(frozen=True)
class Agreement:
    """One policy over the prompts that both sides answered. offline, served: accept lengths, tokens per round over all prompts (above
    temperature 0 the closed form offline); *_error: their standard errors over prompts; difference: served / offline - 1; same_answer,
    same_rounds: prompts with the same ids, with the same number of rounds; None above temperature 0."""

    prompts: int
    same_answer: int | None
    same_rounds: int | None
    offline: float
    offline_error: float | None
    served: float
    served_error: float | None
    difference: float
    offline_rounds: int
    served_rounds: int


class AgreeFile:
    """Raises ResultsError when `path` exists but holds other settings or is no such file."""

    def __init__(self, path: Path, settings: dict, command: str):
        self.path, self.settings, self.command = path, settings, command
        self.replies: dict[str, dict[str, dict[str, Reply]]] = {}
        self.agreements: dict[str, dict] = {}
        if path.exists():
            self._load()

    def agreement(self, policy: str, offline: AcceptFile) -> Agreement:
        """Raises ValueError when no prompt has a round on both sides."""
        tallies, replies, same_answer, same_rounds = [], [], 0, 0
        for name, prompts in offline.tallies[policy].items():
            for prompt, tally in prompts.items():
                reply = self.replies.get(policy, {}).get(name, {}).get(prompt)
                if reply and reply.rounds and tally.rounds:
                    tallies.append(tally)
                    replies.append(reply)
                    same_answer += reply.output_ids == offline.answers[name][prompt]
                    same_rounds += reply.rounds == tally.rounds
        ours, lengths, rounds = acceptance(tallies), [len(reply.output_ids) for reply in replies], [reply.rounds for reply in replies]
        served, greedy = sum(lengths) / sum(rounds), self.settings["temperature"] == 0
        return Agreement(
            prompts=len(replies),
            same_answer=same_answer if greedy else None,
            same_rounds=same_rounds if greedy else None,
            offline=ours.accept_length,
            offline_error=ours.standard_error,
            served=served,
            served_error=ratio_error(lengths, rounds),
            difference=served / ours.accept_length - 1,
            offline_rounds=ours.rounds,
            served_rounds=sum(rounds),
        )

    def save(self, agreements: dict[str, Agreement] | None = None) -> None:
        self.agreements |= {policy: asdict(one) for policy, one in (agreements or {}).items()}
        replies = {
            policy: {name: {prompt: asdict(reply) for prompt, reply in found.items()} for name, found in sets.items()}
            for policy, sets in self.replies.items()
        }
        head = {"settings": self.settings, "versions": versions(), "command": self.command}
        write_whole(self.path, json.dumps({**head, "replies": replies, "agreements": self.agreements}) + "\n")

    def _load(self) -> None:
        try:
            body = json.loads(self.path.read_text())
            found, self.agreements = body["settings"], body["agreements"]
            self.replies = {
                policy: {name: {prompt: Reply(**reply) for prompt, reply in rows.items()} for name, rows in sets.items()}
                for policy, sets in body["replies"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(f"{self.path} is not a results file of eval/agree.py ({error!r}); choose another --out.") from error
        refuse_other_settings(self.path, found, self.settings)
