"""The training loop: DeepSpeed drives the head, the frozen target stays outside its engine.

One optimiser step covers `gradient_accumulation` micro-batches in every process. Each loss is divided by the supervised positions of the
whole step, so the gradient does not depend on how a step is cut into processes and micro-batches.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from train.batches import BatchLoader, Plan, plan_epoch
from train.checkpoint import RunFolder, save_final_head
from train.dataset import Dataset, FeatureSource, load_dataset
from train.foreign_start import ForeignStart, foreign_start
from train.head import Eagle3Head, HeadConfig
from train.recipe import Recipe, TrainSettings
from train.report import Reporter
from train.target import FrozenTarget
from train.ttt import DraftTarget, TTTModel
from train.warm_start import random_start, warm_start
from train.world import World, join_world, sum_over_world

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Job:
    """Everything the loop works with."""

    recipe: Recipe
    world: World
    engine: object
    loader: BatchLoader
    held_out: BatchLoader
    target: DraftTarget
    parts: int  # micro-batches of an optimiser step
    dtype: torch.dtype

    def plan(self, epoch: int) -> Plan:
        lengths = [len(chat.ids) for chat in self.loader.chats]
        return plan_epoch(lengths, self.recipe.train.micro_batch_tokens, self.parts, self.recipe.train.seed, epoch)


def train(recipe: Recipe, restart_on_change: bool = False) -> Path:
    """Run a recipe to its end, from its last checkpoint if there is one -> the folder of the finished head.

    Raises RecipeError when the output folder holds a run with other settings.
    """
    world = join_world()
    config = AutoConfig.from_pretrained(recipe.target)
    recipe, start = foreign_start(recipe, config)
    data = load_dataset(recipe, AutoTokenizer.from_pretrained(recipe.target), config.vocab_size)
    if start:
        data.vocab = start.vocabulary(data.train)
    run = RunFolder(recipe.output_dir, world)
    run.claim(recipe, data.fingerprint(), restart_on_change)
    if run.finished:
        if world.first:
            print(f"{run.head} is up to date", flush=True)
        return run.head
    job = _set_up(recipe, world, data, start)
    if world.first:
        print(f"{data.notes}\n{_describe(recipe, data, world.size)}", flush=True)
    _loop(job, run)
    save_final_head(job.engine, recipe, data.vocab, run, world)
    return run.head


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """Linear warm-up, then cosine to `min_lr_ratio`; `step` counts from 0."""
    warmup = max(1, round(settings.warmup_ratio * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


def deepspeed_config(settings: TrainSettings, world_size: int) -> dict:
    """The part of the recipe that is DeepSpeed's business. Micro-batches have a token budget: DeepSpeed's row count is nominal."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.gradient_accumulation,
        "train_batch_size": settings.gradient_accumulation * world_size,
        "gradient_clipping": settings.clip,
        "bf16": {"enabled": settings.precision == "bf16"},
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no C++ build
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _set_up(recipe: Recipe, world: World, data: Dataset, start: ForeignStart | None) -> Job:
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
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True)
    engine, *_ = deepspeed.initialize(
        model=TTTModel(head, settings.ttt_decay), optimizer=optimizer, config=deepspeed_config(settings, world.size)
    )
    loaders = [BatchLoader(chats, source.get, settings.ttt_steps) for chats in (data.train, data.held_out)]
    return Job(recipe, world, engine, *loaders, draft_target, world.size * settings.gradient_accumulation, dtype)


def _new_head(recipe: Recipe, target: FrozenTarget, data: Dataset) -> Eagle3Head:
    head = Eagle3Head(HeadConfig.from_target(target.config, len(data.vocab.ids_Vd), target.aux_layers))
    if recipe.head.warm_start:
        warm_start(head, target, data.vocab.ids_Vd)
    else:
        random_start(head)
    return head


