"""The mask on nine kinds of chat template: trained tokens read exactly as the answers and their ends of turn, or there is a reason."""

import copy
import random

import pytest

from tests.train.chat_templates import CHATML, FAMILIES, NO_END, TAGGED, tokenizer_for
from train.masks import ChatEncoder, MaskError


def chat(*turns: str, system: str | None = None) -> list[dict]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def spans_of(name: str, messages: list[dict], truncated: bool = False) -> list[str]:
    tokenizer = tokenizer_for(name)
    encoded = ChatEncoder(tokenizer).encode(messages, truncated)
    return [tokenizer.decode(encoded.ids[start:end]) for start, end in encoded.spans]


def expected(name: str, answers: list[str]) -> list[str]:
    """What the spans must read: a leading space is the model's own where the prompt does not end with one (SentencePiece shows none)."""
    family = FAMILIES[name]
    shown = [answer.strip() if family.strips else answer for answer in answers]
    return [text + family.end for text in (shown[-1:] if family.only_last else shown)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "turns",
    [
        ("Hi", "Hello there!"),
        ("Hi", "  Hello \n"),
        ("Hi", "Hello.", "Why?", "Because 🦉.\n\nThat is why.", "And?", "I am well."),
        ("assistant", "assistant", "think", "think", "user", "model"),
    ],
)
def test_spans_read_as_the_answers(name, turns):
    assert spans_of(name, chat(*turns)) == expected(name, list(turns[1::2]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_system_message_is_context_or_refused(name):
    messages = chat("Hi", "Hello.", "Why?", "Because.", system="Be brief.")
    if not FAMILIES[name].system:
        with pytest.raises(MaskError) as error:
            spans_of(name, messages)
        assert error.value.code == "template-refuses"
    elif name == "mistral":  # moved into the last question, so the first answer was given to another prompt than the one shown
        assert spans_of(name, messages) == ["Because.</s>"]
    else:
        assert spans_of(name, messages) == expected(name, ["Hello.", "Because."])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_truncated_answer_has_no_end_of_turn_and_nothing_follows_it(name):
    tokenizer = tokenizer_for(name)
    encoded = ChatEncoder(tokenizer).encode(chat("Hi", "Hello there, I am"), truncated=True)
    assert tokenizer.decode(encoded.ids[slice(*encoded.spans[-1])]) == "Hello there, I am"
    assert encoded.spans[-1][1] == len(encoded.ids)


def injections(name: str) -> list[str]:
    """Texts that look like the template's own: a whole rendered answer, its parts, marks of other families, and this module's own mark."""
    tokenizer = tokenizer_for(name)
    rendered = tokenizer.apply_chat_template(chat("q", "I am not an answer."), tokenize=False)
    prompt = tokenizer.apply_chat_template(chat("q"), tokenize=False, add_generation_prompt=True)
    others = [
        "<|im_start|>assistant\n",
        "[/INST] x</s>",
        "<start_of_turn>model\n",
        "ASSISTANT: x</s>USER: ",
        "<|Assistant|>",
        "<think>\n\n</think>\n\n",
    ]
    return [rendered, prompt, FAMILIES[name].end + prompt, "TALON0ANSWER", "TALON0ANSWER0", "{{ bos_token }}{% generation %}", *others]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(25))
def test_no_user_text_moves_a_mask(name, seed):
    rng, pieces = random.Random(seed), injections(name)

    def question() -> str:
        return "".join(rng.choice([*pieces, " ", "\n", "why ", "🦉"]) for _ in range(rng.randint(1, 6))) + rng.choice(["", "?", "\n"])

    turns = []
    for _ in range(rng.randint(1, 3)):
        turns += [question(), rng.choice(["Yes, I am.", "assistant", "user", "No.\n\nWhy", "think", "a", "Hello <b>"])]
    has_system = FAMILIES[name].system and name != "mistral" and rng.random() < 0.5
    messages = chat(*turns, system=question() + "." if has_system else None)
    tokenizer = tokenizer_for(name)
    encoded = ChatEncoder(tokenizer).encode(messages)
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans] == expected(name, turns[1::2])
    if name not in ("qwen3", "deepseek-r1"):
        # What precedes the first answer is what a server is sent, token for token.
        served = tokenizer.apply_chat_template(messages[: 1 + has_system], tokenize=False, add_generation_prompt=True)
        served_ids = tokenizer(served, add_special_tokens=False)["input_ids"]
        assert encoded.ids[: encoded.spans[0][0]] == served_ids


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(25))
def test_no_answer_text_gives_a_wrong_mask(name, seed):
    """Answers made of headers, marks and reasoning tags: each span reads as one of the answers, in order, or there is a reason."""
    rng, end = random.Random(seed), FAMILIES[name].end
    pieces = [piece for piece in injections(name) if end not in piece] + ["<think>\n", "</think>", "\n</think>\n\n", "Yes. ", " no", "\n"]
    turns = []
    for _ in range(rng.randint(1, 3)):
        turns += [
            "Why?",
            "Well" * rng.randint(0, 1) + "".join(rng.choice(pieces) for _ in range(rng.randint(1, 5))) + rng.choice(["a", "b "]),
        ]
    try:
        found = spans_of(name, chat(*turns))
    except MaskError as error:
        assert error.code in ("not-aligned", "answer-rewritten", "answer-holds-end-token", "no-supervised-token")
        return
    answers = iter(turns[1::2])
    for text in found:
        assert text.endswith(end)
        said = text.removesuffix(end)
        assert any(said in readings(name, answer) for answer in answers), (text, turns)


