"""Reading an EAGLE-3 checkpoint of any maker the way SGLang 0.5.23 would.

Makers differ in file names, tensor names and in where config.json keeps what: SafeAILab (`pytorch_model.bin`, `midlayer.`), SpecForge and
AngelSlim (safetensors, `midlayer.`), ModelOpt (`layers.0.`, no t2d), speculators (`layers.0.`, a nested config). Tensors are kept here
under the SafeAILab spelling, whatever the file calls them.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from talon_sglang.draft_head import DraftHeadError, plain_name, read_config

NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")  # SGLang's own list, weight_utils.py
INDEX = "model.safetensors.index.json"
SPECULATORS_FIELDS = (
    "transformer_layer_config",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "has_no_defaults_at_init",
    "embed_requires_grad",
)


@dataclass
class Files:
    """Which files of the folder hold weights, by name. `served`: what SGLang reads; `read`: what is in `Checkpoint.tensors`."""

    served: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # weights beside them that SGLang does not read
    missing: list[str] = field(default_factory=list)  # named by the index but not there
    clashes: list[str] = field(default_factory=list)  # tensors that several served files hold
    wrapped: str | None = None  # the key under which a .bin or .pt file keeps its tensors, if not at the top


@dataclass
class Checkpoint:
    """A head as found on disk: its config.json, its tensors (memory-mapped where the format allows) and the state of its files."""

    folder: Path
    config: dict
    tensors: dict[str, torch.Tensor]
    files: Files
    layout: str

    def copy(self) -> Checkpoint:
        """To try repairs on. Tensors are shared, so replace them and never write into them."""
        return Checkpoint(self.folder, copy.deepcopy(self.config), dict(self.tensors), copy.deepcopy(self.files), self.layout)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Read config and weights. Raises DraftHeadError when there is no config.json, no weights at all, or a damaged file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DraftHeadError(f"{folder} is not a folder; name the folder that holds config.json and the weights")
    config = read_config(folder, "draft head")
    if not isinstance(config, dict):
        raise DraftHeadError(f"{folder / 'config.json'} holds no JSON object; write the head's config again")
    files = find_files(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name in files.read:
        found, wrapped = read_tensors(folder / name)
        files.wrapped = files.wrapped or wrapped
        files.clashes += sorted(set(found) & set(tensors))
        tensors |= found
    if not tensors:
        raise DraftHeadError(f"{folder} holds no weights; copy model.safetensors or pytorch_model.bin there")
    return Checkpoint(folder, config, tensors, files, detect_layout(config, folder))


def detect_layout(config: dict, folder: Path | None = None) -> str:
    """Which maker's layout this is; the maker decides what some fields mean."""
    eagle = config.get("eagle_config") or {}
    architecture = (config.get("architectures") or [""])[0]
    if "transformer_layer_config" in config or "speculators_model_type" in config or architecture.startswith("Eagle3Speculator"):
        return "speculators"
    if "use_last_layernorm" in eagle or "use_input_layernorm_in_first_layer" in eagle:
        return "modelopt"
    if architecture == "Eagle3LlamaForCausalLM":
        return "angelslim"
    if folder is not None and (folder / "pytorch_model.bin").exists() and not list(folder.glob("*.safetensors")):
        return "safeailab"
    return "sglang"  # ours and SpecForge's


# ---------------------------------------------------------------- files


def find_files(folder: Path) -> Files:
    """SGLang takes all *.safetensors (with an index: those it names), else all *.bin, else all *.pt, of the folder itself only
    (`model_loader/loader.py`, _prepare_weights).
    """
    by_kind = {kind: _names(folder, kind) for kind in ("safetensors", "bin", "pt")}
    files = Files()
    for kind in by_kind:
        if by_kind[kind]:
            files.served = by_kind[kind]
            break
    index = folder / INDEX
    if files.served and files.served[0].endswith(".safetensors") and index.is_file():
        named = sorted(set(_weight_map(index).values()))
        files.missing = [name for name in named if not (folder / name).is_file()]
        files.served = [name for name in files.served if name in named]
    files.read = files.served
    if not files.served:
        files.read = by_kind["safetensors"] or _elsewhere(folder)
    files.ignored = sorted(name for names in by_kind.values() for name in names if name not in files.read)
    return files


