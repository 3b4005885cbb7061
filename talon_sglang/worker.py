"""The TALON worker: SGLang's EAGLE-3 worker with another way to draft.

One decode round of a batch (`EAGLEWorkerV2.forward_batch_generation`):
    draft         TalonDraftWorker.draft: grow each request's tree layer by layer, one draft forward a layer over the frontier nodes of all
    requests
    target verify inherited; the width is N, whatever the shapes (less under a batch budget, the same for all requests)
    accept        inherited; KV of the accepted path is moved to the front
    draft extend  inherited, over the accepted tokens; gives the next round's root distribution and hidden state

Suffixes: B requests, L lanes, N node budget, H hidden size, V draft vocabulary, K root candidates.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

from talon_sglang.catch_up import empty_draft_state, forget, postpone, postponed
from talon_sglang.clock import Clock
from talon_sglang.draft_attention import CpuTreeAttention
from talon_sglang.node_logits import committed_penalties, needs_node_logits
from talon_sglang.observe import Observer
from talon_sglang.patches import exact_verify, root_candidates_as_log_probs
from talon_sglang.seeds import SeededSampler, with_seeds
from talon_sglang.settings import TalonSettings
from talon_sglang.tree import TreeBatch, exact_topk
from talon_sglang.verify_input import build_verify_input


class TalonWorker(EAGLEWorkerV2):
    def __init__(self, server_args, gpu_id, nccl_port, target_worker):
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.settings = settings = TalonSettings.handed_over()
        # EAGLEWorkerV2 names its draft worker's class in the constructor. Backends and graphs are built later, so the class can still
        # change here, and nothing of the constructor needs a copy.
        self._draft_worker.__class__ = draft_worker_class(server_args)
        self._draft_worker.tree_config = settings.tree
        target_worker.model_runner.sampler.__class__ = SeededSampler  # the same state, other draws for requests with seeds
        runner = self._draft_worker.draft_runner
        runner.weight_updater = HeadUpdater(**{field.name: getattr(runner.weight_updater, field.name) for field in fields(WeightUpdater)})
        self.observer = Observer(settings.trace)
        self.clock = self._draft_worker.clock = Clock()
        self.clock.wrap_forward(target_worker, "forward_batch_generation")
        self.clock.wrap_forward(self._draft_worker.draft_runner, "forward")

    def forward_batch_generation(self, batch, *args, **kwargs):
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if not prefill:
            self.share_budget(len(batch.reqs))
        with self.clock.phase("prefill" if prefill else "other"):
            result = super().forward_batch_generation(batch, *args, **kwargs)
        self.observer.time(self.clock.take())
        return result

    def share_budget(self, requests: int) -> None:
        """The size of this round's trees. SGLang takes the width of a round from its result, so it may change from round to round."""
        draft, tree = self._draft_worker, self.settings.tree_for(requests)
        draft.tree_config = tree
        self.speculative_num_draft_tokens = draft.speculative_num_draft_tokens = tree.node_budget

    def verify(self, batch, *args, **kwargs):
        draft = self._draft_worker
        exact = exact_verify(self.target_worker.model_runner.sampler, lambda: (draft.trees, draft.target_tokens_BN))
        with self.clock.phase("verify"), exact:
            result = super().verify(batch, *args, **kwargs)
        with self.clock.phase("observe"):
            self.observer.round(batch, draft.trees, draft.target_tokens_BN, result)
        return result

    def _forward_prefill_batch(self, batch, *args, **kwargs):
        forget(batch.reqs)
        given = info = batch.sampling_info
        if needs_node_logits(info) and any(req.output_ids for req in batch.reqs):  # retracted earlier: mind what they said
            additive_BV, scaling_BV = committed_penalties(batch.reqs, info.vocab_size, batch.device)
            info = replace(info, acc_additive_penalties=additive_BV, acc_scaling_penalties=scaling_BV)
        batch.sampling_info = with_seeds(info, batch.reqs)
        try:
            return super()._forward_prefill_batch(batch, *args, **kwargs)
        finally:
            batch.sampling_info = given


