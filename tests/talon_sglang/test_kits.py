"""SGLang's own shipped test kits, unmodified, against a TALON server: SmolLM2 with a trained head, fp32.

The kits import `datasets`, which the `hub` extra brings; without it they are skipped. Those with hundreds of long requests are left out.
"""

import unittest

import pytest

pytest.importorskip("sglang", reason="needs SGLang")
from sglang.srt.utils.hf_transformers_utils import get_tokenizer  # noqa: E402

kits = pytest.importorskip("sglang.test.kits.spec_server_kits", reason="needs what SGLang's test kits import")
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin  # noqa: E402
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase  # noqa: E402

from eval.servers import ServerSpec, serve  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(target_dir, shared_dir):
    head = shared_dir / "heads" / "smollm2-135m-eagle3-8k"
    spec = ServerSpec(target_dir, head, "TALON", nodes=16, width=4, max_running_requests=16, max_total_tokens=40_000, threads=1)
    with serve(spec) as running:
        yield running


@pytest.fixture(scope="class")
def kit(request, server, target_dir):
    request.cls.base_url, request.cls.model, request.cls.process = server.url, str(target_dir), None
    request.cls.tokenizer = get_tokenizer(str(target_dir))


@pytest.mark.usefixtures("kit")
class TestLight(kits.SpecPenaltyKit, kits.SpecGrammarKit, BasicAPIContractMixin, unittest.TestCase):
    run_decode = SpecEagleServerBase.run_decode  # the kits' own helper, without their server


@pytest.mark.usefixtures("kit")
class TestLogprobs(unittest.TestCase):
    logprob_match_delta = kits.SpecLogprobKit.logprob_match_delta
    test_start_len = kits.SpecLogprobKit.test_logprob_start_len
    test_decode_matches_prefill = kits.SpecLogprobKit.test_logprob_decode_match_prefill
    test_ragged_token_ids = kits.SpecLogprobKit.test_token_ids_logprob_ragged
