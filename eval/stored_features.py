#!/usr/bin/env python3
"""What a feature store costs: bytes a token, how well they were predicted, and what a head's accuracy loses by reading features back.

Each conversation passes through the target once. Its features are then stored and read in every dtype, and the same head predicts the same
tokens from each (training-time test, as in training). `exact` is the head with features that were never stored.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from train.batches import make_batch
from train.corpus import encode_rows
from train.feature_size import BYTES
from train.features import Features, compute_features
from train.head import load_head
from train.masks import ChatEncoder, Encoded
from train.plan import Stored
from train.progress import progress_bar
from train.store import FeatureStore
from train.target import FrozenTarget
from train.ttt import DraftTarget, unroll

EXAMPLES = """example:
  python eval/stored_features.py --target .cache/smollm2-135m-instruct --head runs/head --answers answers.jsonl --limit 200
"""


@dataclass
class Figures:
    """Sums over all predictions, by training-time-test step [K]; bytes on disk and as predicted (None: not stored)."""

    loss_K: torch.Tensor
    hits_K: torch.Tensor
    positions_K: torch.Tensor
    disk: int | None = None
    predicted: int | None = None


def measure(
    target: FrozenTarget, head: torch.nn.Module, ids_Vd: torch.Tensor, chats: list[Encoded], steps: int, folder: Path
) -> dict[str, Figures]:
    """Figures of `exact` and of every dtype. `folder` holds the stores meanwhile."""
    in_draft_V = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    in_draft_V[ids_Vd] = True
    draft = DraftTarget(target.embedding.weight, target.lm_head_VH[ids_Vd], in_draft_V, ids_Vd, target.logit_cap)
    stores = {dtype: FeatureStore(folder / dtype, "measured", dtype) for dtype in BYTES}
    figures = {name: Figures(*torch.zeros(3, steps)) for name in ("exact", *BYTES)}
    with progress_bar("conversations", len(chats)) as advance:
        for chat in chats:
            exact = compute_features(target, [chat])[0]
            found = {"exact": exact}
            for dtype, store in stores.items():
                store.put(chat, exact)
                store.flush()
                found[dtype] = store.get(chat)
            for name, features in found.items():
                _add(figures[name], head, draft, chat, features, steps)
            advance(1)
    for dtype, store in stores.items():
        figures[dtype].disk = store.totals()["bytes"]
        figures[dtype].predicted = Stored.of(chats).size(target.config.hidden_size, dtype)
    return figures


@torch.no_grad()
def _add(figures: Figures, head, draft: DraftTarget, chat: Encoded, features: Features, steps: int) -> None:
    sums = unroll(head, make_batch([chat], [features], steps).to("cpu", torch.float32), draft)
    for name in ("loss_K", "hits_K", "positions_K"):
        getattr(figures, name).add_(getattr(sums, name))


def table(figures: dict[str, Figures], hidden: int, tokens: int) -> Table:
    steps = len(figures["exact"].hits_K)
    shown = Table(box=SIMPLE_HEAD)
    for title in (
        "features",
        "bytes a token",
        "of 8 H",
        "predicted",
        "loss",
        *(f"accuracy {k + 1}" for k in range(steps)),
        "accuracy, all",
    ):
        shown.add_column(title, justify="left" if title == "features" else "right")
    base = (figures["exact"].hits_K / figures["exact"].positions_K).mean()
    for name, found in figures.items():
        accuracy_K = found.hits_K / found.positions_K
        size = ["", "", ""]
        if found.disk:
            size = [f"{found.disk / tokens:.0f}", f"{found.disk / tokens / 8 / hidden:.1%}", f"{found.predicted / found.disk - 1:+.1%}"]
        loss = f"{found.loss_K[0] / found.positions_K[0]:.4f}"
        shown.add_row(name, *size, loss, *(f"{share:.2%}" for share in accuracy_K), f"{accuracy_K.mean() / base - 1:+.2%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--head", type=Path, required=True, help="exported draft head")
    parser.add_argument("--answers", type=Path, required=True, help="conversations, best ones that the head was not trained on")
    parser.add_argument("--limit", type=int, default=200, help="conversations to use (default 200)")
    parser.add_argument("--steps", type=int, default=3, help="training-time-test steps (default 3)")
    parser.add_argument("--max-length", type=int, default=512, help="longer conversations are cut (default 512)")
    args = parser.parse_args()
    try:
        head, ids_Vd = load_head(args.head)
        target = FrozenTarget.load(args.target, torch.float32, aux_layers=head.config.aux_layers)
        rows = encode_rows(args.answers, ChatEncoder(AutoTokenizer.from_pretrained(args.target)), args.max_length)
        chats = list(islice((row.chat for row in rows if row.chat), args.limit))
        if not chats:
            raise ValueError(f"--answers {args.answers} holds no usable conversation; see train/lint.py.")
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(target, head, ids_Vd, chats, args.steps, Path(folder))
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"stored_features: {error}")
    stored = Stored.of(chats)
    Console(width=140).print(f"{len(chats)} conversations, {stored.tokens} tokens, {stored.predicted} of them predicted")
    Console(width=140).print(table(figures, target.config.hidden_size, stored.tokens))


if __name__ == "__main__":
    main()
