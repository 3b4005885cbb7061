"""Start a real SGLang server as a subprocess, wait until it answers, and end it.

    with serve(ServerSpec(target=Path("..."), head=Path("..."), algorithm="TALON", nodes=16, width=4)) as server:
        httpx.post(server.url + "/generate", json=...)

The server is the plain `python -m sglang.launch_server`: nothing is patched from here, so what works here works on a command line.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_TIMEOUT_S = 180.0
# A server that lost its scheduler first waits 5 s to let a GPU settle. Nothing is written then, so there is nothing to wait for.
STOP_TIMEOUT_S = 2.0
LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """A server that did not start or that died. `str()` is one sentence; `log_tail` holds the last lines of its log."""

    def __init__(self, sentence: str, log_tail: str = ""):
        super().__init__(sentence)
        self.log_tail = log_tail


@dataclass(frozen=True)
class ServerSpec:
    """Everything that decides how one server behaves. Fields left at None are not passed, so SGLang's or TALON's default holds.

    nodes: N, tree nodes verified per request and round, root included (--speculative-num-draft-tokens)
    width: K, --speculative-eagle-topk
    steps: depth cap of TALON, draft depth of EAGLE3 (--speculative-num-steps)
    gate: mu, TALON only (--talon-gate)
    batch_budget: TALON only; tree nodes verified in a round over all requests (--talon-batch-budget)
    trace: TALON only; one JSON line per request and round is appended here (--talon-trace)
    threads: OMP threads of the server; two busy multi-threaded PyTorch processes on two cores slow each other by orders of magnitude
    extra: further command line words, passed as they are
    env: further environment variables
    launcher: what Python runs
    """

    target: Path
    head: Path | None = None
    algorithm: str = "none"
    nodes: int | None = None
    width: int | None = None
    steps: int | None = None
    gate: float | None = None
    batch_budget: int | None = None
    dtype: str = "float32"
    trace: Path | None = None
    device: str = "auto"
    threads: int | None = None
    metrics: bool = True
    max_total_tokens: int | None = 16384
    max_running_requests: int = 8
    extra: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ("-m", "sglang.launch_server")

    def __post_init__(self):
        if self.algorithm not in ("none", "EAGLE3", "TALON"):
            raise ValueError(f"ServerSpec.algorithm is {self.algorithm!r}; use 'none', 'EAGLE3' or 'TALON'.")
        if self.algorithm == "none" and self.head is not None:
            raise ValueError("ServerSpec.head is set but algorithm is 'none'; drop the head or choose 'EAGLE3' or 'TALON'.")
        if self.algorithm != "TALON" and (self.gate, self.trace, self.batch_budget) != (None, None, None):
            raise ValueError(
                f"ServerSpec.gate, .trace and .batch_budget belong to TALON, not to algorithm {self.algorithm!r}; leave them at None."
            )

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and not Path("/dev/nvidiactl").exists())

    @property
    def name(self) -> str:
        """Short and unique per decoding setting, such as `TALON N=16 K=4` (None fields left out)."""
        shown = {"N": self.nodes, "K": self.width, "D": self.steps, "mu": self.gate, "batch": self.batch_budget}
        settings = [f"{key}={value}" for key, value in shown.items() if value is not None]
        return " ".join(["plain" if self.algorithm == "none" else self.algorithm, *settings])


@dataclass
class RunningServer:
    """A server that answered /health. `url` has no trailing slash; `pid` is the parent of its process group."""

    spec: ServerSpec
    url: str
    pid: int
    log_path: Path
    start_s: float
    _process: subprocess.Popen

    def alive(self) -> bool:
        return self._process.poll() is None

    def check_alive(self) -> None:
        """Raises ServerError, with the reason from the log, if the server has died."""
        if not self.alive():
            raise _death(self.spec, self._process.returncode, self.log_path, "while serving")


@contextlib.contextmanager
def serve(spec: ServerSpec, *, log_path: Path | None = None, start_timeout_s: float = START_TIMEOUT_S) -> Iterator[RunningServer]:
    """Starts the server of `spec` on 127.0.0.1 and a free port, yields it once /health answers 200, and always ends all its processes.

    The log goes to `log_path`; without one, to a temporary file that is deleted when all went well.
    Raises ServerError (one sentence, log tail attached) when the process dies or is not up after `start_timeout_s` seconds.
    """
    keep_log = log_path is not None
    log_path = _log_file(spec, log_path)
    port = free_port()
    started = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command_line(spec, port),
            env=environment(spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A killed evaluation must not leave a server behind. Linux binds this to the starting thread, so only from the main one.
            preexec_fn=_die_with_parent if threading.current_thread() is threading.main_thread() else None,  # noqa: PLW1509
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, spec, url, log_path, start_timeout_s)
        yield RunningServer(spec, url, process.pid, log_path, time.monotonic() - started, process)
    except BaseException:
        keep_log = True
        raise
    finally:
        _end_group(process)
        if not keep_log:
            log_path.unlink(missing_ok=True)


def command_line(spec: ServerSpec, port: int) -> list[str]:
    """The exact launch command (list of words) for `spec` on `port`."""
    words = [sys.executable, *spec.launcher, "--model-path", str(spec.target), "--dtype", spec.dtype]
    words += ["--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
    words += ["--max-running-requests", str(spec.max_running_requests)]
    if spec.max_total_tokens is not None:
        words += ["--max-total-tokens", str(spec.max_total_tokens)]
    if spec.on_cpu:
        # The size of the KV pool comes from --max-total-tokens. The fraction is only a limit, taken of a free memory that other processes
        # change while the server loads: too small a one fails the start for no reason.
        words += ["--device", "cpu", "--mem-fraction-static", "0.5", "--sleep-on-idle"]
    if spec.metrics:
        words += ["--enable-metrics"]
    if spec.algorithm != "none":
        words += ["--speculative-algorithm", spec.algorithm]
    options = {
        "--speculative-draft-model-path": spec.head,
        "--speculative-num-draft-tokens": spec.nodes,
        "--speculative-eagle-topk": spec.width,
        "--speculative-num-steps": spec.steps,
        "--talon-gate": spec.gate,
        "--talon-trace": spec.trace,
        "--talon-batch-budget": spec.batch_budget,
    }
    for flag, value in options.items():
        if value is not None:
            words += [flag, str(value)]
    return words + list(spec.extra)


def environment(spec: ServerSpec) -> dict[str, str]:
    """The caller's environment plus what a local server needs. Nothing is ever fetched from a model hub."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", PYTHONUNBUFFERED="1")
    if spec.on_cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["TORCHDYNAMO_DISABLE"] = "1"  # compiling SGLang's small helpers takes longer than they ever save on a CPU
    if spec.threads is not None:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(spec.threads)
    return {**env, **spec.env}


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reason_from_log(text: str) -> str:
    """The line of a server log that best says why it died: the last plain error line, or the last line that is not a traceback frame."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    # SGLang's parent reports a dead child with an error of its own; the child's exception, further up, is the cause.
    secondary = re.compile(r"Rank \d+ scheduler|scheduler (died|is dead)|exit ?code|SystemExit|EOFError|KeyboardInterrupt", re.IGNORECASE)
    errors = [line for line in lines if re.match(r"^([\w.]+(Error|Exception|Exit)\b:?|.*\berror: )", line)]
    primary = [line for line in errors if not secondary.search(line)]
    chosen = (primary or errors or lines or ["its log is empty"])[-1]
    return re.sub(r"^([\w]+\.)+(?=\w+Error|\w+Exception)", "", chosen.strip())


def _wait_until_healthy(process: subprocess.Popen, spec: ServerSpec, url: str, log_path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=30.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise _death(spec, process.returncode, log_path, "while starting")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(url + "/health").status_code == 200:
                    return
            time.sleep(0.25)
    tail = _tail(log_path)
    last = tail.rstrip().rsplit("\n", 1)[-1]
    raise ServerError(
        f"The {spec.name} server was not ready after {timeout_s:.0f} s; its last line was {last!r}, the log is {log_path}.", tail
    )


def _death(spec: ServerSpec, code: int, log_path: Path, when: str) -> ServerError:
    how = f"was ended by signal {-code}" if code < 0 else f"stopped with exit code {code}"
    text = log_path.read_text(errors="replace")
    reason = reason_from_log(text).rstrip(".")
    return ServerError(f"The {spec.name} server {how} {when}: {reason}. The whole log is {log_path}.", _tail(log_path))


def _end_group(process: subprocess.Popen) -> None:
    """Ends the server and every process it spawned: first politely, then by force. All of them share the process group of the parent."""
    for sig, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and _group_exists(process):
            time.sleep(0.05)
        if not _group_exists(process):
            break
    process.wait()


def _group_exists(process: subprocess.Popen) -> bool:
    process.poll()  # reap the parent, or its zombie keeps the group alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    _LIBC.prctl(pr_set_pdeathsig, signal.SIGTERM)


_LIBC = ctypes.CDLL(None)  # loaded before any fork: nothing may allocate between fork and exec


def _log_file(spec: ServerSpec, log_path: Path | None) -> Path:
    if log_path is None:
        slug = re.sub(r"[^\w.]+", "-", spec.name).strip("-")
        handle, name = tempfile.mkstemp(prefix=f"sglang-{slug}-", suffix=".log")
        os.close(handle)
        return Path(name)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return log_path


def _tail(log_path: Path) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