def _names(folder: Path, kind: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*.{kind}") if path.name not in NOT_WEIGHTS)


def _weight_map(index: Path) -> dict:
    try:
        return json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DraftHeadError(f"{index} is damaged ({type(error).__name__}); delete it if one file holds all weights") from error


def _elsewhere(folder: Path) -> list[str]:
    """Weights that SGLang does not look for: other endings, or the newest-named subfolder that has some."""
    odd = sorted(path.name for ending in ("pth", "ckpt") for path in folder.glob(f"*.{ending}"))
    if odd:
        return odd
    for child in sorted((path for path in folder.iterdir() if path.is_dir()), reverse=True):
        names = _names(child, "safetensors") or _names(child, "bin")
        if names:
            return [f"{child.name}/{name}" for name in names]
    return []


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """-> tensors under plain names, and the key they were wrapped in (`state_dict`, `model`, `module`), if any."""
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return {plain_name(name): tensor for name, tensor in load_file(file).items()}, None
        except SafetensorError as error:
            raise DraftHeadError(f"{file} is damaged ({error}); copy or export it again") from error
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch raise many kinds
        raise DraftHeadError(f"{file} cannot be read as weights ({type(error).__name__}); save plain tensors again") from error
    state = loaded if isinstance(loaded, dict) else {}
    wrapped = next((key for key in ("state_dict", "module", "model") if isinstance(state.get(key), dict)), None)
    state = state[wrapped] if wrapped else state
    return {plain_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}, wrapped


# ---------------------------------------------------------------- configs


def flatten_speculators(config: dict) -> dict:
    """The nested config of speculators as the flat one that SGLang reads.

    Its layer config leaves out every field that has transformers' default value, so those are put back. Its layer ids name the layer whose
    INPUT is captured, SGLang's the one whose OUTPUT is: hence the minus one. The verifier's last layer, if listed, feeds no draft.
    """
    from transformers import AutoConfig

    layer = dict(config.get("transformer_layer_config") or {})
    kind = layer.pop("model_type", None) or "llama"
    full = AutoConfig.for_model(kind, **layer).to_dict()
    kept = {name: value for name, value in config.items() if name not in SPECULATORS_FIELDS and value is not None}
    flat = {name: value for name, value in full.items() if value is not None} | kept
    flat |= {"model_type": "llama", "tie_word_embeddings": False}
    flat.pop("transformers_version", None)
    ids = flat.pop("eagle_aux_hidden_state_layer_ids", None)
    if ids:
        eagle = dict(flat.get("eagle_config") or {})
        flat["eagle_config"] = eagle | {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids[:3]]}
    return flat


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high layer: the states entering layers 2, L//2 and L-3 (SafeAILab traineagle3; SGLang's default)."""
    return (2, num_layers // 2, num_layers - 3)


def effective_rope(config: dict) -> dict:
    """The rotary settings as SGLang ends up with them (transformers 5.19): `rope_scaling` if set, else `rope_parameters`; a missing
    `rope_theta` inside comes from the top level.
    """
    chosen = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = chosen.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    older_type = chosen.pop("type", None)
    kind = chosen.pop("rope_type", None) or older_type or "default"
    chosen = {name: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for name, v in chosen.items() if v is not None}
    return {"rope_type": kind, "rope_theta": float(theta), **(chosen if kind != "default" else {})}


def rope_spellings(config: dict) -> list[dict]:
    """What the newer and the older spelling say, if config.json has both; they should agree."""
    newer = config.get("rope_parameters")
    if not newer or not (config.get("rope_theta") or config.get("rope_scaling")):
        return []
    older = {name: value for name, value in config.items() if name != "rope_parameters"}
    theta = newer.get("rope_theta") or config.get("rope_theta")
    return [effective_rope({"rope_parameters": newer, "rope_theta": theta}), effective_rope(older)]
