"""Side effects of fine-tuning: forgetting, exposure bias, made-up answers, refusal.

    python studies/probes/run.py                              all sections, three seeds
    python studies/probes/run.py facts --seeds 5

forgetting   a small model of the standard library's source is fine-tuned on sums by four methods: accuracy on the sums,
             and cost in bits per byte of held-out source
exposure     a model's continuations of held-out source against the real ones, by position, scored by the model and by a
             model trained on four times as much text
facts        SFT on known facts against unknown facts, with the same refusals: made-up answers about unknown people,
             and accuracy on known facts, during SFT
refusal      fraction of refusals in SFT against refusal rates on unanswerable and answerable questions

One thread; at most about a minute per seed and section. `--quick` runs one seed with fewer steps and two of the methods,
in fp32 on a CPU that emulates bf16.
The modules of `studies/probes` define each measure.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np
import torch
from bench._run import claim, emulates_bf16, parse, sized
from studies.probes.exposure import policy_exposure
from studies.probes.forgetting import forgetting
from studies.probes.greedy_answers import GreedyAnswers
from studies.probes.knowledge import make_lesson, refusal_rates, track_sft

from whorl.align.config import LoRAConfig, ModelConfig, SFTConfig
from whorl.align.data.arithmetic import Arithmetic
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.sft import fine_tune
from whorl.evals.suites.biographies import REFUSAL, Biographies, PersonGroup
from whorl.models import make_model, whorl_decoder
from whorl.tokens.shards import write_shards
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator, numpy_rng

CHATML = ("<|im_start|>", "<|im_end|>")
QUICK = "--quick" in sys.argv
DTYPE = torch.float32 if QUICK and emulates_bf16() else torch.bfloat16
READER_TOKENS, EXPOSURE_TOKENS = sized((100_000, 30_000) if QUICK else (300_000, 100_000), (1_000, 1_000))
SOURCES, TOKENIZER_TEXTS, VOCABULARY, HELD_OUT = sized((None, 200, 1024, 32), (48, 16, 512, 4))
N_SUMS, N_PROBLEMS, N_PEOPLE = sized((1000 if QUICK else 3000, 60, 100), (20, 4, 40))
SHARES: dict[PersonGroup, float] = {
    "known_train": 0.2, "known_test": 0.2, "new": 0.2, "stranger_train": 0.25, "stranger_test": 0.15,
}  # fmt: skip


class StoredDocument(NamedTuple):
    """The fields of a document that `write_shards` needs."""

    id: str
    source: str
    path: str
    offset: int
    text: str


def network(encoder: TokenEncoder, seed: int, lora: LoRAConfig | None = None) -> PolicyModel:
    n_tokens = encoder.tokenizer.vocab_size
    rows = -(-n_tokens // 8) * 8
    config = whorl_decoder(
        vocab_size=rows, d_model=128, n_layers=2, mlp_hidden=384, n_heads=4, n_kv_heads=4, head_dim=32,
        ngram_buckets=512,
    )  # fmt: skip
    model = make_model(config, generator(seed, "weights"), DTYPE)
    return PolicyModel(model, banned_ids=encoder.banned_ids(rows), lora=lora, seed=seed)


def plain(tokenizer: Tokenizer, text: str, longest: int | None = None) -> TokenizedExample:
    """Return a text with every id except bos in the loss."""
    ids = np.asarray(tokenizer.encode_document(text), np.int64)[:longest]
    mask = np.ones(len(ids), np.bool_)
    mask[0] = False
    return TokenizedExample(ids, mask)


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


# -- source code -------------------------------------------------------------------------------------------------------


def source(seed: int) -> tuple[list[str], list[str]]:
    """Return (training texts, held-out texts) of the standard library, of 200 to 4,000 characters each."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = (sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")))[:SOURCES]
    whole = [p.read_text("utf-8", "replace")[:4000] for p in paths if "site-packages" not in p.parts]
    some = [text for text in whole if len(text) > 200]
    order = numpy_rng(seed, "source").permutation(len(some))
    return [some[i] for i in order[HELD_OUT:]], [some[i] for i in order[:HELD_OUT]]


