"""Seven rules of thumb of language models, each measured or derived here, for docs/rules_of_thumb.md.

    python bench/plan/rules_of_thumb.py [--rule 6ND]

Derived rules follow from shapes (`plan/accounting`), from the cost of layouts, or from a law. Measured are the bytes that
training allocates for each parameter, the pool of the engine, and the time of completions. A claim compares a rule with what
is found here. Its bar is the error up to which the page calls the rule good.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.engine.support.ours import ask, best_kind, made

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.models import TransformerConfig, make_model
from whorl.models.transformer_config import AttentionConfig, CustomMixer, MLAConfig
from whorl.plan.accounting.devices import devices
from whorl.plan.accounting.model_cost import ModelCost, decoder_config, known_models
from whorl.plan.laws.law import ScalingLaw, bytes_per_token, fitted_law
from whorl.plan.layout_cost import choose_layout
from whorl.tracking.seeds import numpy_rng
from whorl.train.config import OptimConfig
from whorl.train.job import Job
from whorl.train.learner.learner import SharedState
from whorl.train.lm.objective import param_optims

# Besiroglu et al. 2024 (arXiv:2404.10102), table 1: Chinchilla's runs, fitted again.
CHINCHILLA = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
SMALL = {"quickstart 3x192": (192, 3, 1024), "6x384": (384, 6, 8192), "12x768": (768, 12, 16_384)}


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown."""
    for row in (heads, ["---"] * len(heads), *rows):
        print("| " + " | ".join(map(str, row)) + " |")


def models() -> dict[str, TransformerConfig]:
    """The project's small shapes, without tables of n-grams, and the published models."""
    small = {name: decoder_config(*sizes, ngram_orders=()) for name, sizes in SMALL.items()}
    return small | dict(known_models())


def bytes_per_parameter() -> None:
    """14 bytes per parameter."""
    shape = known_models()["gpt2"].model_copy(update={"n_layers": sized(12, 1)})
    network = make_model(shape, torch.Generator().manual_seed(0))
    count, found = sum(p.numel() for p in network.parameters()), {}
    for name in ("adamw", "muon"):
        shared = SharedState.allocate(network, param_optims(network, OptimConfig(optimizer=name)))
        parts = {"weights": shared.weights, "gradients": shared.gradients, "state": shared.state}
        found[name] = {part: sum(t.nbytes for t in each.values()) / count for part, each in parts.items()}
    # torch in mixed precision: bf16 weights and gradients, fp32 copy and moments
    pairs = [(torch.zeros(64, 64, dtype=torch.bfloat16), torch.nn.Parameter(torch.zeros(64, 64)))]
    optimizer = torch.optim.AdamW([master for _, master in pairs])
    for low, master in pairs:
        master.grad = low.float()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    kept = sum(t.nbytes for t in (*moments, *(t for pair in pairs for t in pair))) / 64**2
    rows = [[f"this package, {name}", *(f"{n:.2f}" for n in parts.values()), f"{sum(parts.values()):.2f}"]
            for name, parts in found.items()]  # fmt: skip
    rows.append(["torch AdamW, bf16 with an fp32 copy", "2.00", "2.00", f"{kept - 2:.2f}", f"{kept + 2:.2f}"])
    rows.append(
        ["the same, each gradient freed when it is used", "2.00", "0.00", f"{kept - 2:.2f}", f"{kept:.2f}"]
    )
    table(["bytes per parameter", "weights", "gradients", "optimizer", "together"], rows)
    cost = ModelCost(known_models()["llama-3-8b"])
    gigabytes = [cost.activation_bytes(1, 8192, recompute=again) / 1e9 for again in (False, True)]
    print(f"activations of a row of 8,192 of llama-3-8b: {gigabytes[0]:.1f} GB, recomputed {gigabytes[1]:.1f} GB; "
          f"14 bytes per parameter: {14 * cost.parameters()['total'] / 1e9:.1f} GB")  # fmt: skip
    claim(
        "bytes per parameter of weights, gradients and Adam in bf16 with an fp32 copy", ours=kept + 2, peer=14.0,
        unit="bytes", ratio=(kept + 2) / 14, bar=1.15, ok=kept + 2 <= 14 * 1.15, peer_name="14 bytes per parameter",
        samples=[found], variant="14-bytes",
    )  # fmt: skip


