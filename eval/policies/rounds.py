"""The draft head run over many rounds of many sequences at once.

A round starts from a *root*, a sequence's last committed token. Keys and values of the committed rows never change (the target's features
make them), so one pass over a sequence serves every round and every policy; a round only adds its own nodes.

Who attends to whom: a node sees the committed rows, the nodes that `sees` (by default its parent) sees, and itself.

Suffixes: P sequences, T positions, B rounds, L lanes (nodes forwarded together, round after round), W lanes of one round, M node
slots of a round (0 is the root), H hidden size, A heads, G key/value heads, R = A/G, d head size, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from talon_sglang.tree import DraftTree
from train.head import Eagle3Head


@dataclass(frozen=True)
class Draft:
    """One round's tree, with target token ids (the root's is -1), and the lanes of each draft forward after the draft extend."""

    tree: DraftTree
    lanes: list[int]

    @property
    def forwards(self) -> int:
        """Draft forwards, the draft extend included, as SGLang's steps count them."""
        return 1 + len(self.lanes)


class Committed:
    """The draft head's rows over whole sequences.

    Row i of a sequence holds the target's feature of position i and the embedding of token i+1; root token m of a round is embedded in row
    m - 1, so m rows are its prefix. States are only computed from `first_root - 1` on, where a round can start.
    """

    @torch.inference_mode()
    def __init__(self, head: Eagle3Head, embedding_VH: torch.Tensor, ids: list[list[int]], features: list[torch.Tensor], first: list[int]):
        """`features[p]` are the target's features [T, 3H] of positions 0 .. T-1 of `ids[p]`, which has at least T + 1 tokens; `first[p]`
        is the smallest index of a root. Raises ValueError when they do not fit.
        """
        self.first_P, rows = torch.tensor(first), []
        for tokens, features_TF, first_root in zip(ids, features, first):
            count = len(features_TF)
            if not 1 <= first_root <= count < len(tokens):
                raise ValueError(f"{count} features, {len(tokens)} tokens, first root {first_root}: want first root <= features < tokens.")
            rows.append(self._rows(head, embedding_VH[tokens[1 : count + 1]], features_TF, first_root - 1))
        longest = max(keys.shape[1] for keys, _, _ in rows)
        self.keys_PGTd = torch.stack([fn.pad(keys, (0, 0, 0, longest - keys.shape[1])) for keys, _, _ in rows])
        self.values_PGTd = torch.stack([fn.pad(values, (0, 0, 0, longest - values.shape[1])) for _, values, _ in rows])
        most = max(len(states) for _, _, states in rows)
        self.states_PTH = torch.stack([fn.pad(states, (0, 0, 0, most - len(states))) for _, _, states in rows])

    @staticmethod
    def _rows(head: Eagle3Head, embeds_TH, features_TF, first_row: int):
        count = len(features_TF)
        projected_1TH, positions_1T = head.fc(features_TF)[None], torch.arange(count)[None]
        inputs_1TD = head.layer_inputs(embeds_TH[None], projected_1TH)
        keys_1GTd, values_1GTd = head.keys_values(inputs_1TD, positions_1T)
        queries_1ATd = head.queries(inputs_1TD[:, first_row:], positions_1T[:, first_row:])
        visible_TT = positions_1T <= positions_1T[0, first_row:, None]
        context_1ATd = fn.scaled_dot_product_attention(queries_1ATd, keys_1GTd, values_1GTd, attn_mask=visible_TT, enable_gqa=True)
        return keys_1GTd[0], values_1GTd[0], head.finish(projected_1TH[:, first_row:], context_1ATd)[0]


