"""The draft worker for SGLang's stock Triton attention backend: the fixed-shape round of `round.py` around SGLang's draft model.

It runs today in Triton's interpreter on a CPU, without graphs. docs/gpu.md lists what a CUDA device needs beyond it.

Suffixes: B requests, N tree nodes, R and C rows and columns of SGLang's table of KV slots.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft

from talon_sglang.gpu.loop import DraftLoop
from talon_sglang.gpu.masks import full_mask
from talon_sglang.gpu.round import Lanes, StaticRound
from talon_sglang.verify_input import build_verify_input
from talon_sglang.worker import TalonDraftWorker


class TritonDraftWorker(TalonDraftWorker):
    def init_attention_backend(self):
        super().init_attention_backend()
        self.tree_attention = TritonAttnBackend(self.draft_runner, skip_prefill=True)
        self.tree_mask_mode = TreeMaskMode.FULL_MASK  # what the Triton backend reads; SGLang's default on a CPU is another one
        self._rounds: dict[int, tuple[StaticRound, DraftLoop]] = {}

    def grow_trees(self, batch):
        state, n = batch.spec_info, self.tree_config.node_budget
        self._state = state
        self._forward_batch, _, _ = prepare_for_draft(state, self.req_to_token_pool, batch, None, self.draft_runner, topk=1, num_steps=n)
        slots_BN = batch.out_cache_loc.view(-1, n)
        shared, loop = self._round(slots_BN.shape[0], state.hidden_states)
        shared.load(batch.seq_lens, batch.req_pool_indices, slots_BN, state.topk_p, state.topk_index, state.hidden_states)
        loop.run()

        trees = self.trees = shared.trees
        tokens_BN = self.target_ids(trees.tokens_BN.clamp(min=0))
        verify_input = build_verify_input(trees, state.bonus_tokens, tokens_BN, batch.seq_lens, slots_BN)
        entries = n * int(batch.seq_lens_cpu.sum()) + trees.ancestors_BNN.numel()
        verify_input.custom_mask = full_mask(verify_input.custom_mask.view(-1, n, n), batch.seq_lens, entries)
        self.target_tokens_BN = verify_input.draft_token.view_as(tokens_BN)
        return verify_input

    def _round(self, batch: int, hidden: torch.Tensor) -> tuple[StaticRound, DraftLoop]:
        """The buffers and the loop for that many requests."""
        if batch not in self._rounds:
            vocab = self.draft_runner.model_config.vocab_size if self.hot_token_id is None else self.hot_token_id.numel()
            table_RC = self.req_to_token_pool.req_to_token
            shared = StaticRound(batch, self.tree_config, vocab, hidden.shape[-1], table_RC, self._forward_lanes, hidden_dtype=hidden.dtype)
            self._rounds[batch] = shared, DraftLoop(shared.trees, shared.begin, shared.step)
        return self._rounds[batch]

    def _forward_lanes(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward of SGLang's draft model; its attention reads the lanes' lists as it would read those of stock draft steps."""
        state, forward_batch = self._state, self._forward_batch
        state.hidden_states, state.kv_indptr, state.kv_indices = lanes.hidden_LH, lanes.kv_indptr, lanes.kv_indices
        forward_batch.input_ids = self.target_ids(lanes.tokens_L)
        forward_batch.positions, forward_batch.out_cache_loc = lanes.positions_L, lanes.slots_L
        self.tree_attention.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        with forward_context(ForwardContext(attn_backend=self.tree_attention), forward_batch=forward_batch):
            output = self.draft_runner.forward(forward_batch).logits_output
        return output.next_token_logits, output.hidden_states
