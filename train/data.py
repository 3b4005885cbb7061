"""Readers for prompt and conversation files. A row that cannot be used is counted with a reason; it never raises.

Known layouts, recognised row by row in JSONL or in one JSON array:
  {"id", "category", "turns": [str, ...]}              the starter prompts, MT-Bench (`question_id`)
  {"conversations": [{"from", "value"}, ...]}          ShareGPT
  {"messages": [{"role", "content"}, ...]}             OpenAI, ultrachat_200k, and what train/regenerate.py writes
  {"data": [user, assistant, user, ...]}               UltraChat (raw)
  {"prompt": str}                                      one question
A file that ends in .txt holds one prompt per line.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
}


@dataclass
class Prompt:
    """The user's side of a conversation."""

    id: str
    category: str
    turns: list[str]


@dataclass
class Conversation:
    """A whole conversation: an optional system message, then user and assistant in turn, ending with the assistant.

    `truncated`: the last answer was cut by a length limit, so its end-of-turn token must not be learned.
    """

    id: str
    messages: list[dict]
    truncated: bool = False


@dataclass
class Report:
    """What a reader made of a file: rows kept and, per reason, rows refused or shortened."""

    kept: int = 0
    refused: Counter = field(default_factory=Counter)
    shortened: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [f"{self.kept} rows kept"]
        parts += [f"{count} refused ({reason})" for reason, count in self.refused.most_common()]
        parts += [f"{count} shortened ({reason})" for reason, count in self.shortened.most_common()]
        return ", ".join(parts)


class BadRow(ValueError):
    """Why a row cannot be used."""


def read_prompts(path: str | Path, limit: int | None = None, split: str | None = None) -> list[Prompt]:
    """The usable prompts of a file, at most `limit`; with `split`, only rows whose own `split` is that or absent.

    Raises OSError when the file cannot be read.
    """
    return read_prompts_with_report(path, limit, split)[0]


def read_prompts_with_report(path: str | Path, limit: int | None = None, split: str | None = None) -> tuple[list[Prompt], Report]:
    def convert(row, fallback_id: str, report: Report) -> Prompt:
        if split and isinstance(row, dict) and row.get("split", split) != split:
            raise BadRow(f"not in the {split!r} split")
        return _to_prompt(row, fallback_id)

    return _read(path, limit, convert)


def read_conversations(path: str | Path, limit: int | None = None) -> tuple[list[Conversation], Report]:
    """The usable conversations of a file (for training on the answers they hold)."""
    return _read(path, limit, _to_conversation)


def _read(path, limit, convert):
    found, report = [], Report()
    for number, row in _rows(Path(path)):
        if limit is not None and len(found) >= limit:
            break
        try:
            if isinstance(row, BadRow):
                raise row
            found.append(convert(row, f"row-{number}", report))
        except BadRow as reason:
            report.refused[str(reason)] += 1
    report.kept = len(found)
    return found, report


def _rows(path: Path) -> Iterator[tuple[int, object]]:
    """(row number from 1, parsed row or BadRow); blank lines are skipped."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".txt":
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                yield number, {"prompt": line.decode("utf-8", "replace").strip()}
        return
    if data.lstrip()[:1] == b"[":
        try:
            yield from enumerate(json.loads(data), 1)
            return
        except ValueError:
            pass  # not one array: perhaps JSONL whose rows are not objects; each line gets its own reason
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except UnicodeDecodeError:
            yield number, BadRow("not UTF-8")
        except ValueError:
            yield number, BadRow("not JSON")


def _to_prompt(row, fallback_id: str) -> Prompt:
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    if isinstance(row.get("turns"), list):
        turns = [_text(turn) for turn in row["turns"]]
    elif isinstance(row.get("prompt"), str) and "messages" not in row:
        turns = [_text(row["prompt"])]
    else:
        turns = [text for role, text in _role_turns(row) if role == "user"]
    if not turns:
        raise BadRow("no user turn")
    return Prompt(_row_id(row, fallback_id), str(row.get("category") or row.get("source") or "none"), turns)


def _to_conversation(row, fallback_id: str, report: Report) -> Conversation:
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    turns = list(_role_turns(row))
    system = [turns.pop(0)] if turns and turns[0][0] == "system" else []
    if turns and turns[0][0] == "assistant":
        turns.pop(0)
        report.shortened["an answer before the first question"] += 1
    kept = []
    for index, (role, text) in enumerate(turns):
        if role != ("user", "assistant")[index % 2]:
            report.shortened[f"{role} turn out of order"] += 1
            break
        kept.append((role, text))
    complete = len(kept) == len(turns)
    if len(kept) % 2:
        kept.pop()
    if not kept:
        raise BadRow("no question followed by an answer")
    messages = [{"role": role, "content": text} for role, text in system + kept]
    return Conversation(_row_id(row, fallback_id), messages, bool(row.get("truncated")) and complete)


def _role_turns(row: dict) -> list[tuple[str, str]]:
    """(role, text) of every turn; raises BadRow on a turn that has neither."""
    for name, role_key, text_key in (("conversations", "from", "value"), ("messages", "role", "content")):
        if isinstance(row.get(name), list):
            return [_role_turn(turn, role_key, text_key) for turn in row[name]]
    if isinstance(row.get("data"), list):
        return [(("user", "assistant")[index % 2], _text(turn)) for index, turn in enumerate(row["data"])]
    raise BadRow("none of turns, conversations, messages, data, prompt")


def _role_turn(turn, role_key: str, text_key: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise BadRow("a turn is not an object")
    role = turn.get(role_key, turn.get("role", turn.get("from")))
    if not isinstance(role, str):
        raise BadRow("a turn without a role")
    if role.lower() not in ROLES:
        raise BadRow(f"role {role.lower()!r} is not user, assistant or system")
    return ROLES[role.lower()], _text(turn.get(text_key, turn.get("content", turn.get("value"))))


def _text(value) -> str:
    if not isinstance(value, str):
        raise BadRow("a turn whose text is not a string")
    if not value.strip():
        raise BadRow("an empty turn")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("text with half a surrogate pair") from None
    return value


def _row_id(row: dict, fallback: str) -> str:
    for name in ("id", "question_id", "prompt_id"):
        if row.get(name) not in (None, ""):
            return str(row[name])
    return fallback
