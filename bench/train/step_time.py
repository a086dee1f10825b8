"""A training step against a plain GPT and a Hugging Face Llama of the same shape, each in its best setting on this machine.

    python bench/train/step_time.py                              # the quickstart's shape
    python bench/train/step_time.py --shape 3x128/1024/8x512     # layers x width / vocabulary / rows x tokens
    python bench/train/step_time.py --shape 6x384/8192/16x256

Ours has n-gram embeddings, smeared keys, QK-norm, Muon, fp32 master weights, replicas over the cores, and is compiled.
The peer is LlamaForCausalLM with fused AdamW and all threads, in the best of {fp32, bf16 autocast, pure bf16} x {eager,
compiled}. Both have an untied head and MLPs with the same number of weights. The plain GPT is `_plain_gpt.py`, with the
same choice of settings. The script also reports the time of our step's matrix products alone, in the same run, on all
cores.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in `whorl run`
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, emulates_bf16, parse, sized, smoke
from bench.train._plain_gpt import KINDS as ALL_KINDS
from bench.train._plain_gpt import PlainGPT, Setting, Training, heads_of, seconds_per_step

from whorl.machine.device_probe import probe
from whorl.machine.malloc import keep_freed_memory
from whorl.models import TransformerConfig
from whorl.models.transformer_config import AttentionConfig
from whorl.plan.accounting.model_cost import decoder_config
from whorl.train.job import Job
from whorl.train.profiling.step_timer import time_steps

ROUNDS = 5
KINDS = sized(ALL_KINDS, ALL_KINDS[:1])


def wait() -> None:
    """Until a GPU, if there is one, has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def attention(model: TransformerConfig) -> AttentionConfig:
    mixer = model.layer_mixers()[0]
    assert isinstance(mixer, AttentionConfig)
    return mixer


