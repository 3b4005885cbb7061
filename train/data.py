"""Rows -> prompts and conversations. A row that cannot be used is counted with a reason (train/reasons.py); it never raises.

Known layouts, recognised row by row:
  {"id", "category", "turns": [str, ...]}              the starter prompts, MT-Bench (`question_id`)
  {"conversations": [{"from", "value"}, ...]}          ShareGPT (also under `items` or `conversation`)
  {"messages": [{"role", "content"}, ...]}             OpenAI, ultrachat_200k, and what train/regenerate.py writes
  {"data": [user, assistant, user, ...]}               UltraChat (raw)
  {"prompt": str}, with "response" or "completion"     one question, with or without its answer
  {"instruction", "input", "output"}                   Alpaca
  {"input_ids": [int, ...], "loss_mask": [0 or 1]}     tokens already; the mask marks the answers' own tokens
A `system` field beside the turns is the system message. File formats: train/readers.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from train.readers import RawRow, read_rows
from train.reasons import BadRow, Outcome, Report

ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", "claude"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "tool-call"),
}
RawTurn = tuple[object, object, dict | None]  # role, content, the turn itself; None when it is no object
TURN_LISTS = ("conversations", "messages", "conversation", "items")


@dataclass
class Prompt:
    """The user's side of a conversation."""

    id: str
    category: str
    turns: list[str]


@dataclass
class Conversation:
    """A whole conversation: an optional system message, then user and assistant in turn, ending with the assistant.

    `truncated`: the last answer was cut by a length limit, so its end-of-turn token must not be learned. A row that came as tokens has no
    messages but `ids` and `mask` (true on the answers' tokens).
    """

    id: str
    messages: list[dict]
    truncated: bool = False
    source: str = "none"
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)


def read_prompts(path: str | Path, limit: int | None = None, split: str | None = None) -> list[Prompt]:
    """The usable prompts of a file, at most `limit`; with `split`, only rows whose own `split` is that or absent.

    Raises SourceError when the file cannot be read.
    """
    return read_prompts_with_report(path, limit, split)[0]


def read_prompts_with_report(path: str | Path, limit: int | None = None, split: str | None = None) -> tuple[list[Prompt], Report]:
    return _collect(iter_prompts(path, split), limit)


def read_conversations(path: str | Path, limit: int | None = None) -> tuple[list[Conversation], Report]:
    """The usable conversations of a file (for training on the answers they hold)."""
    return _collect(iter_conversations(path), limit)


def iter_prompts(path: str | Path, split: str | None = None) -> Iterator[tuple[RawRow, Prompt | None, Outcome]]:
    """Every row of a file with the prompt it gives, if any, and its outcome."""

    def convert(row: dict, fallback_id: str) -> tuple[Prompt, Outcome]:
        if split and row.get("split", split) != split:
            raise BadRow("other-split")
        return _to_prompt(row, fallback_id)

    return _convert_rows(path, convert)


def iter_conversations(path: str | Path) -> Iterator[tuple[RawRow, Conversation | None, Outcome]]:
    """Every row of a file with the conversation it gives, if any, and its outcome."""
    return _convert_rows(path, _to_conversation)


def _collect(rows, limit: int | None):
    found, report = [], Report()
    for _, item, outcome in rows if limit is None or limit > 0 else ():
        report.add(outcome)
        if item is not None:
            found.append(item)
        if len(found) == limit:
            break
    return found, report


def _convert_rows(path, convert):
    for raw in read_rows(path):
        try:
            if raw.fault:
                raise BadRow(raw.fault)
            if not isinstance(raw.value, dict):
                raise BadRow("not-an-object")
            yield raw, *convert(raw.value, f"row-{raw.number}")
        except BadRow as reason:
            yield raw, None, Outcome("dropped", reason.code)


def _to_prompt(row: dict, fallback_id: str) -> tuple[Prompt, Outcome]:
    turns = Turns(_raw_turns(row), only_questions=True)
    questions = [turn["content"] for turn in turns.kept if turn["role"] == "user"]
    if not questions:
        raise BadRow(turns.fault or "no-question")
    return Prompt(_row_id(row, fallback_id), _source(row), questions), Outcome.of([turns.fault] if turns.fault else [], turns.repaired)


def _to_conversation(row: dict, fallback_id: str) -> tuple[Conversation, Outcome]:
    if isinstance(row.get("input_ids"), list):
        ids, mask = _tokens(row)
        return Conversation(_row_id(row, fallback_id), [], bool(row.get("truncated")), _source(row), ids, mask), Outcome("kept", "ok")
    turns = Turns(_raw_turns(row))
    kept, repaired = turns.kept, turns.repaired
    system = [kept.pop(0)] if kept and kept[0]["role"] == "system" else []
    while kept and kept[0]["role"] == "assistant":
        kept.pop(0)
        repaired.append("assistant-first")
    good = next((i for i, turn in enumerate(kept) if turn["role"] != ("user", "assistant")[i % 2]), len(kept))
    fault = turns.fault
    if good < len(kept):
        fault = "system-late" if kept[good]["role"] == "system" else f"consecutive-{kept[good]['role']}"
    elif good % 2 and not fault:
        fault = "unanswered-end"
    kept = kept[: good - good % 2]
    if not kept:
        raise BadRow("no-answer" if fault in (None, "unanswered-end") else fault)
    truncated = bool(row.get("truncated")) and fault is None
    outcome = Outcome.of([fault] if fault else [], repaired)
    return Conversation(_row_id(row, fallback_id), system + kept, truncated, _source(row)), outcome


