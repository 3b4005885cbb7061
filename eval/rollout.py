"""The target's side of an offline measurement: its own answers, the features along them, and its probabilities at the nodes of draft trees.

One decoder holds the keys and values of a few sequences (prompt and answer); everything is read off that one teacher-forced state.

Suffixes: S slots, T positions, K kept states a position (X = K * H), L tree nodes forwarded together, V vocabulary,
A heads, G key/value heads, d head size.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from talon_sglang.tree import DraftTree
from train.decoder import SlotDecoder
from train.target import FrozenTarget

PREFILL_TOKENS = 2048  # at most this many (padded) tokens in one forward
VERIFY_NODES = 512  # at most this many tree nodes in one forward


@dataclass
class Text:
    """A prompt and the target's answer to it; `features_TF` are the features of all tokens but the last answer token."""

    prompt: list[int]
    answer: list[int]
    features_TF: torch.Tensor

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


class TargetRun(SlotDecoder):
    """The target over a few prompts at once, with its answers at a temperature (0: greedy)."""

    def __init__(self, target: FrozenTarget, prompts: Sequence[list[int]], limit: int, temperature: float, end_ids: Collection[int]):
        """`limit`: answer tokens at most. Raises ValueError for a target family that SlotDecoder does not know."""
        layers = tuple(sorted(set(target.aux_layers)))  # the decoder keeps each layer once, in the order of layers
        super().__init__(target.model, len(prompts), max(map(len, prompts)) + limit, layers, target.lm_head_VH.dtype)
        self.feature_places = [layers.index(layer) for layer in target.aux_layers]
        self.prompts, self.limit, self.temperature, self.end_ids = list(prompts), limit, temperature, set(end_ids)

    @torch.inference_mode()
    def answer(self, seeds: Sequence[str]) -> list[Text]:
        """Let the target answer; a seed per prompt makes the draws repeatable whatever shares the batch."""
        draws = [random.Random(seed) for seed in seeds]
        answers: list[list[int]] = [[] for _ in self.prompts]
        logits_SV = self._read(self.prompts)
        going = set(range(len(answers)))
        while going:
            tokens_S = torch.zeros(len(answers), dtype=torch.long)
            for slot in sorted(going):
                token = draw(logits_SV[slot], self.temperature, draws[slot].random())
                answers[slot].append(token)
                tokens_S[slot] = token
                if token in self.end_ids or len(answers[slot]) == self.limit:
                    going.discard(slot)
            if going:
                logits_SV = self.step(tokens_S)
        return self._sequences(answers)

    @torch.inference_mode()
    def reread(self, answers: Sequence[list[int]]) -> list[Text]:
        """The state after known answers: one teacher-forced pass."""
        self._read([prompt + answer[:-1] for prompt, answer in zip(self.prompts, answers)])
        return self._sequences(list(answers))

    @torch.inference_mode()
    def node_probabilities(self, slot: int, trees: Sequence[tuple[int, DraftTree]]) -> list[list[float]]:
        """For each (index of the root token in the answer, tree of target ids): the probability of each node's path under the target.

        That is the product over the path of the target's probability, at its temperature, of each token after the ones before it.
        """
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}: the target's path probabilities need one above 0")
        found, group, rows = [], [], 0
        for start, tree in trees:
            inner = sorted({parent for parent in tree.parents if parent >= 0})  # only nodes with children need a distribution
            if group and rows + len(inner) > VERIFY_NODES:
                found += self._verify(slot, group)
                group, rows = [], 0
            group.append((start, tree, inner))
            rows += len(inner)
        return found + (self._verify(slot, group) if group else [])

    # ------------------------------------------------------------ the passes

    def _read(self, ids: list[list[int]]) -> torch.Tensor:
        """Prefill all slots, a few at a time -> logits after each [S, V]."""
        parts, first = [], 0
        while first < len(ids):
            last = first + 1
            while last < len(ids) and max(map(len, ids[first : last + 1])) * (last + 1 - first) <= PREFILL_TOKENS:
                last += 1
            parts.append(self.prefill(list(range(first, last)), ids[first:last]))
            first = last
        return torch.cat(parts)

    def _sequences(self, answers: list[list[int]]) -> list[Text]:
        lengths = [len(prompt) + len(answer) - 1 for prompt, answer in zip(self.prompts, answers)]
        kept_STKH = self.kept_STX.unflatten(-1, (-1, self.model.config.hidden_size))
        kept = [kept_STKH[slot, :length, self.feature_places].flatten(1) for slot, length in enumerate(lengths)]
        self.texts = [Text(prompt, answer, features) for prompt, answer, features in zip(self.prompts, answers, kept)]
        return self.texts

    def _verify(self, slot: int, group: list[tuple[int, DraftTree, list[int]]]) -> list[list[float]]:
        """One forward over the inner nodes of several trees of one sequence. The root's row repeats a committed token, on purpose: it is
        one row in about ten, and every node is then treated alike."""
        tokens, positions, roots, sees = [], [], [], []
        for start, tree, inner in group:
            root, first = len(self.prompts[slot]) + start, len(tokens)
            row = {node: first + place for place, node in enumerate(inner)}
            for node in inner:
                tokens.append(self.texts[slot].ids[root] if node == 0 else tree.tokens[node])
                positions.append(root + tree.depths[node])
                roots.append(root)
                sees.append([*(sees[row[tree.parents[node]]] if node else []), row[node]])
        span = max(roots)
        visible_LC = torch.zeros(len(tokens), span + len(tokens), dtype=torch.bool)
        visible_LC[:, :span] = torch.arange(span) < torch.tensor(roots)[:, None]  # before the root, whose row is among the nodes
        for line, seen in enumerate(sees):
            visible_LC[line, [span + column for column in seen]] = True

        def attend(layer, q_1ALd, k_1GLd, v_1GLd):
            keys = torch.cat([self.keys[layer][slot : slot + 1, :, :span], k_1GLd], dim=2)
            values = torch.cat([self.values[layer][slot : slot + 1, :, :span], v_1GLd], dim=2)
            return fn.scaled_dot_product_attention(q_1ALd, keys, values, attn_mask=visible_LC, enable_gqa=True)

        hidden_LH = self._forward(torch.tensor([tokens]), torch.tensor([positions]), attend, lambda kept: None)[0]
        log_probs_LV = (self.model.lm_head(hidden_LH).float() / self.temperature).log_softmax(-1)
        found, first = [], 0
        for _, tree, inner in group:
            row = {node: first + place for place, node in enumerate(inner)}
            path = [0.0]
            for node in range(1, len(tree)):
                parent = tree.parents[node]
                path.append(path[parent] + float(log_probs_LV[row[parent], tree.tokens[node]]))
            found.append(torch.tensor(path, dtype=torch.float64).exp().tolist())
            first += len(inner)
        return found


def draw(logits_V: torch.Tensor, temperature: float, uniform: float) -> int:
    """The token at `uniform` (0 to 1) of the cumulative distribution softmax(logits / temperature); the argmax at temperature 0."""
    if temperature <= 0:
        return int(logits_V.argmax())
    cumulative_V = torch.softmax(logits_V.double() / temperature, dim=-1).cumsum(-1)
    return min(int(torch.searchsorted(cumulative_V, uniform * cumulative_V[-1], right=True)), len(cumulative_V) - 1)
