import pytest
import torch
import yaml

from train.recipe import Recipe, RecipeError, load_recipe
from train.trainer import check_machine, deepspeed_config, learning_rate
from train.world import World

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
        ("train", "precision", "fp64", r"`train.precision` is 'fp64': "),
        ("train", "loss", "mse", r"`train.loss` is 'mse'"),
        ("train", "tokens", 1000, r"`train.epochs` is 2: tokens is 1000 as well; give one of the two"),
        ("train", "offload_param", True, r"`train` is .*offload_param needs zero_stage 3, not 1"),
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


@pytest.mark.parametrize(
    "sets, message",
    [
        (["train.precision=bf16", "train.zero_stage=0"], "precision bf16 needs fp32 master weights, which zero_stage 0 has not"),
        (["train.offload_optimizer=true", "train.zero_stage=0", "train.precision=fp32"], "offload_optimizer needs zero_stage 1, 2 or 3"),
        (["train.epochs=null"], "`train.epochs` is missing"),
    ],
)
def test_settings_that_do_not_go_together(repo_root, sets, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(repo_root / RECIPES / "smollm2-135m-cpu-quick.yaml", sets)


def test_what_deepspeed_is_told(repo_root):
    """DeepSpeed's own parser takes the config, and reads from it what the recipe says."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    path = repo_root / RECIPES / "smollm2-135m-cpu-quick.yaml"
    sets = ["train.zero_stage=3", "train.offload_optimizer=true", "train.offload_param=true", "train.precision=fp16"]
    config = deepspeed_config(load_recipe(path, sets).train, 8)
    zero = DeepSpeedZeroConfig(**config["zero_optimization"])
    assert zero.stage == 3 and zero.offload_optimizer.device == zero.offload_param.device == "cpu"
    assert config["fp16"]["enabled"] and not config["bf16"]["enabled"] and config["train_batch_size"] == 8
    assert deepspeed_config(load_recipe(path).train, 1)["zero_optimization"] == {"stage": 1}


def test_what_this_machine_cannot_do_is_refused_before_anything_is_loaded(repo_root):
    world = World(0, 1, torch.device("cpu"))
    path = repo_root / RECIPES / "smollm2-135m-cpu-quick.yaml"
    with pytest.raises(RecipeError, match="`train.offload_optimizer` is true, but there is no GPU here"):
        check_machine(load_recipe(path, ["train.offload_optimizer=true"]).train, world)
    check_machine(load_recipe(path, ["train.precision=bf16"]).train, world)


@pytest.mark.parametrize("fast, precision", [(True, "bf16"), (False, "fp32")])
def test_auto_precision_is_the_machines_faster_one(raw, monkeypatch, fast, precision):
    monkeypatch.setattr("train.recipe.fast_bfloat16", lambda: fast)
    for section in ("answers", "train"):
        raw[section].pop("precision", None)
    default = Recipe.model_validate(raw)
    auto = Recipe.model_validate(change(change(raw, "train", "precision", "auto"), "answers", "precision", "auto"))
    named = Recipe.model_validate(change(change(raw, "train", "precision", "fp16"), "answers", "precision", "fp32"))
    assert (default.answers.precision, default.train.precision) == (auto.answers.precision, auto.train.precision) == (precision, precision)
    assert (named.answers.precision, named.train.precision) == ("fp32", "fp16")


def test_fast_bfloat16_reads_the_cpu_flags(tmp_path, monkeypatch):
    from train.machine import fast_bfloat16, fast_bfloat16_cpu

    for flags, fast in (("fma avx512f avx512_bf16 vaes", True), ("amx_bf16", True), ("fma avx512f", False), ("avx512_bf16_not", False)):
        cpuinfo = tmp_path / flags
        cpuinfo.write_text(f"flags\t: {flags}\n")
        assert fast_bfloat16_cpu(cpuinfo) is fast
    assert fast_bfloat16_cpu(tmp_path / "none") is False
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert fast_bfloat16() is True
