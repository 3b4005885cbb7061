"""Where the answers are in what a chat template renders: exact character spans, for any template, or none.

An answer is found in three renderings of the conversation: the whole; the turns before the answer with the generation prompt (what a server
would send); and the turns up to it with the answer's text replaced by a mark. The mark shows what the template puts before and after the
text, and then the whole rendering must hold exactly: the part before, the text (as it is or stripped), the part after. No header is
searched for, so nothing inside a message can move a boundary. A template whose `{% generation %}` tags mark exactly an answer is taken at
its word.

Templates of thinking models need three more rules.
- Text that the template injects between the generation prompt and the answer (an empty think block) is context. White space is not: the
  model itself must write it.
- An answer that the template shows differently once the conversation goes on (reasoning removed from earlier turns) is context.
- The last answer, when the template would remove or reflow its reasoning, is put behind the generation prompt as it is: so it arises in
  serving, and so train/regenerate.py recorded it.
"""

import re
from dataclasses import dataclass

from jinja2 import TemplateError

from train.reasons import BadRow

MARK = "TALON0ANSWER"
REASONING = re.compile(r"</?\w*think\w*>|\[/?THINK\]|</?reasoning>", re.IGNORECASE)


@dataclass
class Rendered:
    """`text`, and the half-open character spans of its answers, each with its end-of-turn token if the template writes one.

    `notes`: codes of train/reasons.py about answers that are context only, or lack an end of turn. `last`: the last answer has a span.
    """

    text: str
    spans: list[tuple[int, int]]
    notes: list[str]
    last: bool = False


