"""Every task of the trainer as one call of a few steps, for the tests that all tasks share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.align import distillation, text_envs
from tests.support.align.byte_model import decoder, network, sums, tokenizer
from tests.support.align.rl_policies import SMALL, tasks
from tests.support.align.stage_inputs import PAD, SFT, letter_pairs, preference_config, reward_config
from tests.support.configs import updated
from tests.support.images import write_half_dark
from tests.support.train import tiny
from tests.support.vision_tasks import caption_task, classifier_task, contrastive_task
from whorl.agents.methods.registration import make_config
from whorl.agents.task import train as train_agent
from whorl.align.data.curriculum import Curriculum
from whorl.align.distillation.teacher import LiveTeacher
from whorl.align.distillation.train import train_student
from whorl.align.preference.dpo import train_preferences
from whorl.align.preference.reward_model import RewardModel, train_reward_model
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import train_policy
from whorl.align.stage.sft import fine_tune
from whorl.embedding.job import EmbedJob
from whorl.embedding.train import train_embedder
from whorl.machine.process import Channel
from whorl.models.encoder import EncoderConfig
from whorl.train.lm.pretrain import pretrain
from whorl.train.rows import train_rows
from whorl.vision.image_set import ImageSet
from whorl.vision.train import VisionTask

OFTEN = 1e-9  # seconds between checkpoints
STEPS = 16  # of every task; the weights are copied for rollbacks after every second one


@dataclass
class Run:
    """Inputs of a task. at: called with the number of each finished step, and may raise."""

    folder: Path
    scratch: Path | None = None
    at: Callable[[int], None] = lambda step: None
    log: Callable[[str], None] = lambda text: None
    heartbeat_dir: Path | None = None
    replicas: int | None = 1

    def observe(self, step: int, *_: Any) -> None:
        self.at(step)

    @property
    def stage(self) -> dict[str, Any]:
        """Arguments of the functions of `align`."""
        return {
            "callback": self.observe, "checkpoint_dir": self.scratch, "log": self.log,
            "heartbeat_dir": self.heartbeat_dir,
        }  # fmt: skip

    @property
    def often(self) -> dict[str, Any]:
        """Arguments of the functions outside of `align`."""
        return {
            "scratch": self.scratch, "checkpoint_seconds": OFTEN, "log": self.log, "heartbeat_dir": self.heartbeat_dir,
        }  # fmt: skip


def write_inputs(folder: Path) -> Path:
    """Write the token set, the tokenizers and the sets of images that the tasks read."""
    tiny.make_tokens(folder / "tokens")
    write_half_dark(folder / "labelled")
    write_half_dark(folder / "captioned", captions=True)
    (folder / "policy").mkdir()
    tokenizer(folder / "policy")
    return folder


def _pretrain(run: Run) -> torch.nn.Module:
    notes = tiny.Notes()
    notes.on_step = run.observe  # type: ignore[method-assign]
    job = tiny.job(run.folder / "tokens", steps=STEPS, replicas=run.replicas, batch_size=12)
    return pretrain(
        job, run.scratch or run.folder / f"pretrain-{time.monotonic_ns()}", notes,
        checkpoint_seconds=OFTEN, log=run.log, heartbeat_dir=run.heartbeat_dir,
    )  # fmt: skip


def _sft(run: Run) -> torch.nn.Module:
    config = updated(SFT, data={"epochs": STEPS / 4, "packing": False}, run={"replicas": run.replicas})
    return fine_tune(network(), sums(16), config, pad_id=PAD, **run.stage)


def _preference(run: Run) -> torch.nn.Module:
    config = preference_config(epochs=STEPS / 3, run={"replicas": run.replicas, "checkpoint_seconds": OFTEN})
    return train_preferences(network(), letter_pairs(), config, pad_id=PAD, **run.stage)


def _reward_model(run: Run) -> torch.nn.Module:
    config = reward_config(
        batch_size=4, epochs=STEPS / 3, run={"replicas": run.replicas, "checkpoint_seconds": OFTEN}
    )
    return train_reward_model(RewardModel(decoder()), letter_pairs(), config, pad_id=PAD, **run.stage)


def _rl(run: Run, worker_class: type[RolloutWorker] = RolloutWorker, **changes: Any) -> torch.nn.Module:
    config = updated(SMALL, **{"steps": STEPS, "run": {"replicas": run.replicas}, **changes})
    net, given = network(), tasks()
    worker = worker_class(
        net.model.config, "float32", run.folder / "policy", given, config.group_size, config.max_completion_tokens,
        config.max_seq_len, config.temperature, Curriculum([0.0] * len(given)), environment=config.environment,
    )  # fmt: skip
    return train_policy(net, worker, config, **run.stage)


def _rl_environment(run: Run) -> torch.nn.Module:
    """Several turns: short replies, and messages of the environment."""
    environment = text_envs.config_of("Echo")
    return _rl(run, text_envs.ShortReplies, environment=environment, max_seq_len=64, max_completion_tokens=8)


def _distil(run: Run) -> torch.nn.Module:
    config = distillation.config_of(
        batch_size=8,
        epochs=STEPS / 3,
        on_policy_fraction=0.5,
        sync_every=1,
        run={"checkpoint_seconds": OFTEN},
    )
    teacher = LiveTeacher(distillation.model_of(2))
    return train_student(
        distillation.network_of(), teacher, distillation.some_texts(), config,
        encoder=distillation.SCRIBE, pad_id=distillation.PAD, **run.stage,
    )  # fmt: skip


def _embedder(run: Run) -> torch.nn.Module:
    shape = {"d_model": 32, "n_layers": 1, "n_heads": 2, "mlp_hidden": 32, "max_length": 12}
    encoder = EncoderConfig.model_validate({**shape, "vocab_size": 300})
    job = EmbedJob(tokens=str(run.folder / "tokens"), encoder=encoder, min_span=4, batch_size=24, steps=STEPS)
    return train_embedder(job, run.observe, **run.often)


def _agent(run: Run) -> torch.nn.Module:
    config = make_config("a2c", "CartPole-v1", steps=STEPS * 64, n_steps=8, n_envs=8)
    done = [0]

    def observe(*_: Any) -> None:
        done[0] += 1
        run.at(done[0])

    return train_agent(config, observe, **run.often)


def _image_classifier(run: Run) -> torch.nn.Module:
    settings = {"steps": STEPS, "run": {"replicas": run.replicas}, "max_shift": 1, "flip": True, "lr": 3e-4}
    return _images(run, classifier_task(ImageSet(run.folder / "labelled"), **settings)[0])


def _clip(run: Run) -> torch.nn.Module:
    return _images(run, contrastive_task(ImageSet(run.folder / "captioned"), steps=STEPS)[0])


def _captioner(run: Run) -> torch.nn.Module:
    images = ImageSet(run.folder / "captioned")
    return _images(run, caption_task(images, steps=STEPS, run={"replicas": run.replicas})[0])


def _images(run: Run, task: VisionTask) -> torch.nn.Module:
    train_rows(task, **run.stage)
    return task.networks


TASKS: dict[str, Callable[[Run], torch.nn.Module]] = {
    "pretrain": _pretrain, "sft": _sft, "preference": _preference, "reward_model": _reward_model, "rl": _rl,
    "rl_environment": _rl_environment, "distil": _distil, "embedder": _embedder, "agent": _agent,
    "image_classifier": _image_classifier, "clip": _clip, "captioner": _captioner,
}  # fmt: skip


def train_and_die(channel: Channel, name: str, folder: Path, scratch: Path, step: int) -> None:
    """Entry of a child process: train a task, and SIGKILL this process at `step`, when a checkpoint is complete."""

    def at(done: int) -> None:
        while done >= step:
            if any(scratch.glob("step-*")):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)

    TASKS[name](Run(folder, scratch, at))
