"""Answers from a running SGLang server, plain or with TALON: `slots` conversations at a time, each turn on top of the target's own answers.

Prompts go out as token ids, rendered and tokenised here as training will do it.
"""

import asyncio
import hashlib
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from train.answerer import end_of_answer
from train.answers import AnswerFile, Job
from train.progress import progress_bar
from train.recipe import AnswerSettings, RecipeError

RETRY_AFTER_S = (1, 2, 4, 8)  # a server that restarts in this time is not noticed
ANSWER_TIMEOUT_S = 900.0


class ServerLost(RecipeError):
    """One sentence: the server no longer answers, and how to go on."""


def answer_by_server(target_dir: Path, jobs: list[Job], done: int, file: AnswerFile, settings: AnswerSettings) -> None:
    """Answer the jobs; `done` were answered before. Every conversation is on disk when its last answer has come.

    Raises ServerLost when the server does not answer, RecipeError when it serves another model.
    """
    asyncio.run(_answer(target_dir, jobs, done, file, settings))


async def _answer(target_dir: Path, jobs: list[Job], done: int, file: AnswerFile, settings: AnswerSettings) -> None:
    limits = httpx.Limits(max_connections=settings.slots)
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=10.0)
    # No proxy from the environment: the server is on this machine or in the same cluster.
    async with httpx.AsyncClient(base_url=settings.server, limits=limits, timeout=timeout, trust_env=False) as http:
        source = await _identify(http, target_dir, settings)
        print(f"{len(jobs)} conversations go to {source} at {settings.server}, {settings.slots} at a time", flush=True)
        with file.appending(rows_at_once=1) as emit, progress_bar("conversations", done + len(jobs), done) as advance:
            asker = ServerAsker(http, AutoTokenizer.from_pretrained(target_dir), _end_ids(target_dir), settings, source)

            async def work(queue: list[Job]):
                while queue:
                    emit(await asker.converse(queue.pop()))
                    advance(1, f"{asker.tokens} answer tokens")

            queue = jobs[::-1]
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(settings.slots, len(jobs))):
                        group.create_task(work(queue))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        file.refused = asker.refused


class ServerAsker:
    """One conversation after the other, through /generate."""

    def __init__(self, http: httpx.AsyncClient, tokenizer, end_ids: set[int], settings: AnswerSettings, source: str):
        self.http, self.tokenizer, self.end_ids, self.settings, self.source = http, tokenizer, end_ids, settings, source
        self.refused: Counter = Counter()
        self.tokens = 0

    async def converse(self, job: Job) -> dict:
        """-> the row of a finished conversation. It ends early at a truncated or empty answer or at a prompt that does not fit."""
        while job.turn < len(job.prompt.turns):
            reason = job.ask(self.tokenizer, self.settings)
            if not reason:
                job.answer, ended, reason = await self._generate(job)
            if not reason:
                self.tokens += len(job.answer)
                text = self.tokenizer.decode(job.answer)
                reason = "" if text.strip() else "empty answer"
            if reason:
                self.refused[reason] += 1
                break
            job.messages.append({"role": "assistant", "content": text})
            if not ended:
                return job.row(self.settings, self.source, truncated=True)
        return job.row(self.settings, self.source)

    async def _generate(self, job: Job) -> tuple[list[int], bool, str]:
        """-> token ids without the end token, whether the answer ended by itself, why there is none."""
        reply = await post(self.http, "/generate", {"input_ids": job.ids, "sampling_params": self._sampling(job)})
        if reply.status_code >= 400:
            return [], False, f"the server refused the prompt ({_sentence(reply)})"
        body = reply.json()
        finish, ids = body["meta_info"]["finish_reason"], body["output_ids"]
        if finish["type"] == "abort":
            return [], False, f"the server gave up ({finish.get('message', 'no reason given')})"
        if ids and ids[-1] in self.end_ids:  # also where it came as the last token allowed, which the server calls "length"
            return ids[:-1], True, ""
        return ids, finish["type"] == "stop", ""

    def _sampling(self, job: Job) -> dict:
        """Everything is spelled out, so that no default of the server or of the model applies."""
        settings = self.settings
        seed = hashlib.sha256(f"{settings.seed}/{job.prompt.id}/{job.sample}/{job.turn}".encode()).digest()
        return {
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.end_ids),
            "sampling_seed": int.from_bytes(seed[:4], "big"),  # heeded by servers with --enable-deterministic-inference
        }


async def post(http: httpx.AsyncClient, path: str, body: dict | None = None) -> httpx.Response:
    """POST, or GET without a body; repeated while the server is unreachable or not ready. Raises ServerLost."""
    for wait in (*RETRY_AFTER_S, None):
        try:
            reply = await (http.get(path) if body is None else http.post(path, json=body))
            if reply.status_code < 500:
                return reply
            trouble = f"status {reply.status_code}, {_sentence(reply)}"
        except httpx.TransportError as error:
            trouble = str(error) or type(error).__name__
        if wait is None:
            break
        await asyncio.sleep(wait)
    raise ServerLost(
        f"`answers.server` {http.base_url} does not answer ({trouble}); start it again and rerun this command, what is answered stays."
    )


async def _identify(http: httpx.AsyncClient, target_dir: Path, settings: AnswerSettings) -> str:
    """-> the server's name and version. Raises RecipeError when it serves another model than the target."""
    model, server = (await post(http, "/model_info")).json(), (await post(http, "/server_info")).json()
    ours = json.loads((target_dir / "config.json").read_text())
    theirs = Path(model["model_path"]) / "config.json"
    same = model.get("model_type") in (None, ours["model_type"])
    if theirs.is_file():  # on this machine, so every size can be compared
        served = json.loads(theirs.read_text())
        same = all(served.get(name) == ours.get(name) for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"))
    if not same:
        raise RecipeError(f"`answers.server` {settings.server} serves {model['model_path']}, another model than `target` {target_dir}.")
    return f"sglang {server.get('version', 'of unknown version')}"


def _end_ids(target_dir: Path) -> set[int]:
    generation = None
    with suppress(OSError):
        generation = GenerationConfig.from_pretrained(target_dir)
    if generation is None or generation.eos_token_id is None:
        generation = AutoConfig.from_pretrained(target_dir)
    return end_of_answer(generation, AutoTokenizer.from_pretrained(target_dir))


def _sentence(reply: httpx.Response) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return " ".join(str(reply.json()["error"]["message"]).split())[:200]
    return " ".join(reply.text.split())[:200] or "no reason given"
