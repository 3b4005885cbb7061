"""What the doctor says about a checkpoint: one finding is one sentence, how bad it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from train.layouts import Checkpoint

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """`error`: SGLang refuses the head, or serves something else than what was trained. `warning`: may be so, depending on how it was
    trained or started. `note`: harmless. `repair` changes a checkpoint in memory; None where only a person can decide or nothing helps.
    """

    code: str
    severity: Severity
    problem: str
    fix: str
    repair: Callable[[Checkpoint], None] | None = None

    def as_dict(self) -> dict:
        return {
            "code": self.code,
            "severity": self.severity,
            "problem": self.problem,
            "fix": self.fix,
            "fixable": self.repair is not None,
        }


@dataclass(frozen=True)
class Answers:
    """What no file says: the person's answers to the two questions that only the maker of a head can settle."""

    aux_ids: Literal["inputs", "outputs"] | None = None
    norm_output: bool | None = None


def set_field(name: str, value) -> Callable[[Checkpoint], None]:
    def repair(head: Checkpoint) -> None:
        head.config[name] = value

    return repair


def set_eagle(name: str, value) -> Callable[[Checkpoint], None]:
    def repair(head: Checkpoint) -> None:
        head.config["eagle_config"] = dict(head.config.get("eagle_config") or {}) | {name: value}

    return repair


def drop_fields(*names: str) -> Callable[[Checkpoint], None]:
    def repair(head: Checkpoint) -> None:
        for name in names:
            head.config.pop(name, None)

    return repair


def settle(name: str, answer) -> Callable[[Checkpoint], None]:
    """Write down that a person has answered the question, so that it is not asked again."""

    def repair(head: Checkpoint) -> None:
        head.config["talon_doctor"] = dict(head.config.get("talon_doctor") or {}) | {name: answer}

    return repair