def reader(encoder: TokenEncoder, texts: Sequence[str], tokens: int, seed: int) -> PolicyModel:
    """Return a model of source code, trained on `tokens` tokens."""
    tokenizer = encoder.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    model, examples, count = network(encoder, seed), [], 0
    while count < tokens:
        for text in texts:
            ids = plain(tokenizer, text).ids
            for i in range(0, len(ids) - 1, 256):
                piece = ids[i : i + 257]
                mask = np.ones(len(piece), np.bool_)
                mask[0] = False
                examples.append(TokenizedExample(piece, mask))
                count += len(piece)
            if count >= tokens:
                break
    config = SFTConfig(lr_scale=0.5, data={"epochs": 1, "seq_len": 256, "batch_size": 2}, seed=seed)
    return fine_tune(model, examples, config, pad_id=tokenizer.pad_id)


ROWS = {"epochs": 2, "seq_len": 256, "batch_size": 2}  # of SFT


def measure_forgetting(seeds: range, quick: bool) -> None:
    print("\nforgetting: bits per byte of held-out source, before and after SFT on sums of digits")
    print(f"{'seed':>4} {'method':28} {'accuracy':>8} {'before':>7} {'after':>7} {'cost':>8}  seconds")
    ways: dict[str, dict[str, object]] = {
        "rate 0.3": {"lr_scale": 0.3},
        "rate 0.3, half of it replay": {"lr_scale": 0.3, "data": {**ROWS, "replay_fraction": 0.5}},
    }
    if not QUICK:
        lora = ModelConfig(lora=LoRAConfig(rank=8))
        ways |= {"rate 0.1": {"lr_scale": 0.1}, "rate 0.3, LoRA of rank 8": {"lr_scale": 0.3, "model": lora}}
    costs: dict[str, list[float]] = {way: [] for way in ways}
    for seed in seeds:
        texts, held = source(seed)
        tokenizer = Tokenizer.train(texts[:TOKENIZER_TEXTS], VOCABULARY, special_tokens=CHATML)
        encoder = TokenEncoder(tokenizer)
        base = reader(encoder, texts, READER_TOKENS, seed).merged_weights()
        sums = Arithmetic(seed, {0: 1.0}, show_steps=False)
        examples = [
            encoder.prompt_completion(p.prompt, p.completion)
            for p in map(sums.prompt_completion, sums.problems(0, N_SUMS))
        ]
        problems = sums.distinct(N_PROBLEMS, held_out=False)
        with tempfile.TemporaryDirectory() as folder:
            documents = [StoredDocument(str(n), "stdlib", str(n), 0, text) for n, text in enumerate(texts)]
            write_shards(documents, tokenizer, Path(folder), "train")  # type: ignore[arg-type]
            for way, options in ways.items():
                started = time.perf_counter()
                config = SFTConfig.model_validate({"data": ROWS, "seed": seed, **options})
                net = network(encoder, seed, config.model.lora)
                with torch.no_grad():
                    for name, p in net.model.named_parameters():
                        p.copy_(base[name])
                stage = partial(
                    fine_tune, examples=examples, config=config, pad_id=tokenizer.pad_id,
                    replay_data=Path(folder) if config.data.replay_fraction else None,
                )  # fmt: skip
                found = forgetting(net.model, tokenizer, held, partial(stage, net), 256)
                answers = GreedyAnswers(net, encoder, [sums.prompt(p) for p in problems], max_tokens=6)(net)
                right = float(
                    np.mean([a.strip() == str(p.answer) for a, p in zip(answers, problems, strict=True)])
                )
                costs[way].append(found.cost)
                print(
                    f"{seed:4} {way:28} {right:8.1%} {found.before:7.3f} {found.after:7.3f} {found.cost:+8.1%}"
                    f"  {time.perf_counter() - started:.0f}", flush=True,
                )  # fmt: skip
    ours, peer = median(costs["rate 0.3, half of it replay"]), median(costs["rate 0.3"])
    claim(
        "cost of SFT in bits per byte of held-out text, with replay",
        variant="forgetting",
        ours=ours,
        peer=peer,
        peer_name="no replay",
        unit="fraction of bits per byte",
        ratio=ours / peer,
        bar=0.5,
        ok=ours <= 0.5 * peer,
        samples=[costs],
        quick=quick,
    )