def tokens_per_parameter() -> None:
    """20 tokens per parameter."""
    ratios, rows = {}, []
    for flops in (1e18, 1e20, 1e22, 5.76e23, 1e26):
        best = CHINCHILLA.optimum(flops)
        ratios[flops] = best.data / best.parameters
        sizes = [best.parameters * factor for factor in (0.25, 0.5, 2, 4)]
        more = [CHINCHILLA.loss(n, CHINCHILLA.data_for(flops, n)) - best.loss for n in sizes]
        rows.append([f"{flops:.3g}", f"{best.parameters:.3g}", f"{best.data:.3g}", f"{ratios[flops]:.1f}",
                     *(f"{loss:.3f}" for loss in more)])  # fmt: skip
    table(["FLOPs", "parameters", "tokens", "tokens per parameter",
           *(f"nats lost at {f} x the size" for f in ("1/4", "1/2", "2", "4"))], rows)  # fmt: skip
    rows = []
    for flops in (1e14, 1e15, 1e16):
        best = fitted_law().optimum(flops)
        ratio = best.data / bytes_per_token(1024) / best.parameters
        rows.append(
            [
                f"{flops:.0e}",
                f"{best.parameters:.3g}",
                f"{ratio:.1f}",
                f"{fitted_law().extrapolation(flops):.0f}",
            ]
        )
    table(["FLOPs, Python source", "weights of blocks", "tokens per weight", "times beyond the runs"], rows)
    found = ratios[5.76e23]
    claim(
        "tokens per parameter at Chinchilla's budget, by the law fitted again", ours=found, peer=20.0, unit="tokens",
        ratio=found / 20, bar=1.5, ok=2 / 3 <= found / 20 <= 1.5, peer_name="20 tokens per parameter",
        samples=[ratios], variant="20-tokens",
    )  # fmt: skip


def six_n_d() -> None:
    """6 N D FLOPs."""
    rows, errors = [], {}
    for name, shape in models().items():
        cost = ModelCost(shape)
        sizes, lengths = cost.parameters(), (256, 2048, 32_768)
        found = [cost.model.flops_per_token(length) / (6 * sizes["active"]) for length in lengths]
        errors[name] = found
        whole = f"{cost.model.flops_per_token(2048) / (6 * sizes['total']):.2f}"
        rows.append([name, f"{sizes['total']:,}", *(f"{ratio:.2f}" for ratio in found), whole])
    table(
        [
            "FLOPs / 6 N, N = active parameters",
            "parameters",
            "rows of 256",
            "2,048",
            "32,768",
            "2,048, N = all",
        ],
        rows,
    )
    large = [errors[name][1] for name in ("llama-3-8b", "llama-3-70b", "qwen3-8b", "mixtral-8x7b")]
    worst = max(large, key=lambda ratio: abs(ratio - 1))
    claim(
        "FLOPs of a training token over 6 N, the farthest of four models from 8 B, rows of 2,048", ours=worst, peer=1.0,
        unit="times", ratio=worst, bar=1.1, ok=abs(worst - 1) <= 0.1, peer_name="6 N D", samples=[errors], variant="6nd",
    )  # fmt: skip


def cache_formula() -> None:
    """2 x layers x key heads x head size x bytes."""
    heads = AttentionConfig(n_heads=8, n_kv_heads=2, head_dim=32)
    latent = MLAConfig(n_heads=8, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32)
    options = {"n_heads": 8}
    kinds: dict[str, AttentionConfig | MLAConfig | CustomMixer] = {
        "8 heads, 2 key heads": heads, "window of 128": heads.model_copy(update={"window": 128}),
        "smeared keys": heads.model_copy(update={"smear": True}), "latent attention": latent,
        "linear attention": CustomMixer(kind="linear", options=options),
    }  # fmt: skip
    rows, ratios, length, sequences = [], {}, 2048, sized(8, 1)
    for name, mixer in kinds.items():
        shape = TransformerConfig(
            vocab_size=512, d_model=256, n_layers=4, mlp_hidden=512, mixers={"a": mixer}
        )
        engine = EngineConfig.for_batch(sequences, length)
        pool = Engine(make_model(shape, torch.Generator().manual_seed(0)).eval(), engine).runner.n_bytes
        key_heads = getattr(mixer, "n_kv_heads", 8)
        rule = 2 * 4 * key_heads * 32 * 4 * length * sequences
        ratios[name] = pool / rule
        rows.append([name, f"{rule:,}", f"{pool:,}", f"{pool / rule:.3f}"])
    table(
        [
            f"cache of {sequences} x {length:,} positions, 4 layers, fp32",
            "rule, bytes",
            "engine, bytes",
            "engine / rule",
        ],
        rows,
    )
    found = ratios["8 heads, 2 key heads"]
    claim(
        "bytes of the engine's pool over 2 x layers x key heads x head size x bytes x positions", ours=found, peer=1.0,
        unit="times", ratio=found, bar=1.0, ok=found == 1.0, peer_name="KV formula", samples=[ratios], variant="kv",
    )  # fmt: skip


