"""Judge models with a known bias: the measured bias against the planted one, and win rates of models that are no better.

    python bench/evals/judge.py --save
    python bench/evals/judge.py --quick     # a fourth of the table

A simulated judge prefers the first answer with probability q, or the longer one; otherwise it prefers the answer of the
higher quality, which it reads from the text. Position and length bias are then q / 2. Models answer like the baseline, but
longer or shorter; one is better, and shorter. Everything passes through the kind `judge`.

    bias        largest difference between measured and planted bias, over all pairs of judge and model; bar: 2 points
                (the peer takes the wins of the first answer in one order for its bias)
    win rate    largest distance from 50 % of any model, for a judge that always prefers the first, or the longer;
                bar: 2 points (the peer is one order without length control)
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _run import claim, parse

from whorl.evals.kinds.kind import MODEL
from whorl.evals.model.requests import Completion, GenerateRequest, Request, Response
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

BAR = 0.02
ANSWER = re.compile(r"\[Answer [AB] begins\]\n(.*?)\n\[Answer [AB] ends\]", re.DOTALL)
QUALITY = re.compile(r"Quality (-?\d+\.\d+)")
FILLER = "The matter has several sides and each of them counts. "
MODELS = {  # characters relative to the baseline (low, high), quality above it
    "equal length": ((0.6, 1.5), 0.0),
    "longer": ((1.2, 3.0), 0.0),
    "mostly longer": ((0.9, 2.0), 0.0),
    "shorter": ((0.3, 0.9), 0.0),
    "better, shorter": ((0.3, 0.9), 0.5),
}
JUDGES = {  # probability of a preference for the first, and for the longer answer
    "unbiased": (0.0, 0.0), "often first": (0.3, 0.0), "mostly first": (0.7, 0.0), "always first": (1.0, 0.0),
    "often longer": (0.0, 0.3), "mostly longer": (0.0, 0.7), "always longer": (0.0, 1.0),
}  # fmt: skip


QUICK_JUDGES = ("mostly first", "always first", "always longer")
QUICK_MODELS = ("mostly longer", "better, shorter")


class Simulated:
    """A back end over a function of the last message's text."""

    max_length = None

    def __init__(self, name: str, answer: Callable[[str], str]) -> None:
        self.name = self.address = name
        self.answer = answer

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`."""
        for number, request in enumerate(requests):
            assert isinstance(request, GenerateRequest)
            prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[-1]["content"]
            on_response(number, Completion(self.answer(prompt)))


def text_of(quality: float, characters: int) -> str:
    """Return an answer of a quality and a length."""
    head = f"Quality {quality:.4f}. "
    return (head + FILLER * (1 + characters // len(FILLER)))[: max(characters, len(head))].rstrip()


def simulated_judge(first: float, longer: float, seed: int) -> Simulated:
    """Return a judge with two planted biases."""
    rng = random.Random(seed)

    def verdict(prompt: str) -> str:
        shown = ANSWER.findall(prompt)
        quality = [float(QUALITY.search(text)[1]) for text in shown]  # type: ignore[index]
        u = rng.random()
        if u < first:
            return "[[A]]"
        if u < first + longer and len(shown[0]) != len(shown[1]):
            return "[[A]]" if len(shown[0]) > len(shown[1]) else "[[B]]"
        if quality[0] == quality[1]:
            return "Both are good. [[tie]]"
        return f"I compared both.\n[[{'A' if quality[0] > quality[1] else 'B'}]]"

    return Simulated("judge", verdict)


def run(model: str, judge: str, n: int, seed: int) -> TaskResult:
    """Return the result of a model under a judge."""
    (low, high), better = MODELS[model]
    rng = random.Random(f"{model} {seed}")
    records, answers = [], {}
    for number in range(n):
        size = rng.randint(150, 400)
        records.append(
            {"id": str(number), "q": f"Question {number}", "other": text_of(rng.gauss(0, 1), size)}
        )
        answers[f"Question {number}"] = text_of(rng.gauss(better, 1), int(size * rng.uniform(low, high)))
    config: dict[str, Any] = {
        "name": "pairs", "kind": "judge", "template": "{{ q }}", "options": {"baseline": "other", "length_probes": n},
    }  # fmt: skip
    task = make_task(parse_task(config, "bench"), records)
    roles = {"judge": simulated_judge(*JUDGES[judge], seed)}
    return evaluate(Simulated(MODEL, answers.__getitem__), [task], roles=roles)[0]


def one_order(result: TaskResult) -> float:
    """Return the win rate of an evaluator that shows the model's answer first, and stops there."""
    # v_1 of an item is its mean of both orders plus half of their difference.
    return sum(i.scores["win_rate"] + i.scores["position_bias"] for i in result.items) / len(result.items)


def main() -> int:
    """Print a table and the JSON lines."""
    quick = {"quick": True}
    args = parse(
        __doc__, lambda p: p.add_argument("--items", type=int, default=4000), smoke={"items": 60}, quick=quick
    )
    some = args.quick and not args.smoke
    judges, models = (QUICK_JUDGES, QUICK_MODELS) if some else (tuple(JUDGES), tuple(MODELS))
    worst = {"position": 0.0, "length": 0.0, "win rate": 0.0, "one order": 0.0, "naive bias": 0.0}
    table = []
    print(
        f"{'judge':<14} {'model':<16} position (planted)  length (planted)  one order  win rate      lc  95 % interval"
    )
    for judge in judges:
        first, longer = JUDGES[judge]
        for model in models:
            found = run(model, judge, args.items, list(JUDGES).index(judge))
            position, length, lc = (found.measure(m) for m in ("position_bias", "length_bias", "win_rate_lc"))
            win, naive = found.measure("win_rate").value, one_order(found)
            print(
                f"{judge:<14} {model:<16} {position.value:8.1%} {first / 2:8.1%} {length.value:9.1%} {longer / 2:8.1%} "
                f"{naive:9.1%} {win:9.1%} {lc.value:8.1%}  {lc.low:.1%} to {lc.high:.1%}"
            )
            table.append(
                {
                    "judge": judge,
                    "model": model,
                    "position": position.value,
                    "length": length.value,
                    "lc": lc.value,
                }
            )
            worst["position"] = max(worst["position"], abs(position.value - first / 2))
            worst["length"] = max(worst["length"], abs(length.value - longer / 2))
            worst["naive bias"] = max(worst["naive bias"], abs(naive - 0.5 - first / 2))
            if judge.startswith("always"):
                worst["win rate"] = max(worst["win rate"], abs(lc.value - 0.5))
                worst["one order"] = max(worst["one order"], abs(naive - 0.5))
                worst["win rate"] = max(worst["win rate"], 1.0 if not lc.low <= 0.5 <= lc.high else 0.0)
    bias = max(worst["position"], worst["length"])
    claim(
        f"judge model with a planted bias: largest error of position and length bias, {len(table)} pairs of judge and model",
        ours=100 * bias, peer=100 * worst["naive bias"], unit="points", ratio=bias, bar=BAR, ok=bias <= BAR,
        peer_name="wins of the first answer, one order",
        variant="bias", samples=table, quick=args.quick,
    )  # fmt: skip
    claim(
        "judge model that always prefers the first or the longer answer: largest win rate above or below 50 %",
        ours=100 * worst["win rate"], peer=100 * worst["one order"], unit="points", ratio=worst["win rate"], bar=BAR,
        ok=worst["win rate"] <= BAR, peer_name="one order, no length control", variant="win-rate", quick=args.quick,
    )  # fmt: skip
    return 0 if args.smoke or (bias <= BAR and worst["win rate"] <= BAR) else 1


if __name__ == "__main__":
    sys.exit(main())