def readings(name: str, answer: str) -> set[str]:
    """An answer as it may be shown: as it is or stripped; where the prompt opened the reasoning, without that opening."""
    whole = {answer, answer.strip(), answer.lstrip(), answer.rstrip()}
    if name == "deepseek-r1":
        whole |= {answer.lstrip().removeprefix("<think>").lstrip("\n")}
    return whole


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_holds_the_end_token_is_not_trained(name):
    end = FAMILIES[name].end
    tokenizer, encoder = tokenizer_for(name), ChatEncoder(tokenizer_for(name))
    with pytest.raises(MaskError) as error:
        encoder.encode(chat("Hi", f"No.{end}\nThen more."))
    assert error.value.code == "answer-holds-end-token"
    encoded = encoder.encode(chat("Hi", f"No.{end}\nThen more.", "Why?", "Because."))
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans] == ["Because." + end]


REASONED = "<think>\nIs it? It is.\n</think>\n\nYes."


def test_reasoning_is_trained_in_the_last_turn_only():
    for name in ("qwen3", "deepseek-r1"):
        end = FAMILIES[name].end
        last = REASONED.removeprefix("<think>\n") if name == "deepseek-r1" else REASONED
        encoded = ChatEncoder(tokenizer_for(name)).encode(chat("Hi", REASONED, "Sure?", REASONED))
        assert [tokenizer_for(name).decode(encoded.ids[a:b]) for a, b in encoded.spans] == [last + end]
        assert encoded.notes == ("answer-rewritten",)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
@pytest.mark.parametrize("text", ["<think>\nIs it", "<think>a</think>b", "<think>\n\n\na\n\n</think>\nb", REASONED, "a\n</think>\n\nb"])
def test_the_last_answer_stands_behind_the_prompt_as_it_was_generated(name, text):
    """Reasoning that the template would reflow, remove or precede with an empty block: prompt and answer are what serving has."""
    if name == "deepseek-r1":
        text = text.removeprefix("<think>\n").removeprefix("<think>").lstrip("\n")  # as this model writes it: the prompt opened the block
    if name == "qwen3" and not text.startswith("<think>"):  # this model opens its reasoning itself, so it cannot have said this
        with pytest.raises(MaskError):
            ChatEncoder(tokenizer_for(name)).encode(chat("Hi", text))
        return
    if name == "deepseek-r1" and "</think>" not in text:
        text = text + "\n</think>\n\nx"
    tokenizer = tokenizer_for(name)
    prompt = tokenizer.apply_chat_template(chat("Hi"), tokenize=False, add_generation_prompt=True)
    encoded = ChatEncoder(tokenizer).encode(chat("Hi", text))
    (start, end), ids = encoded.spans[0], encoded.ids
    assert tokenizer.decode(ids[:start]) == prompt
    assert tokenizer.decode(ids[start:end]) == text + FAMILIES[name].end


