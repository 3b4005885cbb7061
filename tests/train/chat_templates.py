"""Chat templates that behave as the well-known ones do, and small tokenizers to go with them.

Written for these tests: what is kept of each model is its behaviour (headers, stripping, injected or removed reasoning, refusals,
end-of-turn tokens), which is what a mask can get wrong.
"""

from dataclasses import dataclass, field
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

TAGGED = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}
{%- generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Reasoning of turns before the last question is removed; the last answer gets a think block even when it has none.
QWEN3 = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}{% if m['role'] != 'assistant' %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% else %}
{%- set content = m['content'] %}{% set reasoning = '' %}
{%- if m['reasoning_content'] is string %}{% set reasoning = m['reasoning_content'] %}
{%- elif '</think>' in content %}{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# A system message moves into the last question; roles must alternate; the answer follows a space.
MISTRAL = """{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if system else messages %}{{ bos_token }}{% for m in turns %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set last_question = loop.last or (loop.revindex0 == 1 and turns[-1]['role'] == 'assistant') %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + (system + '\n\n' if system and last_question else '') + m['content'] + '[/INST]' }}
{%- else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"""

# The end-of-turn token is not the eos token, which follows the whole conversation.
PHI = """{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# The prompt opens the reasoning, and every earlier turn loses it.
DEEPSEEK_R1 = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}
{%- elif m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}
{%- else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

VICUNA = """{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% else %}{{ 'A chat between two. ' }}{% endif %}
{%- for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] | trim + ' ' }}
{%- elif m['role'] == 'assistant' %}{{ 'ASSISTANT: ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

NO_END = """{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template and what is particular about it."""

    template: str
    specials: tuple[str, ...]
    eos: str
    end: str  # what ends an answer
    bos: str | None = None
    sentencepiece: bool = False
    system: bool = True
    strips: bool = False
    only_last: bool = False  # earlier answers are shown differently later on
    extra: tuple[str, ...] = field(default=())


FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "tagged": Family(TAGGED, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        strips=True,
    ),
    "qwen3": Family(QWEN3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>", only_last=True, extra=("<think>", "</think>")),
    "gemma": Family(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>", "<bos>", system=False, strips=True
    ),
    "mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", "<s>", sentencepiece=True, strips=True),
    "phi": Family(PHI, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"), "<|endoftext|>", "<|end|>"),
    "deepseek-r1": Family(
        DEEPSEEK_R1, ("<bos>", "<eos>", "<|User|>", "<|Assistant|>"), "<eos>", "<eos>", "<bos>", extra=("<think>", "</think>")
    ),
    "vicuna": Family(VICUNA, ("<s>", "</s>"), "</s>", "</s>", "<s>", sentencepiece=True, strips=True),
}

CORPUS = [
    "Hello there, how are you? I am well. The answer is forty-two.\n\nThat is why: because. " * 3,
    "def f(x):\n    return x + 1\n" * 3,
]


@cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """A trained toy tokenizer: byte-level BPE, or for the SentencePiece families BPE over ▁-marked words with byte fallback."""
    family = FAMILIES[name]
    if family.sentencepiece:
        core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
        )
        start = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
        core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=start, show_progress=False))
    else:
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.specials])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.extra])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=family.eos, bos_token=family.bos, chat_template=family.template, clean_up_tokenization_spaces=False
    )
