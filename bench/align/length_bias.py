"""Length bias: GRPO divides a completion's loss by its length, Dr. GRPO does not.

    python bench/align/length_bias.py [--seeds 5] [--steps 60] [--picture docs/align_lengths.png] [--quick]

The claim is that of arXiv:2503.20783, section 3.1. With a factor 1 / |y|, an incorrect completion gets less penalty per
token the longer it is, and a correct one gets more reward per token the shorter it is. So incorrect completions become
longer, although length earns no reward. To measure this effect alone, a task needs incorrect completions that cannot be
avoided, that the model distinguishes from correct ones before they end, and whose length is free:

    Ce Af Fa Db Bc Ed:F      a map of letters, and the start of a walk through it
    0:afa+..                 a prediction (0: the walk ends in a to c, 1: in d to f), the walk, the result of the
                             prediction (+ correct, - incorrect), and any number of dots (+) or question marks (-)

The prediction comes before the walk. A small model cannot compute three steps at once, so half of its predictions are
incorrect in every step of training. It can compute the walk step by step, so the result is visible before the last
sign. The reward is 1 for a correct prediction and 0 otherwise. The SFT texts hold a random prediction, a true walk, and
signs that continue with probability 3/4 in both cases. So length depends on nothing before RL.

Both algorithms start from the same SFT model of each seed. Results are the mean length of correct and incorrect
completions over the first and last tenth of the steps, and the accuracy of the predictions (about a half, if the task
works). `ok` requires of every seed that incorrect completions grow by at least half with GRPO, and with Dr. GRPO by less
than a third of that growth. Without a force on length it drifts at random.
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
from bench._run import claim, parse, sized, smoke

LETTERS, HOPS, CONTINUE, MAX_COMPLETION = "abcdef", 3, 0.75, 64
TEXTS, QUICK_TEXTS, TASKS, GROUPS, GROUP_SIZE = sized((24_000, 500, 4_000, 16, 16), (40, 40, 20, 2, 4))
ALGORITHMS = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO"}
CORRECT, INCORRECT = "completion_length/correct", "completion_length/incorrect"
METRICS = (CORRECT, INCORRECT, "accuracy", "truncated_fraction", "logprob_diff_max")


def walk_of(map_text: str) -> str:
    """Return the letters of the walk through a prompt's map."""
    pairs, _, at = map_text.rpartition(":")
    to, found = {pair[0]: pair[1] for pair in pairs.split()}, ""
    for _ in range(HOPS):
        found += to[at]
        at = to[at].upper()
    return found


