"""The recipe `diffuse-code` at tiny size, and what the command line does with its model."""

from __future__ import annotations

from pathlib import Path

from tests.support.cli import refuse, succeed
from tests.support.recipes.align_steps import write_code

TINY = {
    "ingest.sources": '["code"]', "plan.steps": 8, "plan.d_model": 32, "plan.n_layers": 1, "plan.vocab_size": 300,
    "plan.deterministic": "true", "plan.replicas": 1, "plan.data.seq_len": 64, "plan.data.batch_size": 4,
    "curate.validation_bytes": 2000, "curate.test_bytes": 2000, "curate.near_duplicates": '"keep"',
}  # fmt: skip
MODEL = "diffuse-code/pretrain"


def run(folder: Path, **more: object) -> str:
    options = [word for name, value in {**TINY, **more}.items() for word in ("--set", f"{name}={value}")]
    return succeed(folder, "run", "diffuse-code", *options).output


def test_diffuse_code_trains_samples_and_fills_a_gap(tmp_path: Path) -> None:
    write_code(tmp_path / "code")
    shown = run(tmp_path)
    assert "validation at most" in shown and "perplexity" not in shown
    for options in ((), ("--steps", 1, "--reveal", "entropy")):
        done = succeed(tmp_path, "sample", MODEL, "def work", "-n", 9, "--seed", 1, *options)
        assert done.stdout.startswith("def work") and "9 tokens" in done.stderr
    assert "blocks of 4" in refuse(tmp_path, "sample", MODEL, "def", "-n", 4, "--suffix", "return")
    for words in (("export", MODEL, "out"), ("eval", MODEL, "--suite", "own")):
        assert "is a masked diffusion model" in refuse(tmp_path, *words)
    run(tmp_path, **{"pretrain.block": "null"})
    done = succeed(tmp_path, "sample", MODEL, "def", "-n", 4, "--suffix", " return total", "--seed", 1)
    assert done.stdout.startswith("def") and done.stdout.endswith(" return total\n")


def test_settings_of_another_objective_and_causal_networks_are_refused(tmp_path: Path) -> None:
    write_code(tmp_path / "code")
    model = 'plan.model={d_model=32, n_layers=1, mlp_hidden=32, mixers={m={kind="mamba"}}}'
    planned = {n: v for n, v in TINY.items() if n not in ("plan.d_model", "plan.n_layers")}
    for settings, change, words in (
        (TINY, "pretrain.objective=next_token", "block (4) belongs to objective = 'masked'"),
        (planned, model, "mixer 'm' is 'mamba', which is causal; use 'heads'"),
    ):
        options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        assert words in refuse(tmp_path, "run", "diffuse-code", *options, "--set", change)
