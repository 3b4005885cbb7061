"""Going on from another maker's head: its weights and its draft vocabulary arrive whatever the layout, and stay."""

import pytest
import torch
import yaml

from tests.train.heads import DRAFT, HIDDEN, LAYOUTS, VOCAB, draft_ids, edit, edit_weights, weights, write_head
from tests.train.test_training import head, metrics, run, toy, whole_run  # noqa: F401 (fixtures)
from tests.train.toy import toy_config
from train.export import export
from train.foreign_start import foreign_start
from train.masks import Encoded
from train.recipe import RecipeError, load_recipe


@pytest.fixture
def recipe(repo_root, tmp_path):
    def make(**head):
        raw = yaml.safe_load((repo_root / "recipes" / "smollm2-135m-cpu-quick.yaml").read_text())
        raw["head"] = {"draft_vocab_size": DRAFT, "start_from": str(tmp_path / "head")} | head
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(raw))
        return load_recipe(tmp_path / "r.yaml")

    return make


TARGET = toy_config(vocab=VOCAB, hidden=HIDDEN)


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_weights_and_vocabulary_arrive_from_every_layout(layout, recipe, tmp_path):
    folder = write_head(tmp_path / "head")
    before = weights(folder)
    if layout:
        LAYOUTS[layout](folder)
    adopted, start = foreign_start(recipe(), TARGET)
    assert adopted.head.aux_layers == (2, 4, 5) and torch.equal(start.ids_Vd, draft_ids())
    state = start.head().state_dict()
    assert state.keys() == before.keys() - {"d2t", "t2d"}
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, before[name].float(), rtol=0, atol=2e-3 if layout == "safeailab" else 0)


def test_the_vocabulary_is_kept_whatever_the_data_says(recipe, tmp_path):
    write_head(tmp_path / "head")
    start = foreign_start(recipe(), TARGET)[1]
    outside = [token for token in range(VOCAB) if token not in set(draft_ids().tolist())]
    vocab = start.vocabulary([Encoded([0, *outside[:9], int(draft_ids()[3])], [(1, 11)])])
    assert torch.equal(vocab.ids_Vd, draft_ids()) and vocab.coverage == pytest.approx(0.1)
    assert torch.equal(vocab.d2t_Vd, weights(tmp_path / "head")["d2t"]) and torch.equal(vocab.t2d_V, weights(tmp_path / "head")["t2d"])


def test_without_start_from_nothing_changes(recipe):
    plain = recipe(start_from=None)
    assert foreign_start(plain, TARGET) == (plain, None)


@pytest.mark.parametrize(
    "damage, head, message",
    [
        (lambda h: edit(h, norm_output=True), {}, "it has norm_output, which this toolkit does not train"),
        (lambda h: edit(h, norm_before_residual=True), {}, "norm_before_residual is true"),
        (lambda h: edit_weights(h, lambda s: s.pop("lm_head.weight") is None), {}, "lm_head.weight is missing"),
        (lambda h: None, {"draft_vocab_size": DRAFT + 1}, f"has {DRAFT} tokens, `head.draft_vocab_size` is {DRAFT + 1}"),
        (lambda h: None, {"aux_layers": [1, 2, 3]}, r"inputs of layers \[2, 4, 5\], `head.aux_layers` is \[1, 2, 3\]"),
        (lambda h: (h / "config.json").unlink(), {}, "has no config.json"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(damage, head, message, recipe, tmp_path):
    damage(write_head(tmp_path / "head"))
    with pytest.raises(RecipeError, match=message) as caught:
        foreign_start(recipe(**head), TARGET)
    assert str(caught.value).startswith("`head.start_from` is ") and "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_second_run_goes_on_from_the_first_ones_export(toy, repo_root, whole_run):  # noqa: F811
    """Export, another maker's layout, training on other settings: the first loss is where the first run ended, and d2t is the same."""
    folder = export(toy / whole_run, toy / "exported", which="last")
    LAYOUTS["modelopt"](folder)
    run(repo_root, toy, "onward", f"head.start_from={folder}", "train.epochs=1", "train.warmup_ratio=0.5")
    first, last, onward = metrics(toy, whole_run)[0], metrics(toy, whole_run)[-2], metrics(toy, "onward")[0]
    assert sum(onward["loss"]) < 0.5 * (sum(first["loss"]) + sum(last["loss"]))
    assert torch.equal(head(toy, "onward")["d2t"], head(toy, whole_run)["d2t"])