def completion_time() -> None:
    """TTFT + TPOT x n."""
    shape = decoder_config(384, sized(6, 1), 4096, ngram_orders=())
    lengths = sized((64, 256, 1024), (4, 8))
    engine = made(
        make_model(shape, torch.Generator().manual_seed(0)).eval(), best_kind(),
        EngineConfig(max_num_seqs=1, max_model_len=2048, enable_prefix_caching=False),
    )  # fmt: skip
    rng, rows, errors = numpy_rng(0, "bench", "rules"), [], {}
    for prompt in sized((32, 512), (8,)):
        runs = list[list[float]]()
        for number in range(sized(6, 2)):  # the first one warms up
            engine.add(ask(10 * prompt + number, rng.integers(9, 4096, prompt).tolist(), lengths[-1]))
            at, before = [time.perf_counter()], engine.stats.output_tokens
            while engine.busy:
                engine.step()
                new = engine.stats.output_tokens - before - (len(at) - 1)
                at += [time.perf_counter()] * new
            runs.append(at)
        # Of five runs the median time of each token, so that a pause of the machine counts once.
        at = [0.0, *np.cumsum(np.median(np.diff(runs[1:], axis=1), axis=0))]
        first, window = at[1] - at[0], min(lengths)
        start = (at[window] - at[1]) / (window - 1)  # seconds of a token at the beginning
        for n in lengths:
            low = max(1, n // 2 - window // 2)
            middle = (at[low + window - 1] - at[low]) / (window - 1)
            real, early, rule = at[n] - at[0], first + start * (n - 1), first + middle * (n - 1)
            errors[prompt, n] = rule / real
            rows.append([prompt, n, f"{1e3 * first:.1f}", f"{1e3 * start:.2f}", f"{1e3 * middle:.2f}", f"{real:.3f}",
                         f"{early / real:.2f}", f"{rule / real:.2f}"])  # fmt: skip
    table(["prompt", "tokens", "TTFT, ms", "TPOT at the start, ms", "in the middle, ms", "measured, s",
           "rule / measured, start", "rule / measured, middle"], rows)  # fmt: skip
    worst = max(errors.values(), key=lambda ratio: abs(ratio - 1))
    claim(
        f"TTFT + TPOT x n over the time of a completion, TPOT of its middle, the farthest of {len(errors)}",
        ours=worst, peer=1.0, unit="times", ratio=worst, bar=1.1, ok=abs(worst - 1) <= 0.1, peer_name="TTFT + TPOT x n",
        samples=[{str(key): value for key, value in errors.items()}], variant="ttft-tpot",
    )  # fmt: skip


def tensor_parallel() -> None:
    """Tensor parallel stays inside a node."""
    shape = known_models()[sized("llama-3-8b", "gpt2")]
    job = Job(
        tokens="", model=shape, seq_len=2048, batch_size=16, micro_batch_size=2, steps=1, dtype="bfloat16"
    )
    rows, ratios = [], {}
    for name in ("a100", "h100", "b200"):
        cluster = devices()[name].cluster("bf16")
        shares = []
        for nodes in (8, 1):
            near = cluster.model_copy(update={"devices_per_node": nodes, "memory_bytes": 1e15})
            found = choose_layout(job, near, 4)
            shares.append(next(one for one in found if one.layout.tp == 4))
        near_tp, far_tp = (one.parts["tp"] / one.seconds for one in shares)
        ratios[name] = shares[1].seconds / shares[0].seconds
        rows.append([name, f"{near_tp:.0%}", f"{far_tp:.0%}", f"{ratios[name]:.2f}"])
    table(
        ["4 devices, tp = 4", "tp of a step inside a node", "tp across nodes", "step across / inside"], rows
    )
    least = min(ratios.values())
    claim(
        "seconds of a step with tensor parallelism across nodes over inside a node, the least of three devices", ours=least,
        peer=1.0, unit="times", ratio=least, bar=1.25, ok=least >= 1.25, peer_name="inside a node", samples=[ratios],
        variant="tp-node",
    )  # fmt: skip


def embedding_share() -> None:
    """The embedding is a large share of a small model."""
    rows, shares = [], {}
    for name, shape in models().items():
        cost = ModelCost(shape)
        shares[name] = cost.embedding_share
        head = 6.0 * shape.vocab_size * shape.d_model / cost.model.flops_per_token(2048)
        tied = "tied" if shape.tie_embeddings else "two tables"
        rows.append([name, f"{shape.vocab_size:,}", tied, f"{shares[name]:.1%}", f"{head:.1%}"])
    table(["model", "vocabulary", "", "share of the parameters", "head's share of the FLOPs"], rows)
    claim(
        "share of embedding and head in Qwen3-0.6B's parameters", ours=shares["qwen3-0.6b"], peer=shares["llama-3-70b"],
        unit="share", ratio=shares["qwen3-0.6b"] / shares["llama-3-70b"], bar=5.0,
        ok=shares["qwen3-0.6b"] >= 5 * shares["llama-3-70b"], peer_name="Llama 3 70B", samples=[shares], variant="embedding",
    )  # fmt: skip


RULES: dict[str, Callable[[], None]] = {
    "14 bytes": bytes_per_parameter, "20 tokens": tokens_per_parameter, "6ND": six_n_d, "cache": cache_formula,
    "completion": completion_time, "tensor parallel": tensor_parallel, "embedding": embedding_share,
}  # fmt: skip


def main() -> None:
    given = parse(__doc__, lambda parser: parser.add_argument("--rule", choices=list(RULES)))
    for name, rule in RULES.items():
        if given.rule in (None, name):
            print(f"\n## {str(rule.__doc__).rstrip('.')}\n")
            rule()


if __name__ == "__main__":
    main()
