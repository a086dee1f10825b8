"""Pruning a third of a trained model's heads and channels: the loss, and the recovery by a short distillation.

    python bench/models/prune_distill.py --store STORE [--model quickstart/pretrain] [--folder DIR] [--every 8]
                                         [--steps 150] [--seconds 110]
    python bench/models/prune_distill.py --quick       # the two criteria of the claim, few files

Held-out files of the model's token set are scored (every `--every`-th). Each pruning criterion is measured without
training. Some are measured again after `--steps` steps of 8 rows of 256 tokens: distillation from the dense model (its
top 32 logits), or next-token training, the control. All see the same rows, with AdamW at one rate (warm-up, then linear
decay to 0). Embeddings and n-gram tables are frozen. Results are stored in DIR. The same command continues with the
missing ones, for `--seconds`.

Bar: without training, the optimal brain surgeon ("obs") loses at most half of the bits of the "activation" criterion.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse, sized
from bench.models._smoke_store import open_store

from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.models import LanguageModel, load_model
from whorl.models.compression.prune import prune, teacher_log_probs
from whorl.models.transformer_config import AttentionConfig
from whorl.objectives.distil import distil_top_k
from whorl.objectives.next_token import next_token
from whorl.recipes.steps.quantize import calibration_rows
from whorl.tokens.shards import TokenSet

ROWS, LENGTH, TOP, RATE = sized((8, 256, 32, 5e-4), (2, 32, 8, 5e-4))
# name -> (criterion, objective of the training)
KINDS: dict[str, tuple[str | None, str | None]] = {
    "dense": (None, None),
    "surgeon": ("obs", None),
    "activation": ("activation", None),
    "magnitude": ("magnitude", None),
    "random": ("random", None),
    "surgeon, distilled": ("obs", "distil"),
    "surgeon, next token": ("obs", "next token"),
    "activation, distilled": ("activation", "distil"),
    "random, distilled": ("random", "distil"),
}


def bits(model: LanguageModel, tokens: TokenSet, every: int) -> float:
    test = tokens.split("test")
    chosen = range(0, test.n_documents, every)
    nats = sum(document_nats(model.eval(), (test.document(n) for n in chosen), 512))
    return bits_per_byte(nats, sum(int(test.documents["bytes"][n].as_py()) for n in chosen))


def recover(student: LanguageModel, teacher: LanguageModel, by: str, tokens: TokenSet, steps: int) -> None:
    """Train the student for `steps` steps."""
    frozen = ("embedding", "memory.")
    learned = [p for name, p in student.named_parameters() if not name.startswith(frozen)]
    for name, p in student.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    optimiser = torch.optim.AdamW(learned, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rows = torch.cat(calibration_rows(tokens, steps * ROWS, LENGTH + 1, 1))
    student.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        batch = rows[step * ROWS : (step + 1) * ROWS]
        ids, targets = batch[:, :-1], batch[:, 1:]
        hidden, mask = student(ids).flatten(0, 1), torch.ones(ids.numel())
        if by == "distil":
            values, found = teacher_log_probs(teacher, ids, TOP)
            loss = distil_top_k(
                hidden, student.head_weight, values.clone().flatten(0, 1), found.clone().flatten(0, 1), mask
            )
        else:
            loss = next_token(hidden, student.head_weight, targets.flatten(), mask.bool())
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimiser.step()


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--store"),
            p.add_argument("--model", default="quickstart/pretrain"),
            p.add_argument("--folder", type=Path),
            p.add_argument("--every", type=int, default=8),
            p.add_argument("--steps", type=int, default=150),
            p.add_argument("--seconds", type=float, default=0.0),
            p.add_argument("--quick", action="store_true"),
        ),
        smoke={"every": 1, "steps": 2},
    )
    every, steps = (40, 10) if given.quick else (given.every, given.steps)
    torch.set_num_threads(1)
    store = open_store(given.store)
    artifact = store.open(given.model)
    tokens_of = store.find(artifact.parents["tokens"])
    assert tokens_of is not None, "the model's token set is not in this store"
    tokens = TokenSet(tokens_of.path)
    dense = load_model(artifact.path)
    mixer = dense.config.layer_mixers()[0]
    assert isinstance(mixer, AttentionConfig)
    target = {"heads": max(1, mixer.n_heads * 2 // 3), "mlp_hidden": dense.config.mlp_hidden * 2 // 3}
    rows = calibration_rows(tokens, *sized((64, 512), (8, 64)), 0)
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"prune-{every}-{steps}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    began = time.monotonic()
    kinds = list(KINDS)[:3] if given.quick else list(KINDS)
    for name in kinds:
        measure, by = KINDS[name]
        if name in results or (given.seconds and time.monotonic() - began > given.seconds):
            continue
        model = dense
        if measure is not None:
            g = torch.Generator().manual_seed(0)
            model = prune(dense, rows, **target, criterion=measure, generator=g)  # type: ignore[arg-type]
        if by is not None:
            recover(model, dense, by, tokens, steps)
        matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
        results[name] = {"bits": bits(model, tokens, every), "matrices": matrices}
        path.write_text(json.dumps(results))
        print(f"{name}: {results[name]['bits']:.4f}", flush=True)
    if len(results) < len(kinds):
        print(f"{len(results)} of {len(kinds)} are done; run the same command again to continue")
        return
    base = results["dense"]["bits"]
    print(
        f"{target}, {steps} steps\n| criterion | weights of the blocks | bits per byte | increase |\n|---|---|---|---|"
    )
    for name in kinds:
        r = results[name]
        print(f"| {name} | {r['matrices'] / 1e6:.2f} M | {r['bits']:.3f} | {r['bits'] - base:+.3f} |")
    ours, peer = results["surgeon"]["bits"] - base, results["activation"]["bits"] - base
    claim(
        "bits per byte lost with a third of heads and channels pruned, OBS",
        ours=ours, peer=peer, unit="bits per byte", ratio=ours / peer, bar=0.5, ok=ours <= 0.5 * peer,
        samples=[{name: round(r["bits"], 4) for name, r in results.items()}], quick=given.quick,
        peer_name="activations times weights",
    )  # fmt: skip


if __name__ == "__main__":
    main()
