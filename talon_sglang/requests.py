"""Requests that SGLang 0.5.23 lets through and that then end the scheduler or are answered wrongly: refused with a 400 that says why.

(A token id outside the vocabulary, for one, is an index error in the embedding, and takes the whole server down.) The checks run in the
tokenizer manager of a TALON server, so they hold for `/generate`, the OpenAI endpoints and `sglang.Engine`, where they raise ValueError.
"""

from __future__ import annotations

import math

MISTAKES = (TypeError, AttributeError, KeyError, IndexError, OverflowError, UnicodeError)


async def generate_request(stock, manager, *args, **kwargs):
    """AROUND hook of `TokenizerManager.generate_request`: a request that cannot be read is the client's mistake, not a server error."""
    answered = False
    try:
        async for output in stock(manager, *args, **kwargs):
            answered = True
            yield output
    except MISTAKES as error:
        if answered or not serves_talon():
            raise
        raise ValueError(f"the request is malformed: {error}") from error


def create_tokenized_object(stock, manager, obj, input_text, input_ids, *args, **kwargs):
    """AROUND hook of `TokenizerManager._create_tokenized_object`, which builds what the scheduler receives."""
    if not serves_talon():
        return stock(manager, obj, input_text, input_ids, *args, **kwargs)
    vocab = manager.model_config.vocab_size
    check_ids(input_ids, vocab)
    tokenized = stock(manager, obj, input_text, input_ids, *args, **kwargs)
    check_request(tokenized, vocab)
    return tokenized


def serves_talon() -> bool:
    from sglang.srt.runtime_context import get_spec

    return (get_spec().speculative_algorithm or "").upper() == "TALON"


def check_ids(ids, vocab: int) -> None:
    if ids is None:
        return
    if len(ids) == 0:
        raise ValueError("the prompt is empty: it must have at least one token")
    for at, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ValueError(f"input_ids[{at}] is {token!r}: token ids are whole numbers from 0 to {vocab - 1}")


def check_request(request, vocab: int) -> None:
    params = request.sampling_params
    for name, kinds in NUMBERS.items():
        value = getattr(params, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise ValueError(f"{name} is {value!r}: it must be a {'whole number' if kinds is int else 'number'}")
    for token, bias in (params.logit_bias or {}).items():
        if not isinstance(bias, (int, float)) or not math.isfinite(bias):
            raise ValueError(f"logit_bias for token {token} is {bias!r}: it must be a finite number")
    outside = [token for token in params.stop_token_ids or () if not 0 <= token < vocab]
    if params.min_new_tokens and outside:
        raise ValueError(f"stop_token_ids holds {outside[0]}, which is outside the vocabulary (0 to {vocab - 1}), with min_new_tokens")
    if (params.beam_width or 1) > 1:
        raise ValueError(f"beam_width is {params.beam_width}: beam search is not supported with TALON, leave it out")
    if request.return_sampling_mask:
        raise ValueError("return_sampling_mask is not supported with TALON: a token may be accepted without a sampler call of its own")
    count = request.top_logprobs_num or 0
    if not isinstance(count, int) or not 0 <= count <= vocab:
        raise ValueError(f"top_logprobs_num is {count!r}: it must be from 0 to {vocab}")
    check_processor(request.custom_logit_processor)


NUMBERS = {
    "temperature": (int, float),
    "top_p": (int, float),
    "min_p": (int, float),
    "frequency_penalty": (int, float),
    "presence_penalty": (int, float),
    "repetition_penalty": (int, float),
    "top_k": int,
    "max_new_tokens": int,
    "min_new_tokens": int,
    "n": int,
}


def check_processor(serialised: str | None) -> None:
    if serialised is None:
        return
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(serialised)
    except Exception as error:  # it unpickles a class of the client's and calls it: anything can go wrong
        raise ValueError(f"custom_logit_processor cannot be loaded ({type(error).__name__}: {error}): send Processor.to_str()") from error