class DraftRounds:
    """B rounds drafted together: `sequence_B` says which sequence each belongs to, `root_B` the index of its root token there.

    Node slots are the policy's to choose, from 1 on; slot 0 is the root.
    """

    @torch.inference_mode()
    def __init__(self, head: Eagle3Head, draft_ids_V, embedding_VH, committed: Committed, sequence_B, root_B):
        self.head, self.draft_ids_V, self.embedding_VH = head, draft_ids_V, embedding_VH
        self.prefix_B, self.batch = root_B, len(root_B)
        span = int(root_B.max())
        self.keys_BGTd, self.values_BGTd = committed.keys_PGTd[sequence_B, :, :span], committed.values_PGTd[sequence_B, :, :span]
        self.hidden_BMH = committed.states_PTH[sequence_B, root_B - committed.first_P[sequence_B]][:, None]
        self.node_keys_BGMd = torch.zeros_like(self.keys_BGTd[:, :, :1])
        self.node_values_BGMd = self.node_keys_BGMd.clone()
        self.sees_BMM = torch.zeros(self.batch, 1, 1, dtype=torch.bool)  # the root's own row is committed, not a node
        self.depth_BM = torch.zeros(self.batch, 1, dtype=torch.long)

    @torch.inference_mode()
    def root_log_probs(self) -> torch.Tensor:
        """Draft log-probabilities after each root [B, V]."""
        return self.head.logits(self.hidden_BMH[:, 0]).float().log_softmax(-1)

    @torch.inference_mode()
    def forward(self, round_L, slot_L, parent_L, token_L, sees_L=None) -> torch.Tensor:
        """Draft log-probabilities [L, V] after each lane.

        Lanes come sorted by round; `token_L` are draft ids, `parent_L` the slots of the parents (whose hidden state is the input), `sees_L`
        the slots whose view each lane inherits (default: the parents').
        """
        sees_L = parent_L if sees_L is None else sees_L
        self._grow(int(slot_L.max()) + 1)
        self.depth_BM[round_L, slot_L] = self.depth_BM[round_L, parent_L] + 1
        self.sees_BMM[round_L, slot_L] = self.sees_BMM[round_L, sees_L]
        self.sees_BMM[round_L, slot_L, slot_L] = True

        state_1LH = self.hidden_BMH[round_L, parent_L][None]
        positions_1L = (self.prefix_B[round_L] + self.depth_BM[round_L, slot_L] - 1)[None]
        inputs_1LD = self.head.layer_inputs(self.embedding_VH[self.draft_ids_V[token_L]][None], state_1LH)
        keys_1GLd, values_1GLd = self.head.keys_values(inputs_1LD, positions_1L)
        self.node_keys_BGMd[round_L, :, slot_L] = keys_1GLd[0].transpose(0, 1)
        self.node_values_BGMd[round_L, :, slot_L] = values_1GLd[0].transpose(0, 1)
        context_LAd = self._attend(self.head.queries(inputs_1LD, positions_1L)[0].transpose(0, 1), round_L, slot_L)
        hidden_LH = self.head.finish(state_1LH, context_LAd.transpose(0, 1)[None])[0]
        self.hidden_BMH[round_L, slot_L] = hidden_LH
        return self.head.logits(hidden_LH).float().log_softmax(-1)

    def _attend(self, queries_LAd, round_L, slot_L) -> torch.Tensor:
        """Round after round: their widths and prefixes differ so much that padding to the largest would cost more than the loop. The heads
        that share a key head stand side by side as its queries."""
        groups, contexts_WAd, first = self.keys_BGTd.shape[1], [], 0
        repeats = queries_LAd.shape[1] // groups
        for b, lanes in enumerate(torch.bincount(round_L, minlength=self.batch).tolist()):
            if not lanes:
                continue
            rows, span = slice(first, first + lanes), int(self.prefix_B[b])
            first += lanes
            seen_WC = fn.pad(self.sees_BMM[b, slot_L[rows]], (span, 0), value=True)  # C = T + M: the committed rows, then the nodes
            keys_GCd = torch.cat([self.keys_BGTd[b, :, :span], self.node_keys_BGMd[b]], dim=1)
            values_GCd = torch.cat([self.values_BGTd[b, :, :span], self.node_values_BGMd[b]], dim=1)
            queries_GXd = queries_LAd[rows].unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # X = R * W
            mask_XC = seen_WC.repeat(repeats, 1)
            context_1GXd = fn.scaled_dot_product_attention(queries_GXd[None], keys_GCd[None], values_GCd[None], attn_mask=mask_XC)
            contexts_WAd.append(context_1GXd[0].unflatten(1, (repeats, lanes)).permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(contexts_WAd)

    def _grow(self, slots: int) -> None:
        more = slots - self.depth_BM.shape[1]
        if more > 0:
            self.depth_BM = fn.pad(self.depth_BM, (0, more))
            self.sees_BMM = fn.pad(self.sees_BMM, (0, more, 0, more))
            self.hidden_BMH = fn.pad(self.hidden_BMH, (0, 0, 0, more))
            self.node_keys_BGMd = fn.pad(self.node_keys_BGMd, (0, 0, 0, more))
            self.node_values_BGMd = fn.pad(self.node_values_BGMd, (0, 0, 0, more))


def ranked_tree(tokens: list[int], parents: list[int], depths: list[int], log_probs: list[float], size: int) -> DraftTree:
    """The `size` - 1 best of a list of candidates, under their root, in the order of the list.

    Candidate i's parent is candidate `parents[i]` (-1: the root), which stands before it; -inf is never chosen. Ties go to the earlier one,
    so a chosen candidate's parent is chosen too.
    """
    order = sorted(range(len(tokens)), key=lambda i: -log_probs[i])[: size - 1]
    chosen = sorted(i for i in order if log_probs[i] > float("-inf"))
    node = {-1: 0} | {candidate: place for place, candidate in enumerate(chosen, start=1)}
    return DraftTree(
        [-1, *(tokens[i] for i in chosen)],
        [-1, *(node[parents[i]] for i in chosen)],
        [0, *(depths[i] for i in chosen)],
        [0.0, *(log_probs[i] for i in chosen)],
        degraded=not chosen,
    )


def best_children(log_probs_LV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best draft tokens of each lane (log-probabilities in float64, draft ids), best first; a failed lane (NaN) gives -inf."""
    finite_LV = log_probs_LV.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    values, tokens = finite_LV.topk(min(k, log_probs_LV.shape[1]), dim=1)
    return values.double(), tokens
