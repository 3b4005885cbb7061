"""The same conversations for both trainers.

  rows       answers of the target -> one JSONL of token ids and loss masks that both trainers read
  features   the target's hidden states of these rows, in both stores, from one pass

speculators would take its states from a vLLM server. Its files hold the states entering three layers and the last layer's output before the
final norm; ours hold the same three and the output behind the norm. Both in bf16.

Shape suffixes: T positions, H hidden size.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from train.paths import write_whole

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FLUSH_EVERY = 20  # conversations in a shard of our store; so many are computed again after an interruption


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("rows")
    one.add_argument("--target", type=Path, required=True)
    one.add_argument("--answers", type=Path, required=True, help="what train/regenerate.py wrote")
    one.add_argument("--limit", type=int, required=True, help="conversations to keep, evenly spread over the file")
    one.add_argument("--length", type=int, required=True, help="tokens that a conversation is cut at")
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("features")
    two.add_argument("--target", type=Path, required=True)
    two.add_argument("--order", type=Path, required=True, help="the rows as speculators keeps them; the last one is its validation set")
    two.add_argument("--folder", type=Path, required=True, help="gets features/, train.jsonl, short.jsonl and facts.json")
    two.add_argument("--length", type=int, required=True, help="tokens of a batch")
    two.add_argument("--epochs", type=int, required=True)
    two.add_argument("--short", type=int, required=True, help="conversations of a short run")
    args = parser.parse_args()
    write_rows(args) if args.command == "rows" else write_features(args)


def write_rows(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from train.corpus import encode_rows
    from train.masks import ChatEncoder

    encoder = ChatEncoder(AutoTokenizer.from_pretrained(args.target))
    chats = [row.chat for row in encode_rows(args.answers, encoder, args.length) if row.chat is not None]
    if len(chats) < args.limit:
        sys.exit(f"vs_speculators: {args.answers} holds {len(chats)} usable conversations, --conversations is {args.limit}; ask for fewer.")
    write_lines(args.out, [tokens_and_mask(chats[i]) for i in spread(len(chats), args.limit)])


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` row numbers of `total`, evenly spaced: answer files come sorted by length or category."""
    return [i * total // wanted for i in range(wanted)]


def tokens_and_mask(chat) -> dict:
    """The layout that both trainers read: token ids, and 1 on every token that the target itself produced."""
    return {"input_ids": chat.ids, "loss_mask": [int(number > 0) for number in chat.span_ids().tolist()]}


def chat_of(row: dict):
    """The inverse of `tokens_and_mask`, as training reads these rows: every unbroken run of two or more marked tokens is an answer."""
    from train.masks import Encoded

    padded = [0, *row["loss_mask"], 0]
    edges = [i for i, (before, now) in enumerate(zip(padded, padded[1:])) if before != now]
    return Encoded(row["input_ids"], [(start, end) for start, end in zip(edges[::2], edges[1::2]) if end - start >= 2])


def write_features(args: argparse.Namespace) -> None:
    import torch
    from safetensors.torch import save_file

    from train.features import Features, predicting, target_fingerprint
    from train.progress import progress_bar
    from train.store import FeatureStore
    from train.target import FrozenTarget

    rows = [json.loads(line) for line in args.order.read_text().splitlines()]
    target = FrozenTarget.load(args.target, torch.float32)
    store = FeatureStore(args.folder / "features", target_fingerprint(target), "bf16")
    theirs = args.order.with_name("hidden_states")
    theirs.mkdir(exist_ok=True)
    with progress_bar("features", sum(len(row["input_ids"]) for row in rows)) as advance:
        for number, row in enumerate(rows):
            chat, file = chat_of(row), theirs / f"hs_{number}.safetensors"
            if not (file.exists() and chat in store):  # an interrupted run goes on
                before_norm_TH, features_TF, final_TH = states(target, chat.ids)
                four_T4H = torch.stack([*features_TF.chunk(3, dim=-1), before_norm_TH], dim=1).bfloat16()
                final_PH = final_TH[predicting(chat)]
                store.put(chat, Features(features_TF[: chat.useful_length], final_PH, target.argmax(final_PH).int()))
                if number % FLUSH_EVERY == 0:
                    store.flush()
                save_file({"hidden_states": four_T4H, "token_ids": torch.tensor(chat.ids)}, file.with_suffix(".tmp"))
                os.replace(file.with_suffix(".tmp"), file)
            advance(len(chat.ids), "tokens")
    store.flush()
    trained = rows[:-1]
    write_lines(args.folder / "train.jsonl", trained)
    write_lines(args.folder / "short.jsonl", trained[: args.short])
    write_lines(args.folder / "facts.json", [facts(trained, args.length, args.epochs, args.short)])


def facts(rows: list[dict], budget: int, epochs: int, short: int) -> dict:
    """What a reader of the result wants to know, and the optimiser steps that our batches make of these rows."""
    from train.schedule import plan_epoch

    lengths = [len(row["input_ids"]) for row in rows]

    def steps(part: list[int], count: int) -> int:
        return sum(len(plan_epoch(part, budget, 1, 0, epoch)) for epoch in range(count))

    found = {"conversations": len(rows), "tokens": sum(lengths), "answer_tokens": sum(sum(row["loss_mask"]) for row in rows)}
    return {**found, "longest": max(lengths), "epochs": epochs, "steps": steps(lengths, epochs), "short_steps": steps(lengths[:short], 1)}


def states(target, ids: list[int]):
    """-> last layer's output before the final norm [T, H], the three features [T, 3H], the final hidden state [T, H]."""
    import torch

    taken = []
    handle = target.model.model.norm.register_forward_pre_hook(lambda _module, inputs: taken.append(inputs[0]))
    try:
        features_1TF, final_1TH = target.hidden(torch.tensor([ids]))
    finally:
        handle.remove()
    return taken[0][0], features_1TF[0], final_1TH[0]


def write_lines(path: Path, rows: list[dict]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
