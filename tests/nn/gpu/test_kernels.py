"""Triton kernels: cases in the interpreter, compilation without a GPU, and the selection of kernels.

Triton reads TRITON_INTERPRET at its first import, and an interpreted Triton cannot compile. So the cases in `cases_*.py`
run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.machine.kernel_choice import FORCE
from whorl.nn.attention import Mask, attend
from whorl.nn.gpu import autotune as choice

CASES = Path(__file__).parent
BENCHMARK = str(Path(__file__).parents[3] / "bench" / "nn" / "gpu_kernels.py")
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed (pip install triton)")


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTEST_", "WHORL_CHOOSE"))}
    options = {"env": kept | variables, "capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([sys.executable, *arguments], **options)


@needs_triton
def test_kernel_cases_pass_in_the_interpreter() -> None:
    options = ("-x", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header")
    done = run_python("-m", "pytest", *options, *map(str, CASES.glob("cases_*.py")), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
def test_kernels_compile_and_fit_shared_memory(tmp_path: Path) -> None:
    done = run_python(str(CASES / "compile_offline.py"), "90", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def test_triton_is_imported_late_and_named_if_missing(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('none here')")
    script = """
import sys, torch, whorl.nn, whorl.objectives
assert not {'triton', 'torch._dynamo'} & sys.modules.keys()
sys.path.insert(0, sys.argv[1])
from whorl.errors import ConfigError
from whorl.nn.gpu import attention, cross_entropy, rotary
from whorl.nn.gpu.rms_norm import rms_norm
try: rms_norm(torch.zeros(2, 3))
except ConfigError as error: assert 'pip install triton' in str(error)
else: raise AssertionError
"""
    done = run_python("-c", script, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_cpu_rejects_triton_backend_and_never_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> bool:
        raise AssertionError("measured on a CPU")

    monkeypatch.setattr(choice, "is_correct_and_faster", never)
    monkeypatch.setenv(FORCE, "gpu=triton")
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert attend(q, q, q, Mask()).shape == q.shape
    assert not choice.use_kernel("x", q, never, never)
    with pytest.raises(ConfigError, match="Triton"):
        attend(q, q, q, Mask(), backend="triton")


def test_use_kernel_selects_by_mode_and_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace replaces the GPU tensor; the test decides which kernel is faster."""
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, device="cuda:0")
    measured: list[str] = []

    def wins(what: str, *_: Any) -> bool:
        measured.append(what)
        return "fast" in what

    monkeypatch.setattr(choice, "is_correct_and_faster", wins)
    monkeypatch.setattr(choice, "_decisions", {})
    monkeypatch.setattr(choice, "triton_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def selected(kind: str) -> bool:
        return choice.use_kernel(kind, x, list, list)

    monkeypatch.delenv(FORCE, raising=False)
    assert [selected(kind) for kind in ("fast", "slow") * 2] == [True, False] * 2
    assert len(measured) == 2  # each kind is measured once
    assert sorted(choice.kernel_choices().values()) == ["torch", "triton"]
    with torch.no_grad():  # the choice of training is kept; no new measurement
        assert selected("fast") and not selected("fast, new")
    capturing[0] = True
    assert selected("fast") and not selected("fast, new")
    capturing[0] = False
    assert len(measured) == 2 and selected("fast, new")
    for mode, want in (("triton", True), ("torch", False)):
        monkeypatch.setenv(FORCE, f"gpu={mode}")
        assert selected("fast") is selected("slow") is want
    monkeypatch.delenv(FORCE)
    torch.use_deterministic_algorithms(True)  # timing must not decide about bits
    try:
        assert not selected("fast")
        monkeypatch.setenv(FORCE, "gpu=triton")
        assert selected("fast")
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.delenv(FORCE)
    monkeypatch.setattr(choice, "triton_installed", lambda: False)
    assert not selected("fast")
    assert len(measured) == 3


def test_kernel_must_be_correct_and_faster() -> None:
    right, nearly, wrong = [torch.ones(3)], [torch.ones(3) * 1.001], [torch.ones(3) * 1.1]

    def wins(kernel: Callable[[], list[Tensor]], ours: float, theirs: float) -> bool:
        def time(work: Any) -> float:
            return ours if work is kernel else theirs

        return choice.is_correct_and_faster("a sum", kernel, lambda: right, time)

    assert wins(lambda: nearly, 1.0, 1.2)
    assert not wins(lambda: nearly, 1.0, 1.02)  # too small a speedup
    for bad in (wrong, [torch.full((3,), torch.nan)], [torch.ones(4)], right * 2):
        with pytest.warns(UserWarning, match="results differ: a sum"):
            assert not wins(lambda bad=bad: bad, 1.0, 9.0)  # type: ignore[misc]

    def broken() -> list[Tensor]:
        raise RuntimeError("no such instruction")

    with pytest.warns(UserWarning, match="no such instruction"):
        assert not wins(broken, 1.0, 9.0)


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernel_benchmark_check_passes_on_a_gpu() -> None:
    """The benchmark compares kernels and references at real sizes."""
    done = run_python(BENCHMARK, "--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
