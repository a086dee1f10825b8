"""The probe: two tiny runs on the user's text, before a loss is predicted.

The shipped law holds for Python source, and another text moves its whole curve. So runs that were made on Python
(`bench/plan/predictions.py --reference`) are made on a sample of the text, through the code that trains. Their losses
l1, l2 on the test files stand for Python's r1, r2 after as many steps:

    bits per byte = l2 (law / r2)^p,    p = 3/4 + 1/4 ln(l1 / l2) / ln(r1 / r2)

p is nearer to a factor (1) than to the line through both logarithms, which early steps and epochs bend (docs/plan.md).
`law` is that of Python for the planned run. The numbers of steps follow from the plan, so that no clock is read here.
Test files are scored because their loss is predicted; no weight of the run, and no choice of the plan, depends on that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from pydantic import BaseModel, ConfigDict

from whorl.corpus import Corpus, Document
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.models import TransformerConfig
from whorl.plan.accounting.model_cost import decoder_config, training_cost
from whorl.plan.laws.law import effective_bytes
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain
from whorl.train.profiling.step_timer import StepTiming
from whorl.train.task import StepFunction

VOCABULARY, ROWS, LENGTH = 1024, 8, 256
MODEL = decoder_config(96, 3, VOCABULARY).model_copy(update={"trained_length": LENGTH})
STEPS, FIRST = 1200, 1 / 3  # of the second run at most; of the first, relative to it
MIN_STEPS = 150  # of the second run: before, the loss falls with the warm-up and not with the text
SHARE, LONGEST = 0.2, 60.0  # of the planned FLOPs and seconds; seconds
SCORED_BYTES = 1e6  # of test files
# Of training files, at any number of steps: 726 steps on rows of 6 MB had 5 % more bits than on rows of 10 MB.
SAMPLE_BYTES = 4.0 * STEPS * ROWS * LENGTH


class Probe(BaseModel):
    """The measured losses. steps, bits_per_byte: of both runs; reference: of Python after as many steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: tuple[int, int]
    bits_per_byte: tuple[float, float]
    reference: tuple[float, float]
    seconds: float = 0.0

    @property
    def power(self) -> float:
        (l1, l2), (r1, r2) = self.bits_per_byte, self.reference
        return 0.75 + 0.25 * max(0.0, math.log(l1 / l2) / math.log(r1 / r2)) if r1 > r2 else 1.0

    def correct(self, law: float) -> float:
        """Return the expected bits per byte of the text, for those of Python."""
        return self.bits_per_byte[1] * float((law / self.reference[1]) ** self.power)


def probe_steps(job: Job, timing: StepTiming | None) -> int:
    """Return the steps of the second run that a plan pays for, 0 if too few. timing: None if no clock may decide."""
    planned = job.batch_size * job.seq_len * _token_flops(job.model, job.seq_len)
    own = ROWS * LENGTH * _token_flops(MODEL, LENGTH)
    steps = min(STEPS, SHARE * job.steps * planned / own / (1 + FIRST))
    if timing is not None:
        # A step of a small shape reaches fewer FLOP/s; with the square root it is not underestimated.
        seconds = timing.step_seconds * min(1.0, math.sqrt(own / planned)) * (1 + FIRST)
        steps = min(steps, min(LONGEST, SHARE * (job.seconds or math.inf)) / seconds)
    return int(steps) if steps >= MIN_STEPS else 0


def run_probe(job: Job, timing: StepTiming | None, corpus: Corpus, progress: Progress) -> Probe | None:
    """Train both runs on a sample of the text, on the planned job's device; None for a short job or without test files."""
    n1, n2 = round(FIRST * (steps := probe_steps(job, timing))), steps
    if not steps:
        return None
    with progress.task("Probing the text", total=None) as task, TemporaryDirectory() as scratch:
        per_token = write_texts(corpus, folder := Path(scratch))
        if not TokenSet(folder).split("test").n_documents:
            return None
        task.update(note=f"{n1:,} and {n2:,} steps of a tiny model")
        bits = train(job, n1, folder), train(job, n2, folder)
        seconds = task.seconds
    whole, read = corpus.bytes("train"), ROWS * LENGTH * per_token
    r1, r2 = (of_python("bits_per_byte", effective_bytes(n * read, whole) / read) for n in (n1, n2))
    return Probe(steps=(n1, n2), bits_per_byte=bits, reference=(r1, r2), seconds=seconds)


def write_texts(corpus: Corpus, folder: Path) -> float:
    """Write a tokenizer and token shards of training and test files; return bytes per token."""
    tokenizer = Tokenizer.train((d.text for d in _sample(corpus, "train", SAMPLE_BYTES / 4)), VOCABULARY)
    tokenizer.save(folder)
    found = write_shards(_sample(corpus, "train", SAMPLE_BYTES), tokenizer, folder, "train")
    write_shards(_sample(corpus, "test", SCORED_BYTES), tokenizer, folder, "test")
    return float(found["bytes_per_token"])


def train(job: Job, steps: int, folder: Path) -> float:
    """Train one run and return its bits per byte on the test files, in the windows of `evaluate`."""
    replicas = job.replicas if ROWS % (4 * job.replicas) == 0 else 1
    own = Job(
        tokens=str(folder), model=MODEL, seq_len=LENGTH, batch_size=ROWS, steps=steps, long_ratio=0.1, compile=False,
        evaluations=1, replicas=replicas, **job.model_dump(include={"seed", "threads", "device", "dtype", "deterministic"}),
    )  # fmt: skip
    model = pretrain(own, folder / str(steps), StepFunction(lambda *_: None), checkpoint_seconds=math.inf)
    split = TokenSet(folder).split("test")
    nats = document_nats(model.eval(), split.iter_documents(), model.eval_window)
    return bits_per_byte(sum(nats), split.n_bytes)


def _token_flops(model: TransformerConfig, length: int) -> float:
    return training_cost(model, batch_size=1, seq_len=length, replicas=1).token_flops


def _sample(corpus: Corpus, split: str, n_bytes: float) -> Iterator[Document]:
    """Yield documents of a split at equal distances, of about `n_bytes` in all."""
    part = min(1.0, n_bytes / max(1, corpus.bytes(split)))
    return (d for n, d in enumerate(corpus.documents(split)) if int((n + 1) * part) > int(n * part))


def of_python(figure: str, steps: float) -> float:
    """Return the probe's "bits_per_byte" on Python after `steps`; or "over_law", whole test files over the shipped law."""
    stored = json.loads(resources.files("whorl.plan.dial").joinpath("probe_reference.json").read_text())
    known = np.log([[float(n), bits] for n, bits in stored[figure].items()]).T
    return float(np.exp(np.interp(math.log(steps), *known)))
