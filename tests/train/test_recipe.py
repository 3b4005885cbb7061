import pytest
import yaml

from train.recipe import RecipeError, load_recipe
from train.trainer import learning_rate

RECIPES = "recipes"


def test_every_recipe_of_the_repository_is_valid(repo_root):
    paths = sorted((repo_root / RECIPES).glob("*.yaml"))
    assert len(paths) >= 3
    for path in paths:
        recipe = load_recipe(path)
        assert recipe.head.draft_vocab_size > 0 and path.read_text().startswith("#")


@pytest.fixture
def raw(repo_root):
    return yaml.safe_load((repo_root / RECIPES / "smollm2-135m-cpu-quick.yaml").read_text())


def change(raw, section, name, value):
    (raw[section] if section else raw)[name] = value
    return raw


@pytest.mark.parametrize(
    "section,name,value,message",
    [
        ("train", "learning_rat", 1e-3, r"`train.learning_rat` is not a field"),
        ("train", "epochs", 0, r"`train.epochs` is 0: "),
        ("train", "precision", "fp16", r"`train.precision` is 'fp16': "),
        ("answers", "samples_per_prompt", 2, r"`answers` is .*needs a temperature above 0"),
        ("features", "mode", "disk", r"`features.mode` is 'disk'"),
        ("head", "aux_layers", [1, 2], r"`head.aux_layers"),
        (None, "extra", 1, r"`extra` is not a field"),
    ],
)
def test_a_fault_is_named_with_its_value(raw, tmp_path, section, name, value, message):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(change(raw, section, name, value)))
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_missing_field_and_missing_file(raw, tmp_path):
    del raw["train"]["epochs"]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(RecipeError, match="`train.epochs` is missing"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")


def test_overrides_paths_and_numbers(repo_root, tmp_path, monkeypatch):
    monkeypatch.setenv("TALON_CACHE", str(tmp_path))
    path = repo_root / RECIPES / "smollm2-135m-cpu-quick.yaml"
    recipe = load_recipe(path, ["train.learning_rate=2e-4", "train.zero_stage=2", "features.mode=online", "output_dir={cache}/x"])
    assert recipe.train.learning_rate == 2e-4 and recipe.train.zero_stage == 2 and recipe.features.mode == "online"
    assert recipe.output_dir == tmp_path.resolve() / "x" and recipe.answers.prompts == repo_root / "train/prompts/starter.jsonl"
    for override, message in (("train.epochs", "not of the form"), ("target.x=1", "is a value, not a section"), ("a.b=1", "not a field")):
        with pytest.raises(RecipeError, match=message):
            load_recipe(path, [override])


def test_learning_rate_warms_up_and_decays(repo_root):
    settings = load_recipe(repo_root / RECIPES / "smollm2-135m-cpu-quick.yaml", ["train.warmup_ratio=0.1", "train.learning_rate=1.0"]).train
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) == max(rates)
    assert all(a > b for a, b in zip(rates[10:], rates[11:])) and rates[-1] == pytest.approx(settings.min_lr_ratio, abs=0.01)


def test_a_random_lm_head_must_be_trained(repo_root):
    with pytest.raises(RecipeError, match="train_lm_head false needs warm_start true"):
        load_recipe(repo_root / RECIPES / "smollm2-135m-cpu-quick.yaml", ["head.warm_start=false"])
