"""One progress bar for every long stage; plain lines where there is no terminal."""

import sys
import time
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10  # without a terminal: at most one line in this time


@contextmanager
def progress_bar(name: str, total: int, done: int = 0):
    """Yields `advance(count, text)`. `done` items were finished by an earlier run."""
    if sys.stdout.isatty():
        columns = (
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Progress(*columns, console=Console()) as bar:
            task = bar.add_task(name, total=total, completed=done, text="")
            yield lambda count, text="": bar.update(task, advance=count, text=text)
        return
    start = last = time.monotonic()
    now_done = done

    def advance(count: int, text: str = "") -> None:
        nonlocal last, now_done
        now_done += count
        now = time.monotonic()
        if now - last >= LINE_SECONDS or now_done >= total:
            last = now
            left = (now - start) / max(now_done - done, 1) * (total - now_done)
            print(f"{name} {now_done}/{total}, {now - start:.0f} s, about {left:.0f} s left  {text}", flush=True)

    yield advance
