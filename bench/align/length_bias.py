"""Whose wrong answers grow: GRPO divides an answer's loss by its length, Dr. GRPO does not.

.venv/bin/python bench/align/length_bias.py [--seeds 5] [--steps 60] [--picture docs/align_lengths.png] [--quick]

The claim is that of arXiv:2503.20783 (section 3.1): with 1 / |y| before an answer's terms a wrong answer is punished the
less a token the longer it is, and a right one praised the more the shorter it is, so wrong answers drift towards length
though it earns nothing. To see it alone, a task needs wrong answers that cannot be avoided, that the model can tell from
right ones before it ends, and whose length is free:

    Ce Af Fa Db Bc Ed:F      a map of letters, and where a walk through it begins
    0:afa+..                 a guess: does it end in a to c (0) or in d to f (1)? Then the walk, whether the guess was right
                             (+) or not (-), and any number of dots after the one, of question marks after the other

The guess comes before the walk. In the head a small model does not learn to take three steps, so it is right half of the
time, for ever; step by step it can, so it knows before the last sign. The reward is 1 for a right guess and looks at
nothing else. The texts to begin with have a random guess, a true walk, and signs that go on with chance 3/4 whatever came
of the guess: length depends on nothing until a policy makes it so.

Both algorithms go on from the same SFT model of each seed. Told is the mean length of right and of wrong answers over the
first and the last tenth of the steps, and how often a guess was right (about a half, if the task does what it is for). `ok`
asks of every seed that GRPO's wrong answers grow by half at least, and Dr. GRPO's by less than a third of what GRPO's do:
nothing pushes their length, and nothing holds it, so it wanders.
Two seeds run at a time, with one thread each. A picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim

LETTERS, HOPS, GO_ON, MOST = "abcdef", 3, 0.75, 64
ALGORITHMS = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO"}


def walked(given: str) -> str:
    """The letters that the walk of a prompt comes by."""
    pairs, _, at = given.rpartition(":")
    to, found = {pair[0]: pair[1] for pair in pairs.split()}, ""
    for _ in range(HOPS):
        found += to[at]
        at = to[at].upper()
    return found


def side(walk: str) -> str:
    """Of the letter where it ends: 0 for a to c, 1 for d to f."""
    return str(LETTERS.index(walk[-1]) * 2 // len(LETTERS))


def one_seed(seed: int, steps: int, quick: bool) -> dict[str, Any]:
    """Both algorithms from one SFT model."""
    import torch

    from whorl.align.config import RLConfig, SFTConfig
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.model.example import ExampleTokenizer
    from whorl.align.rl.rollout import RolloutWorker
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import make_policy_model
    from whorl.align.stage.sft import fine_tune
    from whorl.evals.verify.registry import VERIFIERS
    from whorl.evals.verify.task import Verdict, VerifiableTask
    from whorl.models import DecoderConfig, make_model
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator, numpy_rng

    torch.set_num_threads(1)
    words = Tokenizer([bytes([i]) for i in range(256)])
    scribe, rng = ExampleTokenizer(words), numpy_rng(seed, "walks")
    shape = DecoderConfig(
        vocab_size=264, d_model=64, n_layers=3, mlp_hidden=192, n_heads=2, n_kv_heads=2, head_dim=32,
        ngram_orders=(),
    )  # fmt: skip

    def prompt() -> str:
        order = rng.permutation(len(LETTERS))
        pairs = [LETTERS[i].upper() + LETTERS[rng.integers(len(LETTERS))] for i in order]
        return f"{' '.join(pairs)}:{LETTERS[rng.integers(len(LETTERS))].upper()}"

    def text() -> Any:
        given = prompt()
        guess, walk = str(rng.integers(2)), walked(given)
        n = min(int(rng.geometric(1 - GO_ON)) - 1, MOST - 16)
        rest = "+" + "." * n if guess == side(walk) else "-" + "?" * n
        return scribe.prompt_completion(f"{given}\n", f"{guess}:{walk}{rest}")

    network = make_policy_model(
        make_model(shape, generator(seed, "weights")), scribe, SFTConfig(), context_hint=128
    )
    texts = [text() for _ in range(500 if quick else 24_000)]
    fine_tune(
        network,
        texts,
        SFTConfig(lr_scale=0.7, seq_len=128, batch_size=8, seed=seed, dtype="float32"),
        pad_id=words.pad_id,
    )
    VERIFIERS["guess"] = lambda task, said: Verdict(
        float(said[:1] == task.answer), said[:1] == task.answer, ""
    )
    given = [prompt() for _ in range(4_000)]
    tasks = [
        VerifiableTask(id=str(n), prompt=f"{b}\n", answer=side(walked(b)), verifier="guess")
        for n, b in enumerate(given)
    ]
    kept = {name: p.detach().clone() for name, p in network.model.named_parameters()}
    told: dict[str, Any] = {"seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        words.save(Path(folder))
        for algorithm in ALGORITHMS:
            with torch.no_grad():
                for name, p in network.model.named_parameters():
                    p.copy_(kept[name])
            config = RLConfig(
                algorithm=algorithm, steps=steps, prompts_per_step=16, group_size=16, max_completion_tokens=MOST, max_seq_len=96,  # type: ignore[arg-type]
                lr_scale=0.1, optimizer="adamw", seed=seed, dtype="float32",
            )  # fmt: skip
            worker = RolloutWorker(
                shape,
                "float32",
                Path(folder),
                tasks,
                16,
                MOST,
                96,
                1.0,
                Curriculum([0.0] * len(tasks), rule="uniform"),
            )
            curve: dict[str, list[float]] = {
                n: [] for n in ("length_right", "length_wrong", "passed", "cut_off", "parity")
            }

            def observe(
                step: int, metrics: dict[str, float], _: Any, to: dict[str, list[float]] = curve
            ) -> None:
                for name, values in to.items():
                    values.append(round(metrics[name], 6))

            train_policy(network, worker, config, callback=observe)
            told[algorithm] = curve
    return told


def ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last tenth."""
    n = max(1, len(values) // 10)
    return statistics.mean(values[:n]), statistics.mean(values[-n:])


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Length against steps, one panel an algorithm: every seed thin, their mean thick."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, title) in zip(panels, ALGORITHMS.items(), strict=True):
        for figures, colour in (("length_wrong", "#d1431f"), ("length_right", "#1f4e99")):
            curves = [one[name][figures] for one in found]
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.25, linewidth=0.8)
            mean = [statistics.mean(at) for at in zip(*curves, strict=True)]
            axes.plot(
                range(1, len(mean) + 1), mean, color=colour, linewidth=2, label=figures[7:] + " answers"
            )
        axes.set(xlabel="step", title=title)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="ids an answer", ylim=(0, None))
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", type=int, help="a single seed, told as JSON")
    given = parser.parse_args()
    steps = 4 if given.quick else given.steps
    if given.one is not None:
        print(json.dumps(one_seed(given.one, steps, given.quick)))
        return

    def run(seed: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--one", str(seed), "--steps", str(steps)]
        done = subprocess.run(
            [*command, *(["--quick"] if given.quick else [])], stdout=subprocess.PIPE, check=True
        )
        one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(f"seed {seed}: done", flush=True)
        return one

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(1 if given.quick else given.seeds)))
    print(
        "| seed | algorithm | guesses right | wrong answers, ids | right answers, ids |\n" + "|---" * 5 + "|"
    )
    grown: dict[str, list[tuple[float, float]]] = {name: [] for name in ALGORITHMS}
    for one in found:
        for name in ALGORITHMS:
            wrong, right = ends(one[name]["length_wrong"]), ends(one[name]["length_right"])
            grown[name].append(wrong)
            print(
                f"| {one['seed']} | {ALGORITHMS[name]} | {statistics.mean(one[name]['passed']):.1%} "
                f"| {wrong[0]:.1f} to {wrong[1]:.1f} | {right[0]:.1f} to {right[1]:.1f} |"
            )
    if given.picture is not None:
        draw(found, given.picture)
    shown = all(
        a[1] > 1.5 * a[0] and b[1] - b[0] < (a[1] - a[0]) / 3
        for a, b in zip(grown["grpo"], grown["dr_grpo"], strict=True)
    )
    last = {name: statistics.mean(b / a for a, b in pairs) for name, pairs in grown.items()}
    claim(
        "how many times longer wrong answers become: Dr. GRPO against GRPO",
        ours=last["dr_grpo"], peer=last["grpo"], unit="x", ratio=last["grpo"] / last["dr_grpo"], bar=1.5,
        ok=shown or given.quick, samples=found, quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
