"""Golden cases of generative models: some steps on 8 Gaussians."""

from __future__ import annotations

from functools import partial

from golden_case import Result, case, weight_hash

from whorl.generative.data import open_data
from whorl.generative.methods.registration import parse_config
from whorl.generative.task import GenerativeTask
from whorl.train.rows import train_rows

SIZES = {"steps": 20, "width": 16, "depth": 1, "batch_size": 16}


def _generative(method: str) -> Result:
    curve: list[float] = []
    task = GenerativeTask(open_data("8-gaussians"), parse_config(method, SIZES))
    train_rows(task, callback=lambda step, metrics: curve.append(metrics["loss"]))
    return Result(bits={"weights": weight_hash(task.networks)}, curve=curve)


for _name in ("flow", "vae", "gan"):
    case(f"generative/{_name}")(partial(_generative, _name))
