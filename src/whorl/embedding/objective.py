"""The update of an embedder: InfoNCE over the pairs of a batch, whose spans are encoded in buckets of similar length."""

from __future__ import annotations

import torch
from torch import Tensor

from whorl.embedding.embedder import pad
from whorl.embedding.job import EmbedJob
from whorl.embedding.span_pairs import Spans
from whorl.models.encoder import Encoder
from whorl.objectives.contrastive import info_nce
from whorl.objectives.next_token import Loss
from whorl.train.learner.update import MicroBatch, ParamOptim, Update
from whorl.train.optim.decay_mask import decayed_parameters

BUCKET_SIZE = 32  # spans encoded together


def build_update(encoder: Encoder, job: EmbedJob) -> Update:
    """Return the learner's only update: InfoNCE, with Muon for the blocks' matrices (optional) and AdamW for the rest."""

    def objective(part: MicroBatch) -> Loss:
        x, y = encode_in_buckets(encoder, part["ids"], part["mask"]).chunk(2)
        return info_nce(x, y, 1 / job.temperature, part["documents"])

    treatments, decaying = {}, decayed_parameters(encoder)
    for name, p in encoder.named_parameters():
        matrix = name.startswith("blocks.") and p.ndim == 2 and min(p.shape) > 1
        rule = job.optimizer if matrix else "adamw"
        lr = job.lr_muon if rule == "muon" else job.lr_adamw
        treatments[name] = ParamOptim(rule, lr, float(name in decaying))
    return Update(
        objective,
        treatments,
        clip_norm=job.train.clip_norm,
        weight_decay=job.train.weight_decay,
        betas=(0.9, 0.98),
    )


def collate(spans: Spans, device: str = "cpu") -> dict[str, Tensor]:
    """Return ids and mask [2 N, T], the first spans above the second; documents [N]."""
    ids, mask = pad([*spans.first, *spans.second])
    made = {"ids": ids, "mask": mask, "documents": torch.from_numpy(spans.documents)}
    return {name: t.to(device) for name, t in made.items()}


def encode_in_buckets(encoder: Encoder, ids: Tensor, mask: Tensor) -> Tensor:
    """`encoder.embed` of rows [n, T] of different lengths, in buckets of similar length: [n, d] fp32.

    Spans fill little more than half of a padded batch. Only the encoder runs in buckets; the loss uses the whole batch.
    """
    lengths = mask.sum(dim=1)
    order = lengths.argsort(stable=True)
    buckets = torch.split(order, BUCKET_SIZE)
    max_lengths = [int(lengths[rows[-1]]) for rows in buckets]
    parts = [
        encoder.embed(ids[rows, :length], mask[rows, :length])
        for rows, length in zip(buckets, max_lengths, strict=True)
    ]
    return torch.cat(parts)[order.argsort()]
