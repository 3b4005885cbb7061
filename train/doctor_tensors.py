"""The doctor's rules for tensors: names, sizes, the draft vocabulary, values and dtypes. As in doctor_config.py, a finding's repair is
applied before its rule goes on.

Shape suffixes: V target vocabulary, Vd draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from talon_sglang.draft_head import expected_tensors
from train.findings import Answers, Finding, drop_fields, set_eagle, set_field
from train.layouts import Checkpoint

Q, K, V = (f"midlayer.self_attn.{name}_proj.weight" for name in "qkv")
GATE = "midlayer.mlp.gate_proj.weight"


def check_prefix(head: Checkpoint, _target: dict | None, _answers: Answers) -> Iterator[Finding]:
    """Names under a wrapper module (`module.`, `draft_model.`): SGLang knows only `model.`."""
    prefixes = {name[: -len("fc.weight")] for name in head.tensors if name.endswith(".fc.weight")}
    if "fc.weight" in head.tensors or len(prefixes) != 1:
        return
    prefix = prefixes.pop()

    def strip(checkpoint: Checkpoint) -> None:
        from talon_sglang.draft_head import plain_name

        checkpoint.tensors = {plain_name(name.removeprefix(prefix)): tensor for name, tensor in checkpoint.tensors.items()}

    yield Finding("key-prefix", "error", f"the tensors are named {prefix}*, which SGLang drops silently", f"take {prefix} away", strip)


def check_sizes(head: Checkpoint, target: dict | None, _answers: Answers) -> Iterator[Finding]:
    """Sizes that the tensors themselves tell."""
    shapes = head.shapes
    layers = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
    told = {
        "hidden_size": shapes.get("norm.weight", (None,))[0],
        "intermediate_size": shapes.get(GATE, (None,))[0],
        "num_hidden_layers": 1 + max(layers, default=0),
    }
    for name, size in told.items():
        found = head.config.get(name, 1 if name == "num_hidden_layers" else None)
        if size is not None and found != size:
            yield Finding(
                f"size-{name.replace('_', '-')}",
                "error",
                f"{name} is {'missing' if found is None else found}, the tensors say {size}",
                f"set it to {size}",
                set_field(name, size),
            )
    yield from _check_heads(head, target)
    yield from _check_vocab_size(head, target)
    yield from _check_draft_vocab_size(head)


def _check_heads(head: Checkpoint, target: dict | None) -> Iterator[Finding]:
    if not {Q, K} <= set(head.tensors) or not head.config.get("hidden_size"):
        return
    rows, kv_rows = head.shapes[Q][0], head.shapes[K][0]
    heads = head.config.get("num_attention_heads")
    size = head.config.get("head_dim") or (head.config["hidden_size"] // heads if heads else None)
    kv_heads = head.config.get("num_key_value_heads") or heads
    if heads and (heads * size, kv_heads * size) == (rows, kv_rows):
        return
    guess = (target or {}).get("head_dim") or (rows // heads if heads and rows % heads == 0 else None)
    fits = guess and rows % guess == 0 and kv_rows % guess == 0

    def write(checkpoint: Checkpoint) -> None:
        checkpoint.config |= {"head_dim": guess, "num_attention_heads": rows // guess, "num_key_value_heads": kv_rows // guess}

    yield Finding(
        "head-dim",
        "error",
        f"{heads} heads and {kv_heads} key heads of {size} do not give the {rows} and {kv_rows} rows of q_proj and k_proj",
        f"set head_dim to {guess} and count the heads again" if fits else "write the head_dim it was trained with",
        write if fits else None,
    )


def _check_vocab_size(head: Checkpoint, target: dict | None) -> Iterator[Finding]:
    own, theirs = head.config.get("vocab_size"), (target or {}).get("vocab_size")
    told = {head.shapes[name][0] for name in ("t2d", "embed_tokens.weight") if name in head.tensors}
    right = theirs or (told.pop() if len(told) == 1 else None)
    if own == right or right is None and isinstance(own, int):
        return
    fits = right is not None and told <= {right}
    yield Finding(
        "vocab-size",
        "error",
        f"vocab_size is {own or 'missing'}, " + (f"the target's is {theirs}" if theirs else f"the tensors say {right}"),
        f"set it to {right}" if fits else "use a head that was trained for this target",
        set_field("vocab_size", right) if fits and (told or own is None) else None,
    )


def _check_draft_vocab_size(head: Checkpoint) -> Iterator[Finding]:
    rows = head.shapes.get("lm_head.weight", (None,))[0]
    own = head.config.get("draft_vocab_size")
    if rows is None or own == rows:
        return
    state = "null" if "draft_vocab_size" in head.config and own is None else own or "missing"
    effect = {"null": "SGLang takes the target's lm_head instead", "missing": "SGLang stops without it"}.get(state, "lm_head does not fit")
    yield Finding(
        "draft-vocab-size",
        "error",
        f"draft_vocab_size is {state}, lm_head has {rows} rows: {effect}",
        f"set it to {rows}",
        set_field("draft_vocab_size", rows),
    )


def check_optional_parts(head: Checkpoint, target: dict | None, _answers: Answers) -> Iterator[Finding]:
    """Parts that SGLang builds only if a field asks for them."""
    config, names = head.config, head.tensors
    eagle = config.get("eagle_config") or {}
    if "input_norm.weight" in names and not eagle.get("norm_before_fc", config.get("norm_before_fc")):
        yield Finding(
            "norm-before-fc",
            "error",
            "input_norm.weight is there but norm_before_fc is not set, so SGLang would leave the norm out",
            "set it",
            set_eagle("norm_before_fc", True),
        )
    if "fc_norm.0.weight" in names and not (config.get("fc_norm") or config.get("use_aux_norm")):
        yield Finding(
            "fc-norm",
            "error",
            "fc_norm.*.weight is there but fc_norm is not set, so SGLang would leave the norms out",
            "set it",
            set_field("fc_norm", True),
        )
    for name in ("attention_bias", "bias"):
        if config.get(name) and "midlayer.self_attn.o_proj.bias" not in names:
            yield Finding(
                "attention-bias",
                "error",
                f"{name} is true but there is no o_proj.bias, which SGLang would leave at random values",
                "set it to false",
                set_field(name, False),
            )
    hidden = config.get("target_hidden_size") or (target or config).get("hidden_size")
    if "fc.weight" in names and hidden:
        yield from _check_num_aux(head, hidden)


def _check_num_aux(head: Checkpoint, hidden: int) -> Iterator[Finding]:
    width = head.shapes["fc.weight"][-1]
    found = width // hidden
    if width % hidden:
        yield Finding("target-hidden", "error", f"fc reads {width} values, no multiple of the target's {hidden}", "use this target's head")
        return
    ids = (head.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    if head.config.get("num_aux_hidden_states") not in (None, found):
        yield Finding(
            "num-aux",
            "error",
            f"num_aux_hidden_states is {head.config['num_aux_hidden_states']}, fc reads {found} hidden states",
            "remove it" if len(ids) == found or not ids and found == 3 else f"set it to {found}",
            drop_fields("num_aux_hidden_states")
            if len(ids) == found or not ids and found == 3
            else set_field("num_aux_hidden_states", found),
        )
    if (len(ids) or 3) != found:
        yield Finding(
            "num-aux",
            "error",
            f"fc reads {found} hidden states, {len(ids) or 'the default 3'} layers are named",
            "name as many as fc reads",
        )


def check_keys(head: Checkpoint, target: dict | None, _answers: Answers) -> Iterator[Finding]:
    """Everything that is still missing, unknown or of another shape."""
    try:
        expected = expected_tensors(head.config, target or {"hidden_size": head.config.get("hidden_size")})
    except KeyError as error:
        yield Finding("size-missing", "error", f"{error.args[0]} is missing and no tensor tells it", "write the size it was trained with")
        return
    expected.pop("d2t", None)  # check_vocabulary's
    shapes = head.shapes
    for name in sorted(set(expected) - set(shapes)):
        yield Finding("key-missing", "error", f"{name} is missing, SGLang would leave it at random values", "export the head again, whole")
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            yield Finding("shape", "error", f"{name} is {list(shapes[name])}, config.json makes it {list(shape)}", "use its own config")
    for name in sorted(set(shapes) - set(expected) - {"d2t", "t2d", "embed_tokens.weight"}):

        def drop(checkpoint: Checkpoint, name=name) -> None:
            del checkpoint.tensors[name]

        harmless = "rotary_emb" in name or name.startswith("verifier_lm_head")
        yield Finding(
            "key-unknown",
            "note" if harmless else "error",
            f"{name} has no place in SGLang's head and would be dropped silently",
            "leave it out" if harmless else "the head was trained with a part that SGLang does not have",
            drop if harmless else None,
        )
    if "embed_tokens.weight" in shapes:

        def drop_embedding(checkpoint: Checkpoint) -> None:
            del checkpoint.tensors["embed_tokens.weight"]

        yield Finding(
            "embedding", "note", "embed_tokens.weight is ignored, SGLang shares the target's embedding", "leave it out", drop_embedding
        )


def check_vocabulary(head: Checkpoint, _target: dict | None, _answers: Answers) -> Iterator[Finding]:
    """d2t[i] + i is the target id of draft id i (llama_eagle3.py: hot_token_id)."""
    size, draft_size = head.config.get("vocab_size"), head.config.get("draft_vocab_size")
    if not isinstance(size, int) or not isinstance(draft_size, int):
        return
    if "d2t" not in head.tensors:
        if draft_size != size:
            yield from _missing_d2t(head, draft_size, size)
        return
    if head.tensors["d2t"].shape != (draft_size,):
        yield Finding("d2t-size", "error", f"d2t has {head.tensors['d2t'].numel()} entries, lm_head {draft_size} rows", "export it again")
        return
    if head.tensors["d2t"].dtype != torch.int64:
        kind = str(head.tensors["d2t"].dtype).removeprefix("torch.")
        whole = bool((head.tensors["d2t"].double() == head.tensors["d2t"].double().round()).all())

        def to_int64(checkpoint: Checkpoint) -> None:
            checkpoint.tensors["d2t"] = checkpoint.tensors["d2t"].long()

        # bf16 and fp16 hold whole numbers exactly only up to 256 and 2048: whatever stood above is lost
        exact = whole and (kind.startswith("int") or kind in ("float32", "float64"))
        yield Finding(
            "d2t-dtype",
            "note" if kind == "int32" else "error",
            f"d2t is {kind}, SGLang uses it as an index",
            "write it as int64" if exact else "its ids are rounded; take d2t from the original",
            to_int64 if exact else None,
        )
        if not exact:
            return
    yield from _check_mapping(head, size)
    yield from _check_t2d(head, size)


def _missing_d2t(head: Checkpoint, draft_size: int, size: int) -> Iterator[Finding]:
    t2d = head.tensors.get("t2d")
    known = t2d is not None and t2d.shape == (size,) and int(t2d.bool().sum()) == draft_size

    def from_t2d(checkpoint: Checkpoint) -> None:
        checkpoint.tensors["d2t"] = t2d.bool().nonzero()[:, 0] - torch.arange(draft_size)

    yield Finding(
        "d2t-missing",
        "error",
        f"d2t is missing, so draft id i would be taken for target id i although only {draft_size} of {size} tokens have one",
        "build it from t2d, in ascending order" if known else "take d2t from where it was trained",
        from_t2d if known else None,
    )


def _check_mapping(head: Checkpoint, size: int) -> Iterator[Finding]:
    d2t = head.tensors["d2t"]
    offsets_Vd, ids_Vd = d2t + torch.arange(len(d2t)), d2t
    if _holds_ids(head, offsets_Vd, ids_Vd, size):

        def to_offsets(checkpoint: Checkpoint) -> None:
            checkpoint.tensors["d2t"] = ids_Vd - torch.arange(len(ids_Vd))

        yield Finding(
            "d2t-ids", "error", "d2t holds target ids, SGLang reads offsets (id minus index)", "subtract 0, 1, 2, ...", to_offsets
        )
        offsets_Vd = ids_Vd
    elif not _valid(offsets_Vd, size):
        low, high, distinct = int(offsets_Vd.min()), int(offsets_Vd.max()), offsets_Vd.unique().numel()
        range_fault = low < 0 or high >= size
        yield Finding(
            "d2t-range" if range_fault else "d2t-duplicate",
            "error",
            f"d2t leads to the target ids {low} .. {high} of a vocabulary of {size}"
            if range_fault
            else f"d2t leads to {distinct} distinct target ids from {len(d2t)} draft ids",
            "take d2t from where it was trained",
        )
        return
    if (offsets_Vd[1:] <= offsets_Vd[:-1]).any():
        order_Vd = offsets_Vd.argsort()

        def sort(checkpoint: Checkpoint) -> None:
            checkpoint.tensors["d2t"] = offsets_Vd[order_Vd] - torch.arange(len(order_Vd))
            checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["lm_head.weight"][order_Vd].contiguous()

        yield Finding(
            "d2t-unsorted",
            "warning",
            "the draft ids are not in ascending order of target ids; SGLang takes that, readers that go by t2d do not",
            "sort d2t and the rows of lm_head together",
            sort if "lm_head.weight" in head.tensors else None,
        )
    elif len(d2t) < size and not (offsets_Vd - torch.arange(len(d2t))).any():
        yield Finding(
            "d2t-identity",
            "warning",
            f"the draft vocabulary is simply the first {len(d2t)} ids",
            "see that d2t was saved, not its initial zeros",
        )


def _valid(ids_Vd: torch.Tensor, size: int) -> bool:
    return int(ids_Vd.min()) >= 0 and int(ids_Vd.max()) < size and ids_Vd.unique().numel() == ids_Vd.numel()


def _holds_ids(head: Checkpoint, offsets_Vd: torch.Tensor, ids_Vd: torch.Tensor, size: int) -> bool:
    """d2t holds ids if they are valid as ids and not as offsets; where both are, t2d decides."""
    if not _valid(ids_Vd, size):
        return False
    if not _valid(offsets_Vd, size):
        return True
    t2d = head.tensors.get("t2d")
    if t2d is None or t2d.shape != (size,):
        return False
    return bool(t2d.bool()[ids_Vd].all()) and not bool(t2d.bool()[offsets_Vd].all())


def _check_t2d(head: Checkpoint, size: int) -> Iterator[Finding]:
    ids_Vd = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
    if not _valid(ids_Vd, size):
        return
    member_V = torch.zeros(size, dtype=torch.bool)
    member_V[ids_Vd] = True
    t2d = head.tensors.get("t2d")

    def rebuild(checkpoint: Checkpoint) -> None:
        checkpoint.tensors["t2d"] = member_V

    if t2d is None:
        yield Finding("t2d-missing", "note", "t2d is missing; SGLang does not need it, other readers do", "build it from d2t", rebuild)
    elif t2d.shape != (size,) or not torch.equal(t2d.bool(), member_V):
        count = int(t2d.bool().sum())
        yield Finding(
            "t2d-mismatch",
            "warning",
            f"t2d marks {count} of {t2d.numel()} tokens not the {len(ids_Vd)} of d2t; SGLang goes by d2t, one is of another head",
            "build t2d from d2t",
            rebuild,
        )
    elif t2d.dtype != torch.bool:
        yield Finding("t2d-dtype", "note", f"t2d is {str(t2d.dtype).removeprefix('torch.')}", "write it as bool", rebuild)


def check_values(head: Checkpoint, target: dict | None, _answers: Answers) -> Iterator[Finding]:
    for name, tensor in head.tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            broken = int((~torch.isfinite(tensor)).sum())
            yield Finding("not-finite", "error", f"{name} holds {broken} NaN or infinite values", "go back to an earlier checkpoint")
    yield from _check_dtype(head, target)


def _check_dtype(head: Checkpoint, target: dict | None) -> Iterator[Finding]:
    """With `--dtype auto` a head runs in its config's dtype; float32 or none at all means float16 (model_config.py)."""
    stored = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in head.tensors.values() if tensor.is_floating_point()})
    stated, theirs = _stated(head.config), _stated(target or {})
    wanted = theirs or (stored[0] if len(stored) == 1 and stored[0] in ("bfloat16", "float16") else "bfloat16")

    def cast(checkpoint: Checkpoint) -> None:
        kind = getattr(torch, wanted)
        checkpoint.tensors = {name: t.to(kind) if t.is_floating_point() else t for name, t in checkpoint.tensors.items()}
        checkpoint.config.pop("dtype", None)
        checkpoint.config["torch_dtype"] = wanted

    problem = None
    if stated is None:
        problem = "torch_dtype is missing, so SGLang would run the head in float16"
    elif theirs and stated != theirs:
        problem = f"torch_dtype is {stated}, the target's is {theirs}, whose embedding and hidden states the head reads"
    elif len(stored) > 1 or stored and stored[0] != stated:
        problem = f"the weights are {' and '.join(stored)}, torch_dtype is {stated}"
    elif stated == "float32" and theirs is None:
        problem = "torch_dtype is float32, which SGLang turns into float16 unless --dtype says otherwise"
    if problem:
        yield Finding("dtype", "warning", problem, f"write {wanted} for both", cast)


def _stated(config: dict) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return str(value).removeprefix("torch.") if value else None