def llama(
    model: TransformerConfig, rows: int, length: int, kind: str, compiled: bool, seconds: float
) -> float:
    """Seconds per step of the Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.d_model, num_hidden_layers=model.n_layers,
        intermediate_size=round(model.mlp_hidden * 2 / 3 / 32) * 32, num_attention_heads=attention(model).n_heads,
        num_key_value_heads=attention(model).n_kv_heads, head_dim=attention(model).head_dim, max_position_embeddings=length,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    peer = LlamaForCausalLM(config).train()
    if kind == "pure bf16":
        peer = peer.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-3, fused=True)
    run = torch.compile(peer) if compiled else peer
    ids = torch.randint(0, model.vocab_size, (rows, length))

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=kind == "autocast"):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(sized(3, 1)):
        step()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        began = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - began)
    torch._dynamo.reset()
    return median(times)


def plain(
    model: TransformerConfig, rows: int, length: int, kind: str, compiled: bool, seconds: float
) -> float:
    """Seconds per step of the plain GPT."""
    torch.manual_seed(0)
    peer = PlainGPT(model.vocab_size, model.d_model, model.n_layers, heads_of(model.d_model), length)
    found = seconds_per_step(Training(peer, Setting(kind, compiled)), model.vocab_size, rows, length, seconds)
    torch._dynamo.reset()
    return found


def products(model: TransformerConfig, rows: int, length: int, dtype: torch.dtype) -> float:
    """Seconds of the step's matrix products alone: layers and head, forward and backward."""
    tokens, d, h = rows * length, model.d_model, model.mlp_hidden
    width = (attention(model).n_heads + 2 * attention(model).n_kv_heads) * attention(model).head_dim
    shapes = [
        (d, width),
        (attention(model).n_heads * attention(model).head_dim, d),
        (d, h),
        (h, d),
    ] * model.n_layers + [(d, model.vocab_size)]
    total = 0.0
    for inner, outer in shapes:
        x, w, y = (torch.randn(s, dtype=dtype) for s in ((tokens, inner), (outer, inner), (tokens, outer)))
        for work in (lambda x=x, w=w: x @ w.t(), lambda y=y, w=w: y @ w, lambda x=x, y=y: y.t() @ x):
            work()
            wait()
            times = []
            for _ in range(5):
                began = time.perf_counter()
                work()
                wait()
                times.append(time.perf_counter() - began)
            total += min(times)
    return total


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shape", default="3x192/1024/8x256")
        parser.add_argument("--seconds", type=float, default=4.0)
        parser.add_argument("--rounds", type=int, default=ROUNDS)
        parser.add_argument("--quick", action="store_true", help="compiled peers only, one short round")

    a = parse(__doc__, arguments, smoke={"shape": "1x64/512/2x64", "seconds": 0.02, "rounds": 1})
    keep_freed_memory()  # as in our replicas; the peers and the products gain 3 to 20 % by it (LOG.md)
    layers, width, vocabulary, rows, length = map(
        int, re.fullmatch(r"(\d+)x(\d+)/(\d+)/(\d+)x(\d+)", a.shape).groups()
    )
    machine = probe()
    machine.apply()
    here = torch.device(machine.device)
    model = decoder_config(width, layers, vocabulary)
    tokens = rows * length
    job = Job(
        tokens="", model=model, seq_len=length, batch_size=rows, steps=1, dtype=machine.dtype, compile=not smoke(),
        device=machine.device, replicas=sized(machine.cores, 1) if machine.device == "cpu" else 1,
    )  # fmt: skip
    peers, best = {}, {}
    if a.quick:
        a.seconds, a.rounds = min(a.seconds, 1.5), 1
    kinds = KINDS[:1] if emulates_bf16() else [k for k in KINDS if not a.quick or k != "fp32"] or KINDS
    ways = sized((True,) if a.quick else (False, True), (False,))
    settings = [str(Setting(kind, compiled)) for kind in kinds for compiled in ways]
    for who, peer in (("Llama", llama), ("plain GPT", plain)):
        for setting in settings if len(settings) > 1 else ():
            name, (kind, how) = f"{who}, {setting}", setting.split(", ")
            with here:
                peers[name] = tokens / peer(model, rows, length, kind, how == "compiled", a.seconds)
            print(f"{name}: {peers[name]:,.0f} tokens/s", flush=True)
        best[who] = max((f"{who}, {setting}" for setting in settings), key=lambda n: peers.get(n, 0.0))
    rounds = []  # the machine's speed drifts: all are timed in turn, and the median ratio counts
    for _ in range(a.rounds):
        one = {}
        for who, peer in (("Llama", llama), ("plain GPT", plain)):
            _, kind, how = best[who].split(", ")
            with here:
                one[who] = tokens / peer(model, rows, length, kind, how == "compiled", a.seconds)
        one["ours"] = tokens / time_steps(job, a.seconds).step_seconds
        with here:
            one["products"] = tokens / products(model, rows, length, machine.torch_dtype)
        rounds.append(one)
        print(", ".join(f"{who}: {speed:,.0f} tokens/s" for who, speed in one.items()), flush=True)

    def middle(who: str) -> float:
        return median([each["ours"] / each[who] for each in rounds])

    ours, share = median([each["ours"] for each in rounds]), middle("products")
    print(
        f"ours in {machine.dtype} with {machine.cores} replicas; {share:.0%} of the products' speed",
        flush=True,
    )
    # Bars with and without AMX: over both peers, and share of the products. The last pair is for larger shapes.
    bars_by_width = {
        128: ((2.5, 0.4), (2.0, 0.6)),
        192: ((2.0, 0.5), (1.6, 0.7)),
        1 << 30: ((1.8, 0.6), (1.25, 0.82)),
    }
    with_amx, without = next(pair for at_most, pair in bars_by_width.items() if width <= at_most)
    ratio, of_products = with_amx if torch.cpu._is_amx_tile_supported() else without
    bars = {"Llama": ratio, "plain GPT": ratio, "products": of_products}
    samples = [{"peers": {k: round(v) for k, v in peers.items()},
                "rounds": [{k: round(v) for k, v in each.items()} for each in rounds]}]  # fmt: skip
    variants = {"Llama": f"{layers}x{width}", "plain GPT": f"{layers}x{width}-plain-gpt",
                "products": f"{layers}x{width}-products"}  # fmt: skip
    for who, bar in bars.items():
        peer_speed = median([each[who] for each in rounds])
        who_else = f"Hugging Face {best[who]}" if who == "Llama" else best.get(who, "matrix products")
        claim(
            f"training step, {a.shape}", ours=round(ours), peer=round(peer_speed), unit="tokens/s", ratio=middle(who),
            bar=bar, ok=middle(who) >= bar, quick=a.quick, samples=samples if who == "Llama" else [],
            variant=variants[who], peer_name=who_else,
        )  # fmt: skip


if __name__ == "__main__":
    main()