def measure_exposure(seeds: range, quick: bool) -> None:
    print("\nexposure: nats per token by position after the prompt, for data and for own samples")
    print(
        f"{'seed':>4} {'position':>8} {'data':>7} {'self':>7} {'gap':>7}   evaluator: {'data':>7} {'self':>7} {'gap':>7}"
    )
    found: list[
        tuple[float, float, float]
    ] = []  # drift by the model and by the evaluator, gap by the evaluator
    places, prompt = 64, 24
    for seed in seeds:
        started = time.perf_counter()
        texts, held = source(seed)
        tokenizer = Tokenizer.train(texts[:TOKENIZER_TEXTS], VOCABULARY, special_tokens=CHATML)
        encoder = TokenEncoder(tokenizer)
        net = reader(encoder, texts, EXPOSURE_TOKENS, seed)
        evaluator = reader(encoder, texts, 4 * EXPOSURE_TOKENS, seed + 100)
        prompts, rest = [], []
        for text in held:
            ids = plain(tokenizer, text).ids.tolist()
            for start_index in range(0, len(ids) - prompt - places, prompt + places)[: 2 if quick else 8]:
                prompts.append([tokenizer.bos_id, *ids[start_index + 1 : start_index + prompt]])
                rest.append(ids[start_index + prompt : start_index + prompt + places])
        got = policy_exposure(
            net,
            encoder,
            prompts,
            rest,
            pad_id=tokenizer.pad_id,
            n_positions=places,
            bin_size=8,
            evaluator=evaluator,
            seed=seed,
        )
        own_curve, evaluator_curve = got.by_model, got.by_evaluator
        assert evaluator_curve is not None
        for g, start in enumerate(own_curve.start):
            print(
                f"{seed:4} {start:4}-{start + 7:<3} {own_curve.data_nll[g]:7.3f} {own_curve.self_nll[g]:7.3f} "
                f"{own_curve.gap[g]:+7.3f}"
                f"          {evaluator_curve.data_nll[g]:7.3f} {evaluator_curve.self_nll[g]:7.3f} "
                f"{evaluator_curve.gap[g]:+7.3f}"
            )
        found.append((own_curve.drift, evaluator_curve.drift, float(evaluator_curve.gap.mean())))
        print(
            f"{seed:4} drift: by the model {own_curve.drift:+.3f}, by the evaluator {evaluator_curve.drift:+.3f} nats; "
            f"{len(prompts)} prompts, {time.perf_counter() - started:.0f} s", flush=True,
        )  # fmt: skip
    drift, gap = median([abs(d) for _, d, _ in found]), median([g for _, _, g in found])
    claim(
        "growth of the gap between own samples and data with the position, by the evaluator", variant="exposure",
        ours=drift, peer=gap, peer_name="mean gap", unit="nats per token", ratio=drift / gap, bar=0.15,
        ok=drift < 0.15 * gap,
        samples=found, quick=quick,
    )  # fmt: skip


# -- biographies -------------------------------------------------------------------------------------------------------


class BaseModel(NamedTuple):
    """A population, and a model that was trained on its known people."""

    world: Biographies
    encoder: TokenEncoder
    pad_id: int
    weights: dict[str, torch.Tensor]
    seed: int

    def base(self) -> PolicyModel:
        """Return the model before SFT."""
        net = network(self.encoder, self.seed)
        with torch.no_grad():
            for name, p in net.model.named_parameters():
                p.copy_(self.weights[name])
        return net


@cache
def train_base(seed: int, quick: bool) -> BaseModel:
    """Train a base model on the known people's facts, as biographies and as answers, until it recalls them."""
    world = Biographies(N_PEOPLE, seed, SHARES)
    all_questions = world.questions("known_train", "known_test", "new", "stranger_train", "stranger_test")
    biographies = [text for _, text in world.texts(1)]
    tokenizer = Tokenizer.train(
        [*biographies, *(q.question for q in all_questions), REFUSAL], 700, special_tokens=CHATML
    )
    encoder = TokenEncoder(tokenizer)
    questions = world.questions("known_train", "known_test")
    texts = [plain(tokenizer, story) for story in biographies]
    texts += [encoder.conversation(q.messages()) for q in questions]
    net = network(encoder, seed)
    config = SFTConfig(
        lr_scale=0.2,
        data={"epochs": sized(24, 1) if quick else 32, "seq_len": 256, "batch_size": 1},
        seed=seed,
    )
    fine_tune(net, texts, config, pad_id=tokenizer.pad_id)
    weights = {name: tensor.clone() for name, tensor in net.merged_weights().items()}
    return BaseModel(world, encoder, tokenizer.pad_id, weights, seed)


QUESTIONS, REFUSALS = sized(120, 10), 0.4
FEWER = sized(80, 8)  # questions for the refusal section; a training set without refusals needs as many facts


