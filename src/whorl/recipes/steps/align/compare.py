"""The step `compare`: is the new model better than the one it was trained from, and how certain is that?

    [steps.compare]
    from = "logged"                                 # the champion
    parents = { challenger = "preference", events = "events", preferences = "preferences" }
    preference = "compiles"                         # a known preference (loop/known_preferences.py), if there is one

Prompts and preferences are of the held-out split, which no round trains on. Each measure has a 95 % interval over prompts
(`evals/statistics/comparison.py`); without a change it is a half:

    win rate            answers of both models, sampled with common seeds, graded by the known preference; a tie is a half
    implicit reward     log pi_challenger(y|x) - log pi_champion(y|x): how often that of the preferred answer is higher;
                        of single answers, that of a liked one than of a disliked one (area under the ROC curve)

Guards are the bits per byte of held-out text, and the length of answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from whorl.align.config import PreferenceConfig
from whorl.errors import NotApplicableError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.steps.align.feedback import read_rows
from whorl.report.blocks import Card, Column, Table

if TYPE_CHECKING:
    from whorl.evals.statistics.comparison import PairedDifference
    from whorl.tokens.token_encoder import TokenEncoder

ROLES = ("champion", "challenger")
MAX_ANSWER, ROOM = 512, 32  # ids of an answer, and of the end of a prompt that is generated again
MIN_OWN = 50  # held-out preferences of the champion, from which on those of earlier models are left out
Networks = dict[str, Any]  # role -> PolicyModel


class CompareConfig(BaseModel):
    """The measures and their sizes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preference: str = Field(default="", description="that grades answers: compiles, brackets or shorter")
    max_prompts: int = Field(default=256, ge=1, description="held-out prompts that both models answer")
    temperature: float = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0)


@step(
    "comparison",
    config=CompareConfig,
    parents={**dict.fromkeys(ROLES, "model"), "events": "events", "preferences": "preferences"},
)
def compare(ctx: StepContext, config: CompareConfig) -> None:
    """Compare a model with the one that it was trained from, on held-out prompts and preferences."""
    from whorl.align.stage.io import open_policy
    from whorl.evals.statistics.comparison import verdict_of
    from whorl.recipes.stage import lineage_likelihood

    rows = [
        row for row in read_rows(ctx.parent_folder("events") / "completions.jsonl") if row["split"] == "test"
    ]
    settings, networks = PreferenceConfig(), Networks()
    for role in ROLES:
        folder = ctx.parent_folder(role)
        encoder, network = open_policy(folder, settings, ctx.machine, context_hint=settings.data.seq_len)
        networks[role] = network.eval()
    with ctx.progress.task("Comparing"):
        answers = _answers(encoder, networks, rows, config)
        found = _win_rate(config.preference, answers) | _implicit_reward(ctx, encoder, networks)
        likelihood = {r: lineage_likelihood(ctx, "champion", n.model, encoder) for r, n in networks.items()}
    if not found:
        raise NotApplicableError("no held-out preference to compare on", do="collect more feedback")
    main, first = next(iter(found.items()))
    result: dict[str, Any] = {
        **{role: ctx.parents[role].address for role in ROLES},
        "measure": main, "verdict": verdict_of(first.low, first.high), "prompts": len(answers),
        "measures": {name: {"value": 0.5 + m.difference, "low": 0.5 + m.low, "high": 0.5 + m.high, "n": m.n}
                     for name, m in found.items()},
        "bits_per_byte": {role: None if each is None else each.bits_per_byte for role, each in likelihood.items()},
        "characters": {role: _mean([len(a[role]) for a in answers]) for role in ROLES},
        "good answers": {role: _mean([a["good"][role] for a in answers if "good" in a]) for role in ROLES},
    }  # fmt: skip
    (ctx.out / "comparison.json").write_text(json.dumps(result, indent=1))
    (ctx.out / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    _report(ctx, result)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _answers(
    encoder: TokenEncoder, networks: Networks, rows: Sequence[Any], config: CompareConfig
) -> list[dict[str, Any]]:
    """Return the answers of both models to distinct held-out prompts, as a server gives them; seeds are common."""
    from whorl.evals.model.sampling import open_engine, policy_sampling

    lengths = [len(answer["ids"]) - answer["forced"] for row in rows for answer in row["choices"]]
    limit = min(MAX_ANSWER, max(lengths, default=1))
    most = min(network.model.declared_length for network in networks.values()) - limit - ROOM
    prompts = {json.dumps(row["prompt"]): row for row in rows if len(row["prompt_ids"]) <= most}
    chosen = [*prompts.values()][: config.max_prompts]
    if not chosen:
        return []
    texts = [row["prompt"] if isinstance(row["prompt"], str) else "" for row in chosen]
    healed = [encoder.heal(text) if text else None for text in texts]
    ids = [one.ids if one else row["prompt_ids"] for one, row in zip(healed, chosen, strict=True)]
    sampling = policy_sampling(config.temperature)
    found: list[dict[str, Any]] = [{"prompt": row["prompt"]} for row in chosen]
    for role, network in networks.items():
        engine = open_engine(network.eval_copy(), (64, max(map(len, ids)) + limit + ROOM), encoder)
        done = engine.generate(
            ids, [sampling.model_copy(update={"seed": config.seed + n}) for n in range(len(ids))], max_tokens=limit,
            stop_ids=encoder.stop_ids, forced_prefixes=[one.forced_prefix if one else b"" for one in healed],
        )  # fmt: skip
        for item, answer in zip(found, done, strict=True):
            item[role] = answer.text.decode("utf-8", "replace")
    return found


def _win_rate(preference: str, answers: Sequence[dict[str, Any]]) -> dict[str, PairedDifference]:
    """Return the win rate of the challenger, less a half; adds whether each answer is good."""
    from whorl.loop.known_preferences import known_preference

    if not preference or not answers:
        return {}
    known, prompts = known_preference(preference), [answer["prompt"] for answer in answers]
    scores = {role: known.scores(prompts, [answer[role] for answer in answers]) for role in ROLES}
    for n, answer in enumerate(answers):
        answer["good"] = {role: scores[role][n] >= known.good for role in ROLES}
    return {"win rate": _share(scores["champion"], scores["challenger"])}


def _share(old: Any, new: Any, clusters: Any = None) -> PairedDifference:
    """Return how often the new values [n] are higher, a tie being a half, less a half."""
    import numpy as np

    from whorl.evals.statistics.comparison import paired_difference

    old, new = np.asarray(old), np.asarray(new)
    return paired_difference((new > old) + 0.5 * (new == old), np.full(len(old), 0.5), clusters, shares=True)


def _implicit_reward(
    ctx: StepContext, encoder: TokenEncoder, networks: Networks
) -> dict[str, PairedDifference]:
    """Return how often the implicit reward ranks held-out preferences as the raters did, less a half."""
    from whorl.align.data.dataset_files import read_preferences, read_unpaired
    from whorl.align.preference.pairs import sequence_log_probs, tokenize_pairs, tokenize_unpaired
    from whorl.evals.statistics.comparison import ranked_apart
    from whorl.recipes.stage import pad_id_of
    from whorl.tokens.token_encoder import LengthFilter

    folder = ctx.parent_folder("preferences")
    kept = LengthFilter(min(network.model.declared_length for network in networks.values()))
    pairs = tokenize_pairs(encoder, _of_champion(ctx, read_preferences(folder, "test")), kept)
    single = tokenize_unpaired(encoder, _of_champion(ctx, read_unpaired(folder, "test")), kept)
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)] + [
        one.example for one in single
    ]
    if not texts:
        return {}
    old, new = (sequence_log_probs(networks[role], texts, pad_id_of(encoder)).numpy() for role in ROLES)
    reward, labels = (new - old)[: 2 * len(pairs)], (new - old)[2 * len(pairs) :]
    prompts = [str(pair.chosen.ids[: pair.chosen.prompt_length].tolist()) for pair in pairs]
    liked, others = (
        [x for x, one in zip(labels, single, strict=True) if one.label == y] for y in (True, False)
    )
    found = {"held-out pairs": _share(reward[1::2], reward[0::2], prompts)} if pairs else {}
    if min(len(liked), len(others)) > 1:
        found["liked over disliked"] = ranked_apart(liked, others)
    # Thumbs give few pairs of one prompt, so the verdict is that of the measure with more independent items.
    return dict(sorted(found.items(), key=lambda item: -item[1].clusters))