class TalonDraftWorker(EagleDraftWorker):
    tree_config = None  # set by TalonWorker
    clock: Clock  # set by TalonWorker
    trees: TreeBatch  # the current round's
    target_tokens_BN: torch.Tensor  # the same nodes as target ids, root included

    def init_attention_backend(self):
        super().init_attention_backend()  # draft extend's; SGLang builds no multi-step backend for one step
        self.tree_attention = CpuTreeAttention(self.draft_runner)

    # ------------------------------------------------------------ draft

    def draft(self, batch):
        with self.clock.phase("draft"):
            if self.tree_config.node_budget > 1:
                self.catch_up(batch)
            return self.grow_trees(batch)

    def catch_up(self, batch):
        """The draft reads what it has not read of each request's committed tokens: draft extend, as late as possible (catch_up.py)."""
        state = batch.spec_info
        for b, req in enumerate(batch.reqs):
            features_PF = postponed(req)
            if features_PF is None:
                continue
            forget([req])
            rows, seq_len, index = len(features_PF), int(batch.seq_lens_cpu[b]), int(batch.req_pool_indices[b])
            roots, hidden_BH = (state.topk_p, state.topk_index), state.hidden_states
            forward_batch, _, _ = prepare_for_draft(state, self.req_to_token_pool, batch, None, self.draft_runner, topk=1, num_steps=1)
            forward_batch.mark_forward_metadata_ready()
            forward_batch.positions = torch.arange(seq_len - rows, seq_len)
            forward_batch.input_ids = torch.tensor(req.output_ids[-rows:])
            forward_batch.out_cache_loc = self.req_to_token_pool.req_to_token[index, seq_len - rows : seq_len].long()
            state.hidden_states = features_PF
            self.tree_attention.plan_chain(seq_len, index, rows)
            with forward_context(ForwardContext(attn_backend=self.tree_attention), forward_batch=forward_batch):
                output = self.draft_runner.forward(forward_batch).logits_output
            width = min(self.topk, output.next_token_logits.shape[-1])
            for root_BK, new_1K in zip(roots, exact_topk(output.next_token_logits[-1:].float().log_softmax(-1), width)):
                root_BK[b] = new_1K[0].to(root_BK.dtype)
            hidden_BH[b] = output.hidden_states[-1]
            state.hidden_states = hidden_BH

    def grow_trees(self, batch):
        state = batch.spec_info  # from the last draft extend: root candidates, hidden states, root tokens
        n, clock = self.tree_config.node_budget, self.clock
        # Asked for a chain of N steps, SGLang hands out the first N slots past each prefix: the verify window, one slot a node.
        forward_batch, _, _ = prepare_for_draft(state, self.req_to_token_pool, batch, None, self.draft_runner, topk=1, num_steps=n)
        forward_batch.mark_forward_metadata_ready()  # `plan` is the metadata
        slots_BN = batch.out_cache_loc.view(-1, n)

        trees = TreeBatch(slots_BN.shape[0], self.tree_config, slots_BN.device)
        hidden_BNH = state.hidden_states.new_zeros(*slots_BN.shape, state.hidden_states.shape[-1])  # recurrent draft state of each node
        hidden_BNH[:, 0] = state.hidden_states
        if n > 1:
            with clock.phase("expand"):
                trees.expand_first(state.topk_p, state.topk_index)
        while trees.num_lanes:
            with clock.phase("indices"):
                request_L, node_L = trees.frontier
                parent_L = trees.parents_BN[request_L, node_L]
                forward_batch.input_ids = self.target_ids(trees.tokens_BN[request_L, node_L])
                forward_batch.positions = batch.seq_lens[request_L] + trees.depth - 1
                forward_batch.out_cache_loc = slots_BN[request_L, node_L]
                state.hidden_states = hidden_BNH[request_L, parent_L]
                self.tree_attention.plan(trees, batch.seq_lens_cpu, batch.req_pool_indices, slots_BN)
            with forward_context(ForwardContext(attn_backend=self.tree_attention), forward_batch=forward_batch):
                output = self.draft_runner.forward(forward_batch).logits_output
            with clock.phase("expand"):
                hidden_BNH[request_L, node_L] = output.hidden_states
                trees.expand(output.next_token_logits.float().log_softmax(-1))

        with clock.phase("verify_input"):
            tokens_BN = self.target_ids(trees.tokens_BN.clamp(min=0))
            verify_input = build_verify_input(trees, state.bonus_tokens, tokens_BN, batch.seq_lens, slots_BN)
        self.trees, self.target_tokens_BN = trees, verify_input.draft_token.view_as(tokens_BN)
        return verify_input

    def target_ids(self, draft_ids):
        """Draft vocabulary to target vocabulary (d2t)."""
        return draft_ids if self.hot_token_id is None else self.hot_token_id[draft_ids]

    # ------------------------------------------------------------ draft extend

    def _draft_extend_for_prefill(self, *args, **kwargs):
        with root_candidates_as_log_probs():
            return super()._draft_extend_for_prefill(*args, **kwargs)

    def _draft_extend_for_decode(self, batch, result, **kwargs):
        with self.clock.phase("draft_extend"):
            self.extend_accepted(batch, result, **kwargs)

    def extend_accepted(self, batch, result, **kwargs):
        """SGLang extends the draft over all N rows of each request; only the accepted ones count, so run as many as the longest accepted
        path has. After a round without a draft there is nothing to draft from next, so it can wait.
        """
        if self.tree_config.node_budget == 1:
            return self.postpone_extend(batch, result)
        rows = batch.seq_lens.numel(), self.tree_config.node_budget
        width, stride, window = int(result.accept_lens.max()), self.speculative_num_draft_tokens, batch.out_cache_loc
        hidden = result.logits_output.hidden_states
        accepted = replace(
            result,
            next_token_ids=result.next_token_ids.view(*rows)[:, :width].flatten(),
            logits_output=replace(result.logits_output, hidden_states=hidden.view(*rows, -1)[:, :width].flatten(0, 1)),
        )
        batch.out_cache_loc = window.view(*rows)[:, :width].flatten()
        self.speculative_num_draft_tokens = width
        try:
            with root_candidates_as_log_probs():
                super()._draft_extend_for_decode(batch, accepted, **kwargs)  # writes into result.next_draft_input
        finally:
            self.speculative_num_draft_tokens, batch.out_cache_loc = stride, window

    def postpone_extend(self, batch, result):
        postpone(batch.reqs, result.logits_output.hidden_states)
        hidden_size, dtype = get_draft_recurrent_hidden_state_spec(self.draft_runner)
        state = result.next_draft_input
        state.topk_p, state.topk_index, state.hidden_states = empty_draft_state(len(batch.reqs), self.topk, hidden_size, dtype, self.device)


class HeadUpdater(WeightUpdater):
    """A checkpoint on disk is the target's. SGLang loads it into the draft as well, which fails on its shapes and ends the scheduler."""

    __slots__ = ()

    def update_weights_from_disk(self, *_args, **_kwargs):
        return True, "TALON's draft head keeps its weights when the target's are updated from disk."


def draft_worker_class(server_args) -> type[TalonDraftWorker]:
    if server_args.attention_backend == "triton":
        from talon_sglang.gpu.draft import TritonDraftWorker  # it subclasses the one above

        return TritonDraftWorker
    return TalonDraftWorker
