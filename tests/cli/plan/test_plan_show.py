"""`whorl plan`: what it prints, and its errors."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whorl.cli import build_app


def plan(*words: str) -> str:
    result = CliRunner().invoke(build_app(), ["plan", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_show_accepts_names_shapes_and_config_files(tmp_path: Path) -> None:
    named = json.loads(plan("show", "openai-community/GPT2", "--json"))
    assert named["parameters"]["total"] == 124_439_808
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50_257}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    assert json.loads(plan("show", str(tmp_path), "--json"))["parameters"] == named["parameters"]
    assert "60,164,376" in plan("show", "2x384/8192")


def test_unknown_models_and_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    for words, text in ((("gpt3",), "did you mean 'gpt2'"), ((str(tmp_path),), "did you mean 'llama'")):
        result = CliRunner().invoke(build_app(), ["plan", "show", *words])
        assert result.exit_code == 2 and text in result.output + str(result.stderr)


def test_show_prints_costs_and_writes_the_roofline(tmp_path: Path) -> None:
    page = tmp_path / "roofline.html"
    text = plan("show", "llama-3-8b", "--device", "h100x8", "--page", str(page))
    assert "8,030,261,248 parameters" in text and "0: 128.48, 1: 44.17, 2: 30.11, 3: 16.06" in text
    drawn = page.read_text()
    assert "NVIDIA H100 SXM5 80 GB, bf16" in drawn and "mlp.up" in drawn and 'class="dot third"' in drawn


def test_show_draws_what_this_machine_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["whorl.cli.plan.show"], "_measured", lambda *_: [(2.0, 3e9), (8.0, 9e9)])
    page = tmp_path / "roofline.html"
    plan("show", "2x64/512", "--device", "here", "--dtype", "fp32", "--context", "64", "--page", str(page))
    assert "measured" in page.read_text() and 'class="dot fifth"' in page.read_text()


def test_show_takes_recipes_with_a_model_or_a_plan(tmp_path: Path) -> None:
    assert json.loads(plan("show", "llama", "--json"))["parameters"]["total"] > 10**6
    result = CliRunner().invoke(build_app(), ["plan", "show", "quickstart", "--store", str(tmp_path)])
    assert result.exit_code == 2 and "whorl run quickstart --until plan" in result.output + str(result.stderr)


def test_missing_peaks_and_unknown_devices_are_refused() -> None:
    for words, text in (
        (("--device", "a100", "--dtype", "fp8_e4m3"), "device a100 has no peak for fp8_e4m3"),
        (("--device", "h10"), "did you mean 'h100'"),
        (("--dtype", "bf15"), "did you mean 'bf16'"),
    ):
        result = CliRunner().invoke(build_app(), ["plan", "show", "gpt2", *words])
        assert result.exit_code == 2 and text in result.output + str(result.stderr)


def test_fit_lists_layouts_with_time_bytes_and_refusals() -> None:
    words = ("6x384/8192", "--device", "a100x4", "--batch", "8", "--context", "64")
    found = json.loads(plan("fit", *words, "--json"))
    fits = [one for one in found if not one["refused"]]
    assert fits and fits == sorted(fits, key=lambda one: one["seconds"])
    assert all(one["memory_bytes"] > 0 and one["sent_bytes"] > 0 for one in fits)
    text = plan("fit", *words)
    assert f"{len(fits)} of {len(found)} layouts fit 8 x 64 tokens" in text and "dp=4" in text
    assert "refused, 1: tp = 4 does not divide 6" in text
    assert "too little memory" in plan(
        "fit", "llama-3-8b", "--device", "l4", "--batch", "1", "--context", "64"
    )
