"""SGLang's own shipped test kits, unmodified, against a TALON server: SmolLM2 with a trained head, fp32.

The light ones run with the suite. TALON_KITS=all adds those that take minutes. docs/compatibility.md says which cannot run here.
"""

import os
import unittest

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
from sglang.srt.utils.hf_transformers_utils import get_tokenizer  # noqa: E402

kits = pytest.importorskip("sglang.test.kits.spec_server_kits", reason="needs what SGLang's test kits import")
from sglang.test.kits.abort_timeout_kit import AbortAllMixin  # noqa: E402
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin  # noqa: E402
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin  # noqa: E402
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin  # noqa: E402
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin  # noqa: E402
from sglang.test.kits.matched_stop_kit import MatchedStopMixin  # noqa: E402
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin  # noqa: E402
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin  # noqa: E402
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase  # noqa: E402

from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING, HIDDEN, VOCAB, head_config, head_weights, target_config, target_weights, tokenizer, write  # noqa: E402

pytestmark = pytest.mark.slow
long = pytest.mark.skipif(os.environ.get("TALON_KITS") != "all", reason="takes minutes; TALON_KITS=all runs it")


@pytest.fixture(scope="module")
def server(target_dir, shared_dir):
    head = shared_dir / "heads" / "smollm2-135m-eagle3-8k"
    settings = dict(nodes=16, width=4, max_running_requests=16, max_total_tokens=40_000, threads=1, launcher=FORKING)
    with serve(ServerSpec(target_dir, head, "TALON", **settings)) as running:
        yield running


def hand_over(cls, server, model, tokens) -> None:
    """What the kits expect from SGLang's own fixtures."""
    cls.base_url, cls.model, cls.process, cls.tokenizer = server.url, str(model), server._process, tokens


@pytest.fixture(scope="class")
def kit(request, server, target_dir):
    hand_over(request.cls, server, target_dir, get_tokenizer(str(target_dir)))


@pytest.mark.usefixtures("kit")
class TestLight(kits.SpecGrammarKit, BasicAPIContractMixin, RegexConstrainedMixin, EBNFConstrainedMixin, unittest.TestCase):
    # These leave the length of a word or a text to the model, at temperature 0.5. SmolLM2 does not always end one within the kit's 128
    # tokens, speculation or not.
    test_ebnf_generate_custom_log_format = test_regex_generate_custom_log_format = None
    test_ebnf_generate_complex_json = test_regex_generate_complex_json = None
    test_ebnf_generate_all_optional_function_params = None  # in TestLong


@pytest.mark.usefixtures("kit")
class TestShortParts(unittest.TestCase):
    """Those tests of longer kits that are short."""

    logprob_match_delta = kits.SpecLogprobKit.logprob_match_delta
    batch_accept_len_thres = 1.3  # a tunable of the kit; ours is a small head
    test_start_len = kits.SpecLogprobKit.test_logprob_start_len
    test_decode_matches_prefill = kits.SpecLogprobKit.test_logprob_decode_match_prefill
    test_ragged_token_ids = kits.SpecLogprobKit.test_token_ids_logprob_ragged
    test_batch_generation = kits.SpecCorrectnessKit.test_batch_generation
    test_first_token_finish = kits.SpecCorrectnessKit.test_first_token_finish

    json_schema = JSONConstrainedMixin.json_schema
    _run_decode_json = JSONConstrainedMixin._run_decode_json
    test_json_invalid = JSONConstrainedMixin.test_json_invalid
    test_json_openai = JSONConstrainedMixin.test_json_openai

    _run_completions_generation = MatchedStopMixin._run_completions_generation
    _run_chat_completions_generation = MatchedStopMixin._run_chat_completions_generation
    test_finish_length = MatchedStopMixin.test_finish_length

    _decode_generate = BasicDecodeCorrectnessMixin._decode_generate
    test_max_token_one = BasicDecodeCorrectnessMixin.test_max_token_one


@long
@pytest.mark.usefixtures("kit")
class TestLong(
    AbortAllMixin,
    PauseResumeInPlaceMixin,
    MatchedStopMixin,
    JSONConstrainedMixin,
    BasicDecodeCorrectnessMixin,
    kits.SpecLogprobKit,
    kits.SpecPenaltyKit,
    unittest.TestCase,
):
    run_decode = SpecEagleServerBase.run_decode  # the kits' own helper, without their server
    ebnf_grammar, _run_decode_ebnf = EBNFConstrainedMixin.ebnf_grammar, EBNFConstrainedMixin._run_decode_ebnf
    regex_match = EBNFConstrainedMixin.regex_match
    test_ebnf_generate_all_optional_function_params = EBNFConstrainedMixin.test_ebnf_generate_all_optional_function_params
    test_json_generate = test_mix_json_and_other = None  # SmolLM2's greedy answer is a number that does not end in 128 tokens
    pause_max_new_tokens = 64
    pause_num_requests = 8
    test_request_abort = kits.SpecFeatureKit.test_request_abort
    test_constrained_decoding = kits.SpecFeatureKit.test_constrained_decoding
    test_eos_token = kits.SpecCorrectnessKit.test_eos_token
    send_request, send_requests_abort = SpecEagleServerBase.send_request, SpecEagleServerBase.send_requests_abort


def write_wide_toy(folder):
    """(target, head): the toy with random embeddings for the 32,000 token ids of the radix kit; the head proposes 64 of them."""
    vocab, generator = 32_000, torch.Generator().manual_seed(0)
    wide = {"vocab_size": vocab, "max_position_embeddings": 8192}
    random = {f"{name}.weight": torch.randn(vocab, HIDDEN, generator=generator) * 0.3 for name in ("model.embed_tokens", "lm_head")}
    write(folder / "target", target_config() | wide, target_weights() | random)
    tokenizer().save_pretrained(folder / "target")
    d2t = {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}  # draft id i is target id i
    write(folder / "head", head_config() | wide | {"draft_vocab_size": VOCAB}, head_weights() | d2t)
    return folder / "target", folder / "head"


@pytest.fixture(scope="class")
def wide_kit(request, tmp_path_factory):
    target, head = write_wide_toy(tmp_path_factory.mktemp("wide"))
    extra = ("--skip-tokenizer-init",)
    settings = dict(nodes=6, width=2, max_running_requests=48, max_total_tokens=30_000, threads=1, extra=extra, launcher=FORKING)
    with serve(ServerSpec(target, head, "TALON", **settings)) as server:
        hand_over(request.cls, server, target, None)
        yield


@long
@pytest.mark.usefixtures("wide_kit")
class TestRadix(unittest.TestCase):
    """400 prompts that grow out of each other, up to thousands of tokens, 256 tokens each: a toy, or it would take an hour."""

    test_radix_attention = kits.SpecFeatureKit.test_radix_attention
