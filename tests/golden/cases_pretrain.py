"""Golden cases of pretraining and of the embedder: 20 steps of tiny models on one thread.

Curves of other machines stay within `TOLERANCE`. Measured: other instruction sets and another matrix library change a
curve by at most 2e-7; noise of 1e-6 on every weight by 6e-7; a learning rate 1% higher by at least 2e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from golden_case import Result, case, weight_hash
from golden_inputs import HEADS, SHAPES, make_tokens, scratch

from whorl.embedding.train import EmbedJob, train_embedder
from whorl.models import DecoderConfig, LanguageModel, TransformerConfig
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.tokens.shards import TokenSet
from whorl.train.job import Job
from whorl.train.lm import decay_branches as branches
from whorl.train.lm.pretrain import pretrain

STEPS = 20


class Losses:
    """A callback that stores the loss of each step, nats per token."""

    def __init__(self) -> None:
        self.curve: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.curve.append(metrics["nll"])

    def on_evaluation(self, step: int, metrics: dict[str, float], model: LanguageModel) -> None: ...
    def on_checkpoint(self, step: int, seconds: float) -> None: ...
    def on_event(self, step: int, event: dict[str, Any]) -> None: ...


def golden_job(shape: str, tokens: Path, **change: object) -> Job:
    """The job of a curve: float32, one replica, one thread, not compiled, no timing."""
    small = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "mlp_hidden": 64}
    changes = SHAPES[shape]
    model = (
        DecoderConfig.model_validate({**small, **HEADS, "ngram_buckets": 256})
        if changes is None
        else TransformerConfig.model_validate({**small, **changes})
    )
    base = {
        "tokens": str(tokens), "model": model, "seq_len": 32, "batch_size": 8, "steps": STEPS, "compile": False,
        "evaluations": 1, "serial_loader": True, "deterministic": True,
    }  # fmt: skip
    return Job.model_validate({**base, **change})


def losses(wanted: Job) -> list[float]:
    """Mean loss of each step, nats per token."""
    return train(wanted).curve


def train(wanted: Job, **options: Any) -> Result:
    """Weights and losses of a pretraining run."""
    seen = Losses()
    with scratch() as folder:
        model = pretrain(wanted, folder, seen, **options)  # type: ignore[arg-type]
        return Result(bits={"weights": weight_hash(model)}, curve=seen.curve)


def _shape(shape: str, **change: object) -> Callable[[], Result]:
    def run() -> Result:
        with scratch() as folder:
            return train(golden_job(shape, make_tokens(folder), **change))

    return run


for _name in SHAPES:
    case(f"pretrain/{_name}")(_shape(_name))
case("pretrain/two-replicas")(_shape("decoder", replicas=2))
case("pretrain/fp16", tolerance=5e-4)(_shape("decoder", dtype="float16"))


@case("pretrain/decay-branch")
def _branch() -> Result:
    """A branch at half of the steps, trained from the stable run's state."""
    with scratch() as folder:
        tokens = make_tokens(folder / "tokens")
        schedule = {"warmup_ratio": 0.1, "decay_ratio": 0.4}
        whole = golden_job("decoder", tokens, steps=2 * STEPS, schedule=schedule, ema=0.9)
        at = branches.branch_step(whole, 0.5)
        pretrain(whole, folder / "whole", Losses(), branch_points=[at], stop_after=at + 1)  # type: ignore[arg-type]
        start = branches.branch_folder(folder / "whole", at) / f"step-{at:08d}"
        return train(branches.branch_job(whole, 0.5), branch_start=start)


@case("embedder")
def _embedder() -> Result:
    curve: list[float] = []

    def observe(step: int, metrics: dict[str, float], encoder: Encoder) -> None:
        curve.append(metrics["loss"])

    with scratch() as folder:
        tokens = make_tokens(folder)
        shape = EncoderConfig(
            vocab_size=TokenSet(tokens).vocab_size, d_model=32, n_layers=1, n_heads=2, mlp_hidden=32, max_length=12
        )  # fmt: skip
        job = EmbedJob(
            tokens=str(tokens),
            encoder=shape,
            min_span=4,
            batch_size=24,
            steps=STEPS,
            lr_adamw=0.002,
            lr_muon=0.004,
        )
        encoder = train_embedder(job, observe)
    return Result(bits={"weights": weight_hash(encoder)}, curve=curve)
