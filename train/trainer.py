"""The training loop: DeepSpeed drives the head, the frozen target stays outside its engine.

One optimiser step covers `gradient_accumulation` micro-batches in every process. Each loss is divided by the supervised positions of the
whole step, so the gradient does not depend on how a step is cut into processes and micro-batches.

Shape suffix: K training-time-test steps.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoTokenizer

from train.batches import BatchLoader
from train.checkpoint import Checkpoint, RunFolder, save_final_head
from train.dataset import Dataset, FeatureSource, load_dataset
from train.engine_state import full_weights, restore
from train.evaluation import HeldOut, evaluate, plain_head
from train.foreign_start import ForeignStart, foreign_start
from train.head import Eagle3Head, HeadConfig
from train.machine import DTYPES
from train.recipe import Recipe, RecipeError, TrainSettings
from train.report import Reporter, check_trackers
from train.schedule import Schedule, make_schedule
from train.target import FrozenTarget
from train.ttt import DraftTarget, TTTModel
from train.vocab import DraftVocab
from train.warm_start import random_start, warm_start
from train.world import World, join_world, sum_over_world


@dataclass
class Job:
    """Everything the loop works with. `done`: optimiser steps of earlier runs of the folder."""

    recipe: Recipe
    world: World
    engine: object
    loader: BatchLoader
    held_out: BatchLoader
    target: DraftTarget
    vocab: DraftVocab
    schedule: Schedule
    dtype: torch.dtype
    done: int


def train(recipe: Recipe, restart_on_change: bool = False) -> Path:
    """Run a recipe to its end, from its last checkpoint if there is one -> the folder of the finished head.

    Raises RecipeError when the output folder holds a run with other settings, or this machine cannot do what the recipe asks for.
    """
    world = join_world()
    check_trackers(recipe)
    check_machine(recipe.train, world)
    config = AutoConfig.from_pretrained(recipe.target)
    recipe, start = foreign_start(recipe, config)
    data = load_dataset(recipe, AutoTokenizer.from_pretrained(recipe.target), config.vocab_size)
    if start:
        data.vocab = start.vocabulary(data.train)
    run = RunFolder(recipe.output_dir, world)
    recipe = run.claim(recipe, data.fingerprint(), restart_on_change)
    if run.finished:
        if world.first:
            print(f"{run.head} is up to date", flush=True)
        return run.head
    schedule = make_schedule([len(chat.ids) for chat in data.train], recipe.train, world.size * recipe.train.gradient_accumulation)
    job = _set_up(recipe, world, data, start, schedule, run.load())
    if world.first:
        print(f"{data.notes}\n{_describe(job, data)}", flush=True)
    _loop(job, run)
    save_final_head(job.engine, recipe, data.vocab, run, world)
    return run.head


def check_machine(settings: TrainSettings, world: World) -> None:
    """Raises RecipeError for what DeepSpeed would refuse later, or accept and not do."""
    if world.device.type == "cpu":
        for name in ("offload_optimizer", "offload_param"):
            if getattr(settings, name):
                raise RecipeError(f"`train.{name}` is true, but there is no GPU here: everything is in the host's memory; set it to false.")
    if settings.precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise RecipeError("`train.precision` is 'fp16', which DeepSpeed does not support on this device; use bf16 or fp32.")


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """Linear warm-up, then cosine to `min_lr_ratio`; `step` counts from 0."""
    warmup = max(1, round(settings.warmup_ratio * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


def deepspeed_config(settings: TrainSettings, world_size: int) -> dict:
    """The part of the recipe that is DeepSpeed's business. Micro-batches have a token budget: DeepSpeed's row count is nominal."""
    zero: dict = {"stage": settings.zero_stage}
    for name in ("offload_optimizer", "offload_param"):
        if getattr(settings, name):
            zero[name] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "train_batch_size": settings.gradient_accumulation * world_size,
        "gradient_clipping": settings.clip,
        "bf16": {"enabled": settings.precision == "bf16"},
        # A loss scale that starts at 2^14, halves on overflow at once and doubles after 1000 good steps.
        "fp16": {"enabled": settings.precision == "fp16", "initial_scale_power": 14, "loss_scale_window": 1000, "hysteresis": 1},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no C++ build
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _set_up(
    recipe: Recipe, world: World, data: Dataset, start: ForeignStart | None, schedule: Schedule, checkpoint: Checkpoint | None
) -> Job:
    settings, dtype = recipe.train, DTYPES[recipe.train.precision]
    target = FrozenTarget.load(recipe.target, dtype, world.device, recipe.head.aux_layers)
    source = FeatureSource(target, recipe.features)
    source.check(world.rank, world.size)
    dist.barrier()
    source.prepare(data.train + data.held_out, world.rank, world.size, 4 * settings.micro_batch_tokens)
    dist.barrier()
    if source.store:
        source.store.refresh()
    torch.manual_seed(settings.seed)
    head = start.head() if start else _new_head(recipe, target, data)
    head.lm_head.requires_grad_(recipe.head.train_lm_head)
    draft_target = DraftTarget(
        embedding_VH=target.embedding.weight,
        lm_head_VdH=target.lm_head_VH[data.vocab.ids_Vd.to(world.device)].clone(),
        in_draft_V=data.vocab.t2d_V.to(world.device),
        ids_Vd=data.vocab.ids_Vd.to(world.device),
        logit_cap=target.logit_cap,
    )
    if source.store:  # every layer of the target has done its work
        target.drop_layers()
    engine = _engine(head, settings, world, checkpoint)
    loaders = [BatchLoader(chats, source.get, settings.ttt_steps) for chats in (data.train, data.held_out)]
    return Job(recipe, world, engine, *loaders, draft_target, data.vocab, schedule, dtype, checkpoint.step if checkpoint else 0)


def _new_head(recipe: Recipe, target: FrozenTarget, data: Dataset) -> Eagle3Head:
    head = Eagle3Head(HeadConfig.from_target(target.config, len(data.vocab.ids_Vd), target.aux_layers))
    if recipe.head.warm_start:
        warm_start(head, target, data.vocab.ids_Vd)
    else:
        random_start(head)
    return head


def _engine(head: Eagle3Head, settings: TrainSettings, world: World, checkpoint: Checkpoint | None):
    """DeepSpeed around the head. A checkpoint's weights go in first, so that DeepSpeed's own copies are made from them."""
    if checkpoint:
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(checkpoint.tensors[f"weight/{name}"])
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True)
    model = TTTModel(head, settings.ttt_decay, settings.loss, settings.activation_checkpointing)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(settings, world.size))
    if checkpoint:
        restore(engine, checkpoint.tensors, checkpoint.facts)
    return engine


def _loop(job: Job, run: RunFolder) -> None:
    settings, total = job.recipe.train, job.schedule.total
    with Reporter(run, job.recipe, job.world, job.done, total, job.schedule.tokens_until(job.done)) as reporter:
        first_step = 0
        for epoch, steps in enumerate(job.schedule.per_epoch):
            if job.done < first_step + steps:
                for number, step in enumerate(job.schedule.epoch(epoch), first_step + 1):
                    if number > job.done:
                        _train_step(job, step, number, reporter)
                        last = number == total
                        if last or number % settings.eval_every == 0:
                            _held_out(job, run, number, reporter)
                        if last or number % settings.save_every == 0:
                            run.save(job.engine, number, settings.keep_checkpoints)
            first_step += steps


def _train_step(job: Job, step: list, number: int, reporter: Reporter) -> None:
    """One optimiser step: this process takes every world-size-th micro-batch."""
    rate = learning_rate(job.recipe.train, number - 1, job.schedule.total)
    for group in job.engine.optimizer.param_groups:
        group["lr"] = rate
    counts_K = job.loader.counts(step)
    start, sums = time.monotonic(), None
    for rows in step[job.world.rank :: job.world.size]:
        batch = job.loader.batch(rows).to(job.world.device, job.dtype)
        loss, table_5K = job.engine(batch, job.target, counts_K.to(job.world.device))
        # DeepSpeed averages over processes and accumulation steps; the counts already cover them all.
        job.engine.backward(loss * job.schedule.parts)
        job.engine.step()
        sums = table_5K if sums is None else sums + table_5K
    reporter.train(number, sum_over_world(sums), rate, job.schedule.tokens(step), time.monotonic() - start)


def _held_out(job: Job, run: RunFolder, number: int, reporter: Reporter) -> None:
    """Evaluate, report, and keep the head if it is the best so far. Changes nothing in the training state."""
    if not job.held_out.chats:
        return
    world, settings = job.world, job.recipe.train
    weights = full_weights(job.engine)
    head = plain_head(job.engine.module.head, weights, world.device, job.dtype)
    share = evaluate(head, job.held_out, job.target, settings, world.device, job.dtype, world.rank, world.size)
    found = HeldOut.of_flat(sum_over_world(share.flat()))
    if world.first:
        reporter.held_out(number, found)
        if found.chain.rounds:
            run.keep_best(weights, head.config.to_json(), job.vocab, job.recipe.target, number, found.chain.accept_length)
    dist.barrier()


def _describe(job: Job, data: Dataset) -> str:
    settings, schedule, vocab = job.recipe.train, job.schedule, data.vocab
    lengths, supervised = schedule.lengths, sum(chat.predicted for chat in data.train)
    zero = f"ZeRO-{settings.zero_stage}, {settings.precision}, {settings.ttt_steps} test steps, loss {settings.loss}"
    plan = {
        "rows": f"{len(lengths)} for training ({sum(lengths)} tokens, {supervised} supervised), {len(data.held_out)} held out",
        "draft vocabulary": f"{len(vocab.ids_Vd)} of {vocab.target_size} tokens, {vocab.coverage:.2%} of the answers' tokens",
        "steps": f"{schedule.total} in {len(schedule.per_epoch)} epochs, up to {schedule.budget * schedule.parts} tokens each",
        "engine": f"{job.world.size} process(es), {settings.gradient_accumulation} micro-batch(es) each and step, {zero}",
    }
    return "\n".join(f"{name:>17}: {text}" for name, text in plan.items())