def measure_facts(seeds: range, quick: bool) -> None:
    print(
        f"\nfacts: SFT on {QUESTIONS} questions, {REFUSALS:.0%} of them refusals about unknown people; tested on others"
    )
    print(
        f"{'seed':>4} {'lesson':7} {'step':>5} {'fitted':>7} | known: {'right':>6} {'refused':>8} | "
        f"unknown: {'answered':>8}"
    )
    ends: dict[str, list[tuple[float, float]]] = {"known": [], "new": []}
    for seed in seeds:
        started = time.perf_counter()
        base_model = train_base(seed, quick)
        test_questions = base_model.world.questions("known_test", "stranger_test")
        config = SFTConfig(
            lr_scale=0.1,
            data={"epochs": sized(8, 1) if quick else 12, "seq_len": 256, "batch_size": 1},
            seed=seed,
        )
        for facts in ("known", "new"):
            train_questions = make_lesson(base_model.world, facts, QUESTIONS, REFUSALS, seed)  # type: ignore[arg-type]
            for m in track_sft(
                base_model.base(),
                base_model.encoder,
                train_questions,
                test_questions,
                config,
                pad_id=base_model.pad_id,
                every=60,
            ):
                print(
                    f"{seed:4} {facts:7} {m.step:5} {m.train_scores.correct:7.1%} |        {m.test_scores.correct:6.1%} "
                    f"{m.test_scores.refused:8.1%} |            {m.test_scores.hallucinated:7.1%}"
                )  # fmt: skip
            ends[facts].append((m.test_scores.hallucinated, m.test_scores.correct))
        print(f"{seed:4} {time.perf_counter() - started:.0f} s", flush=True)
    ours, peer = (median([made_up for made_up, _ in ends[facts]]) for facts in ("new", "known"))
    claim(
        "made-up answers about unknown people after SFT on unknown facts",
        variant="facts",
        ours=ours,
        peer=peer,
        peer_name="SFT on known facts",
        unit="fraction of unanswerable questions",
        ratio=ours - peer,
        bar=0.05,
        ok=ours - peer >= 0.05,
        samples=[ends],
        quick=quick,
    )


def measure_refusal(seeds: range, quick: bool) -> None:
    print(
        f"\nrefusal: fraction of refusals among {FEWER} SFT questions, and refusal rates on other questions"
    )
    print(f"{'seed':>4} {'SFT':>6} {'unanswerable':>13} {'answerable':>11} {'right':>7}")
    found: list[list[tuple[float, float]]] = []
    shares = (0.0, 0.4) if quick else (0.0, 0.1, 0.2, 0.4, 0.6)
    for seed in seeds:
        started = time.perf_counter()
        base_model = train_base(seed, quick)
        config = SFTConfig(
            lr_scale=0.1, data={"epochs": sized(8, 1), "seq_len": 256, "batch_size": 1}, seed=seed
        )
        rows = refusal_rates(
            base_model.base,
            base_model.encoder,
            base_model.world,
            shares,
            FEWER,
            config,
            pad_id=base_model.pad_id,
        )
        for row in rows:
            print(
                f"{seed:4} {row.refusal_fraction:6.0%} {row.unanswerable:13.1%} {row.answerable:11.1%} {row.correct:7.1%}"
            )
        found.append([(row.unanswerable, row.answerable) for row in rows])
        print(f"{seed:4} {time.perf_counter() - started:.0f} s", flush=True)
    best = [max(u - a for u, a in rows) for rows in found]
    claim(
        "refusal rate of unanswerable minus answerable questions after SFT with refusals",
        variant="refusal",
        peer_name="no difference",
        ours=median(best),
        peer=0.0,
        unit="difference of refusal rates",
        ratio=median(best),
        bar=0.3,
        ok=median(best) >= 0.3,
        samples=found,
        quick=quick,
    )


SECTIONS: dict[str, Callable[[range, bool], None]] = {
    "forgetting": measure_forgetting,
    "exposure": measure_exposure,
    "facts": measure_facts,
    "refusal": measure_refusal,
}


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="default: all")
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--first", type=int, default=0, help="number of the first seed")
        parser.add_argument("--quick", action="store_true")

    a = parse(__doc__, arguments, smoke={"quick": True})
    torch.set_num_threads(1)
    for name in a.sections or SECTIONS:
        SECTIONS[name](range(a.first, a.first + (1 if a.quick else a.seeds)), a.quick)


if __name__ == "__main__":
    main()
