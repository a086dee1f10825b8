"""The choice of a step's kernels: what is timed, and when nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.train.tiny import job

from whorl.errors import ConfigError
from whorl.machine.kernel_choice import force_choices
from whorl.nn.cpu import attention, cross_entropy, linear, mlp
from whorl.train.lm import kernels
from whorl.train.lm.build import build_model
from whorl.train.lm.kernels import Kernels, choose_kernels


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the timed choices; the last candidate is chosen without a call."""
    names: list[str] = []

    def last(name: str, candidates: dict[str, object], **_: object) -> str:
        names.append(name)
        return list(candidates)[-1]

    for module in (
        "attention.causal",
        "cpu.cross_entropy",
        "cpu.linear",
        "cpu.mlp",
        "cpu.update",
    ):
        monkeypatch.setattr(f"whorl.nn.{module}.fastest", last)
    monkeypatch.setattr(kernels, "fastest", last)
    monkeypatch.setattr(attention, "_chosen", {})
    monkeypatch.setattr(cross_entropy, "_chosen", {})
    monkeypatch.setattr(linear, "_chosen", {})
    monkeypatch.setattr(mlp, "_chosen", {})
    return names


@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_job_times_its_shapes(timed: list[str], dtype: str, short: str) -> None:
    wanted = job(Path("unused"), dtype=dtype, batch_size=8, micro_batch_size=2)
    model = build_model(wanted)
    chosen = choose_kernels(model, wanted, always=True)
    mixer = model.layer_mixers()[0]
    vocabulary, width = model.head_weight.shape
    assert timed[0] == f"attention 2x{mixer.n_heads}x32x{mixer.head_dim} {short}"
    expected = ["attention", "mlp", "linear", "cross_entropy", "head", "update", "adamw"]
    assert list(dict.fromkeys(name.split()[0] for name in timed)) == expected
    assert f"linear 64x{mixer.n_heads * mixer.head_dim}x{width} {short}" in timed
    assert timed[1] == f"mlp 64x{width}x{wanted.model.mlp_hidden} {short}"
    assert any(name.startswith(f"head 64x{width}x{vocabulary} {short}") for name in timed)
    assert chosen.chunk_tokens and chosen.fused_adamw is True


def test_forced_fused_adamw_is_not_timed(timed: list[str]) -> None:
    wanted = job(Path("unused"), dtype="bfloat16", optim={"fused": False})
    assert choose_kernels(build_model(wanted), wanted, always=True).fused_adamw is False
    assert not any(name.startswith("adamw") for name in timed)


def test_fp16_job_times_nothing(timed: list[str]) -> None:
    wanted = job(Path("unused"), dtype="float16")
    assert choose_kernels(build_model(wanted), wanted, always=True) == Kernels() and not timed


def test_short_job_times_nothing_unless_forced(timed: list[str]) -> None:
    wanted = job(Path("unused"))
    model = build_model(wanted)
    assert choose_kernels(model, wanted) == Kernels() and not timed
    assert choose_kernels(model, wanted.model_copy(update={"steps": 10**6})).chunk_tokens and timed
    timed.clear()
    with force_choices({"update": "native"}):
        assert choose_kernels(model, wanted).native_update and timed


def test_job_leaves_no_choice_to_the_next_one() -> None:
    wanted, q = job(Path("unused")), torch.zeros(4, 2, 32, 32)
    for again in (False, True):
        attention.select((4, 2, 32, 32), torch.float32, True)
        assert attention.is_chosen(q, q, q)
        choose_kernels(build_model(wanted), wanted, always=again)
        assert not attention.is_chosen(q, q, q)


def test_fp16_job_refuses_forced_kernels() -> None:
    wanted = job(Path("unused"), dtype="float16")
    with force_choices({"mlp": "native"}), pytest.raises(ConfigError, match=r"mlp(.|\n)*float16 on cpu"):
        choose_kernels(build_model(wanted), wanted)


def test_deterministic_mode_takes_the_defaults() -> None:
    wanted = job(Path("unused"), dtype="bfloat16")
    model = build_model(wanted)
    torch.use_deterministic_algorithms(True)
    try:
        chosen = choose_kernels(model, wanted, always=True)
    finally:
        torch.use_deterministic_algorithms(False)
    default = max(128, (1 << 20) // len(model.head_weight))
    assert chosen == Kernels(default, False, False)
