"""Requests to a running SGLang server through its native /generate endpoint, as token ids in and token ids out."""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

REQUEST_TIMEOUT_S = 600.0


class RequestError(RuntimeError):
    """A request that the server refused or did not answer. `str()` is one sentence."""


@dataclass(frozen=True)
class Answer:
    """One finished request.

    output_ids: generated token ids, the end token included when the model produced it
    meta: SGLang's `meta_info`, unchanged
    latency_s: wall-clock seconds from sending the request to holding the whole answer
    chunks: of a streamed answer, (tokens that came, seconds since the request or the chunk before); empty otherwise
    """

    output_ids: list[int]
    meta: dict = field(repr=False)
    latency_s: float
    chunks: list[tuple[int, float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return int(self.meta["completion_tokens"])

    @property
    def rounds(self) -> int:
        """Target forwards that verified a draft (`spec_verify_ct`); 0 on a server without speculation."""
        return int(self.meta.get("spec_verify_ct") or 0)


class ChatTokenizer:
    """Renders chats with the target's own template, so that every server is asked with exactly the same token ids."""

    def __init__(self, target_dir: Path):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(target_dir)

    def encode(self, turns: Sequence[str]) -> list[int]:
        """Ids of a chat whose turns alternate user, assistant, user, ... and that ends with the generation prompt."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(rendered, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


class Client:
    """Talks to one server. Use as a context manager; safe to call from several threads."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        # A proxy from the environment must never stand between us and 127.0.0.1.
        self._http = httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc) -> None:
        self._http.close()

    def generate(self, input_ids: list[int], max_new_tokens: int, *, rid: str | None = None, stream: bool = False, **sampling) -> Answer:
        """One greedy completion of at most `max_new_tokens` tokens; `sampling` overrides single sampling parameters.

        rid: the server's name for the request, in its log and in a TALON trace (default: one of its own)
        stream: take the answer in chunks, which gives `Answer.chunks`
        Raises RequestError with the server's own message when it answers anything but 200 or goes away.
        """
        body = {"input_ids": input_ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, **sampling}}
        body |= {} if rid is None else {"rid": rid}
        started = time.perf_counter()
        try:
            if stream:
                return self._stream(body | {"stream": True}, started)
            response = self._http.post(self.url + "/generate", json=body)
        except httpx.HTTPError as error:
            raise RequestError(f"The server at {self.url} did not answer a request of {len(input_ids)} tokens ({error!r}).") from error
        latency_s = time.perf_counter() - started
        if response.status_code != 200:
            raise self._refusal(len(input_ids), response)
        found = response.json()
        return Answer(found["output_ids"], found["meta_info"], latency_s)

    def _stream(self, body: dict, started: float) -> Answer:
        """Server-sent events, one a chunk, each with all tokens so far."""
        size, last, chunks, event = len(body["input_ids"]), started, [], None
        with self._http.stream("POST", self.url + "/generate", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise self._refusal(size, response)
            for line in response.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                now, data = time.perf_counter(), json.loads(line.removeprefix("data:"))
                if "error" in data:
                    raise RequestError(f"The server broke off a request of {size} tokens: {str(data['error'])[:300]}")
                new = len(data["output_ids"]) - (len(event["output_ids"]) if event else 0)
                if new:
                    chunks.append((new, now - last))
                    last = now
                event = data
        if event is None:
            raise RequestError(f"The server at {self.url} ended a request of {size} tokens without an answer.")
        return Answer(event["output_ids"], event["meta_info"], time.perf_counter() - started, chunks)

    def _refusal(self, size: int, response: httpx.Response) -> RequestError:
        return RequestError(f"The server refused a request of {size} tokens with status {response.status_code}: {response.text[:300]}")

    def generate_all(
        self, prompts: Sequence[list[int]], max_new_tokens: int, concurrency: int = 1, *, rids: Sequence[str] | None = None, **options
    ) -> Iterator[Answer]:
        """Answers in the order of `prompts`, with at most `concurrency` requests in flight; `options` as in `generate`.

        Raises RequestError at the first failure.
        """
        names = rids or [None] * len(prompts)
        pool = ThreadPoolExecutor(max_workers=concurrency)
        futures = [pool.submit(self.generate, ids, max_new_tokens, rid=rid, **options) for ids, rid in zip(prompts, names, strict=True)]
        try:
            for future in futures:
                yield future.result()
        finally:
            # After Ctrl-C or a failure nobody waits for the requests in flight: they end with the server.
            pool.shutdown(wait=False, cancel_futures=True)

    def counters(self) -> dict[str, float]:
        """Counters and gauges of /metrics, summed over their labels, by metric name. Raises RequestError when there is no such page."""
        return parse_counters(self.metrics_text())

    def metrics_text(self) -> str:
        """The /metrics page. Raises RequestError when there is none."""
        try:
            response = self._http.get(self.url + "/metrics")
        except httpx.HTTPError as error:
            raise RequestError(f"The server at {self.url} did not answer /metrics ({error!r}).") from error
        if response.status_code != 200:
            raise RequestError(
                f"The server at {self.url} has no /metrics page (status {response.status_code}); start it with --enable-metrics."
            )
        return response.text


def parse_counters(text: str) -> dict[str, float]:
    """Prometheus text format -> {metric name: sum over all label sets}; lines that are not samples are skipped."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        fields = line[line.rindex("}") + 1 :].split() if "{" in line else line.split()[1:]
        if fields:
            totals[name] = totals.get(name, 0.0) + float(fields[0])
    return totals