class Turns:
    """The turns of a row up to the first faulty one: `kept` as {"role", "content"}, the `fault` or None, and what was `repaired`.

    `only_questions`: answers will be written anew, so what they hold does not matter. Raises BadRow for an empty list.
    """

    def __init__(self, raw_turns: list[RawTurn], only_questions: bool = False):
        if not raw_turns:
            raise BadRow("empty-row")
        self.kept: list[dict] = []
        self.repaired: list[str] = []
        self.fault: str | None = None
        for raw_role, content, turn in raw_turns:
            try:
                role = _role(raw_role, turn)
                if only_questions and role != "user":
                    continue
                self._take(role, content, turn)
            except BadRow as reason:
                self.fault = reason.code
                break

    def _take(self, role: str, content, turn: dict) -> None:
        if role == "system" and isinstance(content, str) and not content.strip():
            self.repaired.append("empty-system")
            return
        kept = {"role": role, "content": self._text(content)}
        reasoning = turn.get("reasoning_content")
        if role == "assistant" and isinstance(reasoning, str) and reasoning.strip():
            kept["reasoning_content"] = _whole_characters(reasoning)
        self.kept.append(kept)

    def _text(self, value) -> str:
        if value is None:
            raise BadRow("text-missing")
        if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
            self.repaired.append("content-parts")
            value = "".join(part if isinstance(part, str) else part["text"] for part in value)
        if not isinstance(value, str):
            raise BadRow("not-text")
        if not value.strip():
            raise BadRow("empty-turn")
        return _whole_characters(value)


def _is_text_part(part) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str))


def _whole_characters(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadRow("lone-surrogate") from None
    return text


def _raw_turns(row: dict) -> list[RawTurn]:
    """(role, content, turn) as the row has them, not yet checked."""
    turns = _turns_of_layout(row)
    system = row.get("system")
    if isinstance(system, str) and system.strip() and not (turns and turns[0][0] == "system"):
        turns.insert(0, ("system", system, {}))
    return turns


def _turns_of_layout(row: dict) -> list[RawTurn]:
    for name in TURN_LISTS:
        if isinstance(row.get(name), list):
            return [_split_turn(turn) for turn in row[name]]
    if isinstance(row.get("turns"), list):
        return [("user", text, {}) for text in row["turns"]]
    if isinstance(row.get("data"), list):
        return [(("user", "assistant")[index % 2], text, {}) for index, text in enumerate(row["data"])]
    if isinstance(row.get("instruction"), str):
        given = row.get("input")
        question = row["instruction"] + (f"\n\n{given}" if isinstance(given, str) and given.strip() else "")
        return _question(question, row.get("output"))
    if isinstance(row.get("prompt"), str):
        return _question(row["prompt"], row.get("response", row.get("completion")))
    raise BadRow("formatted-text" if isinstance(row.get("text"), str) else "unknown-layout")


def _question(question: str, answer) -> list[RawTurn]:
    return [("user", question, {})] + ([("assistant", answer, {})] if answer is not None else [])


def _split_turn(turn) -> RawTurn:
    """Keys of both conventions are looked at: tables often hold all keys, null where a row has no value."""
    if not isinstance(turn, dict):
        return None, turn, None
    role = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    content = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), None)
    return role, content, turn


def _role(role, turn: dict | None) -> str:
    if turn is None:
        raise BadRow("turn-not-an-object")
    if role is None:
        raise BadRow("role-missing")
    known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise BadRow("role-unknown")
    if known == "tool":
        raise BadRow("tool-turn")
    if known == "tool-call" or turn.get("tool_calls") or turn.get("function_call"):
        raise BadRow("tool-call")
    return known


def _tokens(row: dict) -> tuple[list[int], list[bool]]:
    ids, mask = row["input_ids"], row.get("loss_mask", row.get("assistant_masks"))
    if mask is None:
        raise BadRow("no-answer")
    well_formed = isinstance(mask, list) and len(mask) == len(ids) and all(value in (0, 1) for value in mask)
    if not well_formed or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRow("bad-tokens")
    if not ids:
        raise BadRow("empty-row")
    return ids, [bool(value) for value in mask]


def _source(row: dict) -> str:
    return str(row.get("category") or row.get("source") or "none")


def _row_id(row: dict, fallback: str) -> str:
    for name in ("id", "question_id", "prompt_id"):
        if row.get(name) not in (None, ""):
            return str(row[name])
    return fallback
