"""Several training runs in one process (or in each process of a launcher), so that a test pays for its imports once.

Reads a JSON file: a list of {"recipe": path, "sets": [...], "stop": step or null, "fp16": bool}. `stop` ends a run as a kill right after
the checkpoint of that step would. `fp16` lets DeepSpeed believe that this CPU is one it runs fp16 on.
"""

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
from deepspeed.accelerator import get_accelerator

from train.checkpoint import RunFolder
from train.recipe import load_recipe
from train.trainer import train


class Stopped(Exception):
    pass


def run(one: dict) -> None:
    save = RunFolder.save

    def save_and_stop(self, engine, step, keep):
        save(self, engine, step, keep)
        if step == one.get("stop"):
            raise Stopped

    supported = get_accelerator().is_fp16_supported
    RunFolder.save = save_and_stop
    if one.get("fp16"):
        get_accelerator().is_fp16_supported = lambda: True
    try:
        train(load_recipe(one["recipe"], one["sets"]))
    except Stopped:
        pass
    finally:
        RunFolder.save, get_accelerator().is_fp16_supported = save, supported


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel(logging.ERROR)
    path = next(argument for argument in sys.argv[1:] if argument.endswith(".json"))  # the launcher adds --local_rank
    for one in json.loads(Path(path).read_text()):
        run(one)