def _of_champion(ctx: StepContext, items: list[Any]) -> list[Any]:
    """Return the champion's own answers, if they are enough; those of earlier models show less of what has changed."""
    own = [item for item in items if item.source == ctx.parents["champion"].address]
    return own if len(own) >= MIN_OWN else items


def _report(ctx: StepContext, result: dict[str, Any]) -> None:
    """Write the headline and the table of the figures."""
    main = result["measures"][result["measure"]]
    share = f"{main['low']:.1%} to {main['high']:.1%}, n = {main['n']}"
    verdict = result["verdict"] if result["verdict"] in ("better", "worse") else "not distinguishable yet"
    headline = f"the new model is {verdict}: {result['measure']} {main['value']:.1%} ({share})"
    table: list[Any] = [
        [name, "50.0%", f"{m['value']:.1%}", f"{m['low']:.1%} to {m['high']:.1%}", str(m["n"])]
        for name, m in result["measures"].items()
    ]
    for label, key in (
        ("share of good answers", "good answers"),
        ("bits per byte, held-out text", "bits_per_byte"),
        ("characters", "characters"),
    ):
        old, new = (result[key][role] for role in ROLES)
        if old is not None and new is not None:
            table.append([label, f"{old:.3f}", f"{new:.3f}", "-", "-"])
            headline += f"; {label} {old:.3f}, then {new:.3f}"
    ctx.summary.update(result, headline=headline)
    ctx.report.cards.append(
        Card(
            label="The next model wins", value=f"{main['value']:.1%}", more=share, number=100 * main["value"]
        )
    )
    ctx.report.blocks.append(
        Table(
            section="Is the next model better?", title=headline[0].upper() + headline[1:] + ".", rows=table,
            note="A challenger that is no better has 50 %. No round trains on these prompts and preferences.",
            columns=[Column(name="Measure"), *(Column(name=name, number=True)
                     for name in ("Champion", "Challenger", "95 % interval", "n"))],
        )
    )  # fmt: skip