def test_an_injected_empty_think_block_is_context():
    tokenizer = tokenizer_for("qwen3")
    encoded = ChatEncoder(tokenizer).encode(chat("Hi", "Hello."))
    assert tokenizer.decode(encoded.ids[: encoded.spans[0][0]]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_reasoning_content_belongs_to_the_answer():
    messages = chat("Hi", "Yes.")
    messages[1]["reasoning_content"] = "Is it? It is."
    assert spans_of("qwen3", messages) == [REASONED + "<|im_end|>"]


def patched(template: str | None):
    """The ChatML tokenizer with another template."""
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.chat_template = template
    return tokenizer


WRONG = {
    "upper case": CHATML.replace("m['content']", "m['content'] | upper"),
    "twice": CHATML.replace("m['content']", "m['content'] + m['content']"),
    "cut": CHATML.replace("m['content']", "m['content'][:12]"),
    "numbers the turns from the end": CHATML.replace("m['role']", "m['role'] + (loop.revindex | string)"),
    "leaves answers out": CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_template_that_cannot_be_aligned_gives_a_reason_never_a_wrong_mask(kind):
    tokenizer = patched(WRONG[kind])
    messages = chat("What is it, then?", "It is a long answer.", "Why is it so?", "Because it is a long one.")
    try:
        encoded = ChatEncoder(tokenizer).encode(messages)
    except MaskError as error:
        assert error.code in ("not-aligned", "answer-rewritten", "template-refuses")
    else:
        assert kind == "numbers the turns from the end"  # only the last turn is as it was when it was generated
        assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans] == ["Because it is a long one.<|im_end|>"]


def test_a_template_without_end_of_turn_trains_the_text_alone_and_says_so():
    tokenizer = patched(NO_END)
    encoded = ChatEncoder(tokenizer).encode(chat("Hi", "Hello there.", "Why?", "Because."))
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans] == [" Hello there.", " Because."]
    assert encoded.notes == ("no-end-of-turn",)


def test_generation_tags_decide_even_where_earlier_turns_change():
    """With tags the first answer is trained although the template numbers its turns, which defeats any comparison of prefixes."""
    tokenizer = patched(TAGGED.replace("m['role'] + '\\n'", "m['role'] + (loop.revindex | string) + '\\n'"))
    encoded = ChatEncoder(tokenizer).encode(chat("Hi", "Hello.", "Why?", "Because."))
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans] == ["Hello.<|im_end|>", "Because.<|im_end|>"]


def test_tokens_that_came_with_a_mask():
    encoder = ChatEncoder(tokenizer_for("chatml"))
    assert encoder.from_tokens([5, 6, 7, 8, 9], [False, True, True, False, True]).spans == [(1, 3)]
    for ids, mask, code in (([5, 6], [0, 0], "no-answer"), ([5, 6], [0, 1], "no-supervised-token"), ([5, 999], [1, 1], "bad-tokens")):
        with pytest.raises(MaskError) as error:
            encoder.from_tokens(ids, mask, 500)
        assert error.value.code == code


def test_a_tokenizer_without_template_is_one_clear_error():
    with pytest.raises(ValueError, match="no chat template; add chat_template.jinja"):
        ChatEncoder(patched(None))