class ChatRenderer:
    """Renders conversations with a tokenizer's own template."""

    def __init__(self, tokenizer, special_texts: list[str]):
        self.tokenizer = tokenizer
        longest_first = sorted((text for text in special_texts if text), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.tagged = bool(re.search(r"\{%-?\s*generation\b", _template_text(tokenizer)))

    def render(self, messages: list[dict], generation_prompt: bool) -> str:
        """Raises BadRow when the template refuses the messages."""
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        except (TemplateError, TypeError, KeyError, IndexError, AttributeError):  # templates raise, or stumble over what they do not expect
            raise BadRow("template-refuses") from None

    def locate(self, messages: list[dict]) -> Rendered:
        """Raises BadRow when the template refuses the messages or no answer can be located."""
        whole = self.render(messages, False)
        found = Rendered(whole, [], [])
        tagged = self._tagged_blocks(messages, whole)
        for index in [index for index, message in enumerate(messages) if message["role"] == "assistant"]:
            done = found.spans[-1][1] if found.spans else 0
            span = self._in_a_block(tagged, messages[index], found, done) or self._find(messages, index, found, done)
            if span is not None:
                found.spans.append(span)
            found.last = span is not None
        if not found.spans:
            raise BadRow("answer-rewritten" if "answer-rewritten" in found.notes else "not-aligned")
        return found

    def _find(self, messages: list[dict], index: int, found: Rendered, done: int) -> tuple[int, int] | None:
        """The span of one answer by its renderings; `found.text` changes when the last answer has to be shown as it was generated."""
        frame = self._frame(messages, index)
        if frame is None:
            found.notes.append("not-aligned")
            return None
        before, head, tail = frame
        end = self._end_of_turn(tail)
        if end is None:
            found.notes.append("no-end-of-turn")
        end = end or ""
        last = index == len(messages) - 1
        for start, text in self._candidates(messages[index], before, head):
            closing = tail if last and not end else end
            if len(start) >= done and found.text.startswith(start + text + closing):
                return len(start), len(start) + len(text) + len(end)
        if last and found.text.startswith(before[:done]) and len(before) >= done:
            text = self._as_generated(messages[index], before, head, tail, found.text)
            if text is not None:
                found.text = before + text + tail
                return len(before), len(before) + len(text) + len(end)
        found.notes.append("answer-rewritten" if self._stood_alone(messages, index, before, head, end) else "not-aligned")
        return None

    def _frame(self, messages: list[dict], index: int) -> tuple[str, str, str] | None:
        """(prompt that a server sends, what precedes the text, what follows it) when this answer is the last turn."""
        mark = MARK
        while any(mark in str(message.get("content")) for message in messages[:index]):
            mark += "0"
        marked = [*messages[:index], {**messages[index], "content": mark}]
        try:
            before, around = self.render(messages[:index], True), self.render(marked, False)
        except BadRow:
            return None
        if around.count(mark) != 1:
            return None
        head, _, tail = around.partition(mark)
        return before, head, tail

    def _candidates(self, message: dict, before: str, head: str):
        """(text up to the answer, answer) in the ways a template may show it whole; the first that fits is it."""
        content = message["content"]
        spans_injection = head.startswith(before)
        injected = head[len(before) :] if spans_injection else ""
        reasoned = message.get("reasoning_content")
        opens_twice = bool(REASONING.search(injected)) and bool(REASONING.search(content)) and not reasoned
        if REASONING.search(content):
            yield from ((before, text) for text in _variants(content))
        if reasoned and spans_injection and reasoned.strip() in injected:
            yield from ((before, injected + text) for text in _variants(content))
        elif not opens_twice:
            if spans_injection and not injected.strip():
                yield from ((before, injected + text) for text in _variants(content))
            yield from ((head, text) for text in _variants(content))

    def _as_generated(self, message: dict, before: str, head: str, tail: str, whole: str) -> str | None:
        """The last answer with its reasoning, where the template shows less of it, or the same with other white space."""
        content = message["content"]
        if not REASONING.search(content) or message.get("reasoning_content"):
            return None
        opening = REASONING.search(before[-40:].rstrip()[-12:])
        if opening and before.rstrip().endswith(opening.group()) and content.lstrip().startswith(opening.group()):
            content = content.lstrip().removeprefix(opening.group()).lstrip("\n")  # the prompt already opened it
        if not whole.endswith(tail):
            return None
        shown = whole[: len(whole) - len(tail)] if tail else whole
        for start in (before, head):
            if shown.startswith(start) and _squeezed(message["content"]).endswith(_squeezed(shown[len(start) :])):
                return content
        return None

    def _stood_alone(self, messages: list[dict], index: int, before: str, head: str, end: str) -> bool:
        """Would this answer be located if the conversation ended with it?"""
        if index == len(messages) - 1:
            return False
        try:
            alone = self.render(messages[: index + 1], False)
        except BadRow:
            return False
        if REASONING.search(messages[index]["content"]):
            return True
        return any(alone.startswith(start + text + end) for start, text in self._candidates(messages[index], before, head))

    def _end_of_turn(self, tail: str) -> str | None:
        """`tail` up to and including its first special token."""
        match = self.special.search(tail)
        return tail[: match.end()] if match else None

    def _tagged_blocks(self, messages: list[dict], whole: str) -> list[tuple[int, int]]:
        """Character spans of the template's `{% generation %}` blocks, if it has any."""
        if not self.tagged:
            return []
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {name: text for name, text in self.tokenizer.special_tokens_map.items() if isinstance(text, str)}
        rendered, blocks = render_jinja_template(
            [messages],
            chat_template=_template_text(self.tokenizer),
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **special,
        )
        return list(blocks[0]) if rendered[0] == whole else []

    def _in_a_block(self, blocks: list[tuple[int, int]], message: dict, found: Rendered, done: int) -> tuple[int, int] | None:
        """The span of an answer by the first unused block that is exactly it, apart from white space and its end-of-turn token."""
        for start, end in blocks:
            for text in _variants(message["content"]) if start >= done else ():
                lead, _, tail = found.text[start:end].partition(text)
                if _squeezed(lead) == _squeezed(message.get("reasoning_content") or "") and not self.special.sub("", tail, count=1).strip():
                    closing = start + len(lead) + len(text)
                    ending = self._end_of_turn(tail) or self._end_of_turn_at(found.text, closing)
                    if not ending:
                        found.notes.append("no-end-of-turn")
                    return start, closing + len(ending)
        return None

    def _end_of_turn_at(self, text: str, place: int) -> str:
        match = self.special.match(text, place)  # some templates leave it just outside the block
        return match.group() if match else ""


def _variants(content: str) -> list[str]:
    """How a template may show a text whole: as it is, or without white space around it."""
    return list(dict.fromkeys((content, content.rstrip(), content.lstrip(), content.strip(), content.strip("\n"))))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _template_text(tokenizer) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default", "")
    return template or ""
