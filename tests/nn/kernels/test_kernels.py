"""The Triton kernels: their cases in the interpreter, the real compiler without a GPU, and who chooses.

Triton looks for TRITON_INTERPRET when it is first imported, and an interpreted Triton cannot compile; so the cases in
`cases_*.py` run in processes of their own, one a file.
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
from whorl.nn.attention import Mask, attend
from whorl.nn.kernels import autotune as choice

CASES = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTEST_", "WHORL_KERNELS"))}
    return subprocess.run(
        [sys.executable, *arguments], env=kept | variables, capture_output=True, text=True, timeout=500
    )


@needs_triton
@pytest.mark.parametrize("name", ["cases_attention", "cases_rows"])
def test_in_the_interpreter(name: str) -> None:
    options = ("-x", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header")
    done = run("-m", "pytest", *options, str(CASES / f"{name}.py"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
@pytest.mark.parametrize("capability", ["80", "90"])
def test_compiles_for_gpus_and_fits_their_shared_memory(capability: str, tmp_path: Path) -> None:
    done = run(str(CASES / "compile_offline.py"), capability, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@needs_triton
def test_the_benchmark_is_whole() -> None:
    done = run(
        str(Path(__file__).parents[3] / "bench" / "nn" / "gpu_kernels.py"), "--check", TRITON_INTERPRET="1"
    )
    assert done.returncode == 0 and done.stdout.count("agrees") == 8, done.stdout + done.stderr


def test_import_brings_neither_triton_nor_the_compiler() -> None:
    look = "import sys, whorl.nn, whorl.objectives; sys.exit('triton' in sys.modules or 'torch._dynamo' in sys.modules)"
    assert run("-c", look).returncode == 0


def test_without_triton_everything_can_be_imported_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('none here')")
    script = (
        "import torch\n"
        "from whorl.errors import ConfigError\n"
        "from whorl.nn.kernels import attention, cross_entropy, rotary\n"
        "from whorl.nn.kernels.rms_norm import rms_norm\n"
        "from whorl.nn.kernels.softmax import softmax\n"
        "for f in (softmax, rms_norm):\n"
        "    try: f(torch.zeros(2, 3))\n"
        "    except ConfigError as error: assert 'pip install triton' in str(error)\n"
        "    else: raise AssertionError(f)\n"
    )
    paths = [str(tmp_path), *sys.path]
    done = run("-c", script, PYTHONPATH=os.pathsep.join(p for p in paths if p))
    assert done.returncode == 0, done.stderr


def test_on_a_cpu_the_backend_is_refused_and_auto_never_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> bool:
        raise AssertionError("asked on a CPU")

    monkeypatch.setattr(choice, "is_correct_and_faster", never)
    monkeypatch.setenv(choice.ENV_VAR, "triton")
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert attend(q, q, q, Mask()).shape == q.shape
    assert not choice.use_kernel("x", q, never, never)
    monkeypatch.setenv(choice.ENV_VAR, "fastest")
    with pytest.raises(ConfigError, match="WHORL_KERNELS is 'fastest'"):
        choice.kernel_mode()
    with pytest.raises(ConfigError, match="Triton"):
        attend(q, q, q, Mask(), backend="triton")


def test_who_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's part is played by a namespace; the clock is ours."""
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

    def ask(kind: str) -> bool:
        return choice.use_kernel(kind, x, list, list)

    monkeypatch.delenv(choice.ENV_VAR, raising=False)
    assert [ask("fast"), ask("slow"), ask("fast"), ask("slow")] == [True, False, True, False]
    assert len(measured) == 2  # each kind once
    assert sorted(choice.kernel_choices().values()) == ["torch", "triton"]
    with torch.no_grad():  # what training chose holds; nothing new is timed
        assert ask("fast") and not ask("fast, new")
    capturing[0] = True
    assert ask("fast") and not ask("fast, new")
    capturing[0] = False
    assert len(measured) == 2 and ask("fast, new")
    for asked, want in (("triton", True), ("torch", False)):
        monkeypatch.setenv(choice.ENV_VAR, asked)
        assert ask("fast") is ask("slow") is want
    monkeypatch.setenv(choice.ENV_VAR, "auto")
    torch.use_deterministic_algorithms(True)  # a clock may not decide about bits
    try:
        assert not ask("fast")
        monkeypatch.setenv(choice.ENV_VAR, "triton")
        assert ask("fast")
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv(choice.ENV_VAR, "auto")
    monkeypatch.setattr(choice, "triton_installed", lambda: False)
    assert not ask("fast")
    assert len(measured) == 3


def test_a_kernel_has_to_be_right_then_faster() -> None:
    right, nearly, wrong = [torch.ones(3)], [torch.ones(3) * 1.001], [torch.ones(3) * 1.1]

    def wins(kernel: Callable[[], list[Tensor]], ours: float, theirs: float) -> bool:
        return choice.is_correct_and_faster(
            "a sum", kernel, lambda: right, lambda work: ours if work is kernel else theirs
        )

    assert wins(lambda: nearly, 1.0, 1.2)
    assert not wins(lambda: nearly, 1.0, 1.02)  # a tie is no reason
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
def test_on_a_gpu() -> None:
    """The contenders of the benchmark, held against each other at a real size: what no interpreter can show."""
    done = run(str(Path(__file__).parents[3] / "bench" / "nn" / "gpu_kernels.py"), "--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
