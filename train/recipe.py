"""The recipe: every setting of a training run, typed, in one YAML file.

Unknown fields are refused. `--set a.b=c` overrides one field. `{cache}` in a path is the cache folder ($TALON_CACHE or .cache in the
clone), `{repo}` the clone itself; other relative paths are relative to the working directory.
"""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from train.machine import fast_bfloat16
from train.paths import REPO, cache_dir


class RecipeError(ValueError):
    """One sentence: which field, which value, what to do."""


def _place(path: Path) -> Path:
    return Path(str(path).replace("{cache}", str(cache_dir())).replace("{repo}", str(REPO)))


Place = Annotated[Path, AfterValidator(_place)]


def _precision_here(precision: str) -> str:
    return precision if precision != "auto" else "bf16" if fast_bfloat16() else "fp32"


HERE = AfterValidator(_precision_here)  # no reader of a recipe ever sees "auto"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), validate_default=True)


class AnswerSettings(Strict):
    """How the target answers the prompts (train/regenerate.py), and where the answers are."""

    prompts: Place | None = None
    file: Place | None = None
    server: str | None = None  # URL of an SGLang server that runs the target; without it the target answers in this process
    limit: int | None = Field(None, ge=1)  # of the usable prompts, the first so many
    max_turns: int | None = Field(None, ge=1)  # of a conversation's questions, the first so many
    max_new_tokens: int = Field(256, ge=2)
    max_length: int = Field(2048, ge=16)  # prompt and answer together, in tokens
    temperature: float = Field(0.0, ge=0)
    samples_per_prompt: int = Field(1, ge=1)
    precision: Annotated[Literal["auto", "fp32", "bf16"], HERE] = "auto"  # of the target in this process
    slots: int = Field(64, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _url(self):
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server {self.server!r} is no URL such as http://127.0.0.1:30000")
        return self

    @model_validator(mode="after")
    def _sampling(self):
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError("samples_per_prompt above 1 needs a temperature above 0, greedy answers would all be the same")
        if self.max_new_tokens >= self.max_length:
            raise ValueError(f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in max_length {self.max_length}")
        return self


class FeatureSettings(Strict):
    """Where the target's hidden states come from: `store` keeps them in a folder, `online` runs the target in every step."""

    mode: Literal["store", "online"] = "store"
    folder: Place | None = None
    dtype: Literal["fp8", "bf16", "fp32"] = "fp8"  # of what is stored; fp8 has one scale for each vector
    check: bool = True  # compare the checksums of what is stored before training; false: sizes only

    @model_validator(mode="after")
    def _folder(self):
        if self.mode == "store" and self.folder is None:
            raise ValueError("mode store needs a folder")
        return self


class HeadSettings(Strict):
    draft_vocab_size: int = Field(ge=1)
    aux_layers: tuple[int, int, int] | None = None  # 0-based layers whose inputs are the features; default 2, L//2, L-3
    start_from: Place | None = None  # go on from this EAGLE-3 head (any layout of train/doctor.py), with its draft vocabulary
    warm_start: bool = True  # begin from the target's last layer, norm and lm_head rows instead of random weights
    train_lm_head: bool = True  # false: keep the target's lm_head rows as they are; cheaper, and as good in a short run

    @model_validator(mode="after")
    def _frozen_rows(self):
        if not self.train_lm_head and not self.warm_start:
            raise ValueError("train_lm_head false needs warm_start true, a random lm_head must be trained")
        return self


class TrainSettings(Strict):
    ttt_steps: int = Field(7, ge=1)
    ttt_decay: float = Field(0.8, gt=0, le=1)
    loss: Literal["soft_ce", "kl", "tv", "lk"] = "soft_ce"  # see train/losses.py
    tokens: int | None = Field(None, ge=1)  # how long to train: so many tokens, or
    epochs: int | None = Field(None, ge=1, validate_default=True)  # so many passes
    packing: bool = False  # several short conversations in one row
    micro_batch_tokens: int = Field(ge=16)  # padded tokens per process and forward
    gradient_accumulation: int = Field(1, ge=1)
    max_length: int = Field(2048, ge=8)
    learning_rate: float = Field(gt=0)
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0)
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], HERE] = "auto"  # bf16 where it is fast
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = False  # to the host's memory: optimizer state and its step (ZeRO 1 to 3)
    offload_param: bool = False  # to the host's memory: weights that are not in use (ZeRO-3)
    activation_checkpointing: bool = False  # compute each test step again in the backward pass instead of keeping its activations
    held_out: float = Field(0.05, ge=0, lt=1)
    seed: int = 0
    log_every: int = Field(10, ge=1)
    eval_every: int = Field(200, ge=1)
    save_every: int = Field(200, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    tree_rows: int = Field(8, ge=0)  # held-out rows on which each evaluation grows TALON trees
    wandb: str | None = None  # project to log to as well, with the package wandb

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: int | None, info):
        tokens = info.data.get("tokens")
        if epochs is None and tokens is None:
            raise PydanticCustomError("missing", "epochs or tokens must be given")
        if epochs is not None and tokens is not None:
            raise ValueError(f"tokens is {tokens} as well; give one of the two")
        return epochs

    @model_validator(mode="after")
    def _engine(self):
        if self.zero_stage == 0 and self.precision != "fp32":
            fault = f"precision {self.precision} needs fp32 master weights, which zero_stage 0 has not"
            raise ValueError(f"{fault}; use zero_stage 1 or precision fp32")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_param and self.zero_stage != 3:
            raise ValueError(f"offload_param needs zero_stage 3, not {self.zero_stage}")
        return self


class PlanSettings(Strict):
    """What `--dry-run` assumes as long as there are no answers to count. It does not touch training."""

    rows: int = Field(ge=2)
    row_tokens: int = Field(ge=8)  # prompt and answer together, on average
    answer_share: float = Field(1.0, gt=0, le=1)  # of the tokens, those that are answers
    tokens_per_second: float | None = Field(None, gt=0)  # of all processes together, measured; without it no time is estimated


class Recipe(Strict):
    target: Place
    target_facts: Place | None = None  # config.json or a file of recipes/targets/, for --dry-run without the target
    output_dir: Place
    answers: AnswerSettings
    features: FeatureSettings
    head: HeadSettings
    train: TrainSettings
    plan: PlanSettings | None = None


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe. Raises RecipeError naming the field, its value and what is allowed."""
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError:
        raise RecipeError(f"The recipe {path} cannot be read; pass a YAML file such as recipes/smollm2-135m-cpu-quick.yaml.") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"The recipe {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"The recipe {path} is empty or not a mapping; start from one in recipes/.")
    for override in overrides:
        _apply(raw, override)
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(f"The recipe {path}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """The first fault of a pydantic error in one sentence."""
    fault = error.errors()[0]
    name = ".".join(map(str, fault["loc"])) or "recipe"
    if fault["type"] == "extra_forbidden":
        return f"`{name}` is not a field; remove it or correct its spelling."
    if fault["type"] == "missing":
        return f"`{name}` is missing; add it (docs/training.md lists every field)."
    return f"`{name}` is {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}."


def _apply(raw: dict, override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise RecipeError(f"--set {override!r} is not of the form a.b=c.")
    *parents, last = name.split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise RecipeError(f"--set {override!r}: `{parent}` is a value, not a section.")
    node[last] = _scalar(text)


def _scalar(text: str):
    """A YAML value; 1e-3 counts as a number, which YAML 1.1 does not grant."""
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text
