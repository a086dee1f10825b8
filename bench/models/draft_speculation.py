"""A draft model and multi-token heads made by their recipe steps, against plain decoding of one sequence.

    python bench/models/draft_speculation.py [--d-model 384] [--layers 8] [--rounds 5] [--store FOLDER]

A byte model learns written solutions of sums (steps `init_model`, `tasks`, `sft`). The step `draft` distils a model of a
quarter of its layers, and `multi_token` trains four heads on it. Held-out prompts are then completed greedily and by
sampling, with and without drafts in alternation. A second run with the same store trains nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.align.stage.io import read_tasks
from whorl.engine import SamplingParams
from whorl.engine.speculation.load import Speculation
from whorl.engine.speculation.measure import SpeculationStats, measure_folder
from whorl.machine.device_probe import probe
from whorl.models import read_config
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tracking.progress import Progress

RECIPE = """
name = "drafts"
steps.init_model = {{ d_model = {d_model}, n_layers = {layers}, n_heads = {heads}, mlp_hidden = {hidden} }}
steps.sums = {{ uses = "tasks", source = "arithmetic", max_train = {examples}, max_test = 16 }}
[steps.target]
uses = "sft"
parents = ["init_model", "sums"]
data.seq_len = 256
lr_scale = 1.0
data.batch_tokens = 4096
data.epochs = {epochs}
[steps.draft]
parents = ["target", "sums"]
data.seq_len = 256
lr_scale = 0.5
data.batch_tokens = 4096
texts.max_examples = {examples}
data.epochs = {epochs}
[steps.multi_token]
parents = ["target", "sums"]
data.seq_len = 256
data.batch_tokens = 4096
n_predict = 4
data.epochs = {epochs}
"""


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--d-model", type=int, default=384),
            p.add_argument("--layers", type=int, default=8),
            p.add_argument("--examples", type=int, default=8000),
            p.add_argument("--tokens", type=int, default=96),
            p.add_argument("--rounds", type=int, default=5),
            p.add_argument("--store", default=None),
        ),
        smoke={"d_model": 64, "examples": 60, "tokens": 16},
        quick={"d_model": 128, "layers": 4, "examples": 500, "tokens": 48, "rounds": 1},
    )
    text = RECIPE.format(
        d_model=given.d_model, layers=given.layers, heads=max(2, given.d_model // 64), hidden=3 * given.d_model,
        examples=given.examples, epochs=1 if given.quick else 2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        recipe = parse_recipe(text, "drafts.toml")
        made = run_recipe(recipe, Store(given.store or folder), Progress()).artifacts
        target, draft, heads = (made[name].path for name in ("target", "draft", "multi_token"))
        tokenizer = TokenEncoder.load(target)
        tests = read_tasks(made["sums"].path, "test")[: sized(16, 2)]
        prompts = [tokenizer.prompt(task.prompt or task.messages) for task in tests]
        machine, samples = probe(), []
        options = {
            "machine": machine, "banned_ids": tokenizer.banned_ids(read_config(target).vocab_size),
            "stop_ids": tokenizer.stop_ids, "max_tokens": given.tokens,
        }  # fmt: skip
        kinds = {
            "draft model": (target, Speculation(draft=draft)),
            "heads": (heads, Speculation(multi_token=True)),
        }
        ratios: dict[str, float] = {}
        for kind, (place, speculation) in kinds.items():
            for name, params in (
                ("greedy", SamplingParams(temperature=0)),
                ("temperature 0.8", SamplingParams(temperature=0.8, seed=1)),
            ):
                found = [
                    measure_folder(place, speculation, prompts, params=params, **options) for _ in range(given.rounds)
                ]  # fmt: skip
                speedups = [each.speedup for each in found]
                ratios[f"{kind}, {name}"] = median(speedups)
                samples.append({"name": f"{kind}, {name}", "speedups": speedups, **found[0].to_json()})
                print(_line(f"{kind}, {name}", found[0], median(speedups)), flush=True)
        assert all(sample["equal"] == 1.0 for sample in samples), "drafts changed a token"
    best = max(ratios.values())
    claim(
        "speculation by trained drafts, one row: tokens/s",
        ours=best, peer=1.0, unit="x", ratio=best, bar=1.2, ok=best >= 1.2, samples=samples, quick=given.quick,
        peer_name="without speculation",
    )  # fmt: skip


def _line(name: str, found: SpeculationStats, speedup: float) -> str:
    return (
        f"{name}: {found.plain_tokens_per_second:,.0f} tokens/s without, {found.tokens_per_second:,.0f} with; "
        f"{found.acceptance_rate:.0%} of drafts accepted; {found.tokens_per_step:.2f} tokens per step; "
        f"{found.draft_seconds_fraction:.0%} of the time drafts; {speedup:.2f} x"
    )


if __name__ == "__main__":
    main()
