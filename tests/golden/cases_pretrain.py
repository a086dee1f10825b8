"""Golden cases of pretraining and of the embedder: 20 steps of tiny models on one thread.

Curves of other machines stay within `TOLERANCE`. Measured: other instruction sets and another matrix library change a
curve by at most 2e-7; noise of 1e-6 on every weight by 6e-7; a learning rate 1% higher by at least 2e-4.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from golden_case import Result, case, weight_hash
from golden_inputs import SHAPES, scratch
from tests.support.train.model_shapes import shape as transformer
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.embedding.job import EmbedJob
from whorl.embedding.train import train_embedder
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.transformer_config import masked_decoder
from whorl.tokens.shards import TokenSet
from whorl.train.job import Job
from whorl.train.lm import decay_branches as branches
from whorl.train.lm.pretrain import pretrain

STEPS = 20


def golden_job(shape: str, tokens: Path, **change: object) -> Job:
    """The job of a curve: float32, one replica, one thread, not compiled, no timing."""
    changes = SHAPES[shape]
    model = {} if changes is None else {"model": transformer({}, **changes)}
    return job(tokens, **{**model, "steps": STEPS, "evaluations": 1, "deterministic": True, **change})


def losses(wanted: Job) -> list[float]:
    """Mean loss of each step, nats per token."""
    return train(wanted).curve


def train(wanted: Job, **options: Any) -> Result:
    """Weights and losses of a pretraining run."""
    notes = Notes()
    with scratch() as folder:
        model = pretrain(wanted, folder, notes, **options)  # type: ignore[arg-type]
        return Result(bits={"weights": weight_hash(model)}, curve=[m["nll"] for m in notes.steps])


def _shape(shape: str, **change: object) -> Result:
    with scratch() as folder:
        return train(golden_job(shape, make_tokens(folder), **change))


for _name in SHAPES:
    case(f"pretrain/{_name}")(partial(_shape, _name))
case("pretrain/two-replicas")(partial(_shape, "decoder", replicas=2))
case("pretrain/fp16", tolerance=5e-4)(partial(_shape, "decoder", dtype="float16"))


@case("pretrain/masked-blocks")
def _masked() -> Result:
    with scratch() as folder:
        tokens = make_tokens(folder)
        decoder = golden_job("decoder", tokens).model
        model = masked_decoder(decoder, decoder.vocab_size, 4, 32)
        return train(golden_job("decoder", tokens, model=model, objective="masked"))


@case("pretrain/decay-branch")
def _branch() -> Result:
    """A branch at half of the steps, trained from the stable run's state."""
    with scratch() as folder:
        tokens = make_tokens(folder / "tokens")
        schedule = {"warmup_ratio": 0.1, "decay_ratio": 0.4}
        whole = golden_job("decoder", tokens, steps=2 * STEPS, schedule=schedule, ema=0.9)
        at = branches.branch_step(whole, 0.5)
        pretrain(whole, folder / "whole", Notes(), branch_points=[at], stop_after=at + 1)  # type: ignore[arg-type]
        start = branches.branch_folder(folder / "whole", at) / f"step-{at:08d}"
        return train(branches.branch_job(whole, 0.5), branch_start=start)


@case("embedder")
def _embedder() -> Result:
    curve: list[float] = []

    def observe(step: int, metrics: dict[str, float], encoder: Encoder) -> None:
        curve.append(metrics["loss"])

    with scratch() as folder:
        tokens = make_tokens(folder)
        base = {"vocab_size": TokenSet(tokens).vocab_size, "d_model": 32, "n_layers": 1, "n_heads": 2}
        encoder = EncoderConfig.model_validate({**base, "mlp_hidden": 32, "max_length": 12})
        rates = {"lr_adamw": 0.002, "lr_muon": 0.004}
        wanted = EmbedJob(
            tokens=str(tokens), encoder=encoder, min_span=4, batch_size=24, steps=STEPS, **rates
        )
        trained = train_embedder(wanted, observe)
    return Result(bits={"weights": weight_hash(trained)}, curve=curve)