def _loop(job: Job, run: RunFolder) -> None:
    settings = job.recipe.train
    per_epoch = [len(job.plan(epoch)) for epoch in range(settings.epochs)]
    total = sum(per_epoch)
    done = run.load(job.engine)
    with Reporter(run, job.world, done, total, settings.log_every) as reporter:
        first_step = 0
        for epoch in range(settings.epochs):
            if done < first_step + per_epoch[epoch]:
                for number, step in enumerate(job.plan(epoch), first_step + 1):
                    if number > done:
                        _train_step(job, step, number, total, reporter)
                        last = number == total
                        if last or number % settings.eval_every == 0:
                            reporter.held_out(number, evaluate(job))
                        if last or number % settings.save_every == 0:
                            run.save(job.engine, number, settings.keep_checkpoints)
            first_step += per_epoch[epoch]


def _train_step(job: Job, step: list[list[int]], number: int, total: int, reporter: Reporter) -> None:
    """One optimiser step: this process takes every world-size-th micro-batch."""
    rate = learning_rate(job.recipe.train, number - 1, total)
    for group in job.engine.optimizer.param_groups:
        group["lr"] = rate
    counts_K = job.loader.counts(step)
    start, sums, tokens = time.monotonic(), None, 0
    for rows in step[job.world.rank :: job.world.size]:
        batch = job.loader.batch(rows).to(job.world.device, job.dtype)
        loss, part = job.engine(batch, job.target, counts_K.to(job.world.device))
        # DeepSpeed averages over processes and accumulation steps; the counts already cover them all.
        job.engine.backward(loss * job.parts)
        job.engine.step()
        table = torch.stack([part.loss_K, part.hits_K, part.positions_K]).float()
        sums = table if sums is None else sums + table
        tokens += sum(len(job.loader.chats[row].ids) for row in rows)
    reporter.train(number, sum_over_world(sums), rate, tokens * job.world.size, time.monotonic() - start)


@torch.no_grad()
def evaluate(job: Job) -> torch.Tensor | None:
    """Loss, hits and positions summed over the held-out rows [3, K]; None without such rows. Changes nothing in the training state."""
    chats = job.held_out.chats
    if len(chats) < job.world.size:
        return None
    plan = plan_epoch([len(chat.ids) for chat in chats], job.recipe.train.micro_batch_tokens, job.world.size, 0, 0)
    module, was_training = job.engine.module, job.engine.module.training
    module.eval()
    sums = torch.zeros(3, job.recipe.train.ttt_steps, device=job.world.device)
    for step in plan:
        batch = job.held_out.batch(step[job.world.rank]).to(job.world.device, job.dtype)
        _, part = module(batch, job.target, torch.ones(job.recipe.train.ttt_steps, device=job.world.device))
        sums += torch.stack([part.loss_K, part.hits_K, part.positions_K]).float()
    module.train(was_training)
    return sum_over_world(sums)


def _describe(recipe: Recipe, data: Dataset, world_size: int) -> str:
    settings = recipe.train
    lengths = [len(chat.ids) for chat in data.train]
    parts = world_size * settings.gradient_accumulation
    steps = sum(len(plan_epoch(lengths, settings.micro_batch_tokens, parts, settings.seed, epoch)) for epoch in range(settings.epochs))
    vocab, supervised = data.vocab, sum(chat.predicted for chat in data.train)
    plan = {
        "rows": f"{len(data.train)} for training ({sum(lengths)} tokens, {supervised} supervised), {len(data.held_out)} held out",
        "draft vocabulary": f"{len(vocab.ids_Vd)} of {vocab.target_size} tokens, {vocab.coverage:.2%} of the answers' tokens",
        "steps": f"{steps} in {settings.epochs} epochs, up to {settings.micro_batch_tokens * parts} tokens each",
        "engine": f"{world_size} process(es), ZeRO-{settings.zero_stage}, {settings.precision}, {settings.ttt_steps} test steps",
    }
    return "\n".join(f"{name:>17}: {text}" for name, text in plan.items())