def side(walk: str) -> str:
    """Return 0 for a walk that ends in a to c, 1 for d to f."""
    return str(LETTERS.index(walk[-1]) * 2 // len(LETTERS))


def prediction_is_right(gold: str, text: str) -> bool:
    """Return whether a completion begins with the right side."""
    return text[:1] == gold


def one_seed(seed: int, steps: int, quick: bool) -> dict[str, Any]:
    """Train both algorithms from one SFT model and return their curves."""
    import torch

    from whorl.align.config import SFTConfig
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.rl.config import RLConfig
    from whorl.align.rl.rollout import RolloutWorker
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import make_policy_model
    from whorl.align.stage.sft import fine_tune
    from whorl.evals.grading import GRADERS, VerifiableTask
    from whorl.models import make_model, whorl_decoder
    from whorl.tokens.token_encoder import TokenEncoder
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator, numpy_rng

    torch.set_num_threads(1)
    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    encoder, rng = TokenEncoder(tokenizer), numpy_rng(seed, "walks")
    shape = whorl_decoder(
        vocab_size=264, d_model=64, n_layers=3, mlp_hidden=192, n_heads=2, n_kv_heads=2, head_dim=32,
        ngram_orders=(),
    )  # fmt: skip

    def prompt() -> str:
        order = rng.permutation(len(LETTERS))
        pairs = [LETTERS[i].upper() + LETTERS[rng.integers(len(LETTERS))] for i in order]
        return f"{' '.join(pairs)}:{LETTERS[rng.integers(len(LETTERS))].upper()}"

    def example() -> Any:
        map_text = prompt()
        prediction, walk = str(rng.integers(2)), walk_of(map_text)
        n = min(int(rng.geometric(1 - CONTINUE)) - 1, MAX_COMPLETION - 16)
        rest = "+" + "." * n if prediction == side(walk) else "-" + "?" * n
        return encoder.prompt_completion(f"{map_text}\n", f"{prediction}:{walk}{rest}")

    network = make_policy_model(
        make_model(shape, generator(seed, "weights")), encoder, SFTConfig(), context_hint=128
    )
    texts = [example() for _ in range(QUICK_TEXTS if quick else TEXTS)]
    fine_tune(
        network,
        texts,
        SFTConfig(
            lr_scale=0.7, data={"seq_len": 128, "batch_size": 8}, seed=seed, model={"dtype": "float32"}
        ),
        pad_id=tokenizer.pad_id,
    )
    GRADERS.entries["prediction"] = f"{__name__}:prediction_is_right"
    maps = [prompt() for _ in range(TASKS)]
    tasks = [
        VerifiableTask(id=str(n), prompt=f"{text}\n", answer=side(walk_of(text)), verifier="prediction")
        for n, text in enumerate(maps)
    ]
    sft_weights = {name: p.detach().clone() for name, p in network.model.named_parameters()}
    result: dict[str, Any] = {"seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        for algorithm in ALGORITHMS:
            with torch.no_grad():
                for name, p in network.model.named_parameters():
                    p.copy_(sft_weights[name])
            config = RLConfig(
                algorithm=algorithm, steps=steps, prompts_per_step=GROUPS, group_size=GROUP_SIZE,  # type: ignore[arg-type]
                max_completion_tokens=MAX_COMPLETION, max_seq_len=96, lr_scale=0.1, optimizer="adamw", seed=seed,
                model={"dtype": "float32"},
            )  # fmt: skip
            worker = RolloutWorker(
                shape,
                "float32",
                Path(folder),
                tasks,
                GROUP_SIZE,
                MAX_COMPLETION,
                96,
                1.0,
                Curriculum([0.0] * len(tasks), rule="uniform"),
            )
            curve: dict[str, list[float]] = {name: [] for name in METRICS}

            def observe(
                step: int, metrics: dict[str, float], _: Any, to: dict[str, list[float]] = curve
            ) -> None:
                for name, values in to.items():
                    values.append(round(metrics[name], 6))

            train_policy(network, worker, config, callback=observe)
            result[algorithm] = curve
    return result


def ends(values: list[float]) -> tuple[float, float]:
    """Return the means of the first and the last tenth."""
    n = max(1, len(values) // 10)
    return statistics.mean(values[:n]), statistics.mean(values[-n:])


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw length against steps, one panel per algorithm: thin lines for seeds, a thick line for their mean."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, title) in zip(panels, ALGORITHMS.items(), strict=True):
        for metric, colour in ((INCORRECT, "#d1431f"), (CORRECT, "#1f4e99")):
            curves = [one[name][metric] for one in found]
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.25, linewidth=0.8)
            mean = [statistics.mean(at) for at in zip(*curves, strict=True)]
            axes.plot(
                range(1, len(mean) + 1),
                mean,
                color=colour,
                linewidth=2,
                label=metric.split("/")[1] + " completions",
            )
        axes.set(xlabel="step", title=title)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="tokens per completion", ylim=(0, None))
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--steps", type=int, default=60)
        parser.add_argument("--picture", type=Path)
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--one", type=int, help="run a single seed and print its curves as JSON")

    given = parse(__doc__, arguments, smoke={"quick": True})
    steps = sized(4, 1) if given.quick else given.steps
    if given.one is not None:
        print(json.dumps(one_seed(given.one, steps, given.quick)))
        return

    def run(seed: int) -> dict[str, Any]:
        if smoke():
            return one_seed(seed, steps, given.quick)
        command = [sys.executable, __file__, "--one", str(seed), "--steps", str(steps)]
        command += ["--quick"] if given.quick else []
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(f"seed {seed}: done", flush=True)
        return one

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(1 if given.quick else given.seeds)))
    print(
        "| seed | algorithm | accuracy | incorrect completions, tokens | correct completions, tokens |\n"
        + "|---" * 5
        + "|"
    )
    grown: dict[str, list[tuple[float, float]]] = {name: [] for name in ALGORITHMS}
    for one in found:
        for name in ALGORITHMS:
            wrong, right = ends(one[name][INCORRECT]), ends(one[name][CORRECT])
            grown[name].append(wrong)
            print(
                f"| {one['seed']} | {ALGORITHMS[name]} | {statistics.mean(one[name]['accuracy']):.1%} "
                f"| {wrong[0]:.1f} to {wrong[1]:.1f} | {right[0]:.1f} to {right[1]:.1f} |"
            )
    if given.picture is not None:
        draw(found, given.picture)
    shown = all(
        a[1] > 1.5 * a[0] and b[1] - b[0] < (a[1] - a[0]) / 3
        for a, b in zip(grown["grpo"], grown["dr_grpo"], strict=True)
    )
    last = {name: statistics.mean(b / max(a, 1e-9) for a, b in pairs) for name, pairs in grown.items()}
    claim(
        "growth of the length of incorrect completions: Dr. GRPO against GRPO",
        ours=last["dr_grpo"], peer=last["grpo"], peer_name="GRPO", unit="times as long",
        ratio=last["grpo"] / max(last["dr_grpo"], 1e-9), bar=1.5,
        ok=shown or given.quick, samples=found, quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
