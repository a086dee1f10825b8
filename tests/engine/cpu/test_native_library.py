"""The native library: its products, with and without newer instructions, and its build."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.compiler import needs_compiler
from tests.support.engine.cpu import BOUNDS, SHAPES, Texts, llama

from whorl.engine.cpu import NativeStep, build, layout, unsupported_reason
from whorl.engine.cpu.runner import make_runner
from whorl.engine.cpu.summary import row_summary
from whorl.engine.model.runner import ModelRunner
from whorl.errors import ConfigError
from whorl.machine import native_build
from whorl.machine.kernel_choice import force_choices
from whorl.machine.native_build import BuildError
from whorl.nn.linear import Linear
from whorl.nn.mlp import activate
from whorl.nn.quantized_linear import QuantizedLinear

pytestmark = needs_compiler


def _rounded(t: torch.Tensor, kind: str, group: int, weight: bool) -> torch.Tensor:
    """Reference of the kernels' rounding of a matrix: [rows, k] -> [rows, k]."""
    if kind == "float32":
        return t
    if kind == "bfloat16":
        return t.bfloat16().float()
    k = t.shape[1]
    parts = torch.nn.functional.pad(t, (0, -k % group)).view(len(t), -1, group)
    farthest = parts.gather(2, parts.abs().argmax(2, keepdim=True))
    if not weight:
        inverse = 127 / farthest.abs()
        return ((parts * inverse).round() / 127 * farthest.abs()).flatten(1)[:, :k]
    scale = (farthest / -8 if kind == "int4" else farthest.abs() / 127).bfloat16().float()
    low, high = (-8, 7) if kind == "int4" else (-127, 127)
    return ((parts / scale).round().clamp(low, high) * scale).flatten(1)[:, :k]


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 8, 8), (63, 70, 8), (33, 70, 6), (200, 333, 32), (130, 256, 256)]
)
def test_product_matches_rounded_weights(kind: str, n: int, k: int, group: int) -> None:
    check_products(build.library(), kind, n, k, group)


def check_products(library: ctypes.CDLL, kind: str, n: int, k: int, group: int) -> None:
    paired = bool(library.whorl_features() & 2)  # otherwise activations are not rounded to bf16
    g = torch.Generator().manual_seed(n)
    weight = torch.randn(n, k, generator=g)
    matrix = layout.make_matrix(kind, group, n, k)
    arena = layout.Arena(library, [matrix])
    library.whorl_pack(ctypes.byref(matrix), weight.data_ptr(), None, None, 2)
    step = library.whorl_open()
    for m in (1, 2, 5, 6, 7, 31):
        x, y = torch.randn(m, k, generator=g), torch.full((m, n), float("nan"))
        library.whorl_product(step, ctypes.byref(matrix), x.data_ptr(), m, y.data_ptr(), 0, 0.0, 2)
        rows = x if kind == "bfloat16" and not paired else _rounded(x, kind, group, False)
        want = rows.double() @ _rounded(weight, kind, group, True).double().T
        torch.testing.assert_close(y, want.float(), atol=2e-4, rtol=1e-5)
    library.whorl_close(step)
    assert arena.n_bytes > 0


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 8, None), (63, 70, None), (200, 333, 128), (130, 256, 64), (70, 96, 32), (9, 20, 6)]
)  # fmt: skip
def test_tile_products_match_vectors(kind: str, n: int, k: int, group: int | None) -> None:
    """Tile registers, emulated and (with AMX) real, which agree to the bit; integer products agree with vectors' too."""
    check_tiles(build.library(), kind, n, k, group)


def check_tiles(library: ctypes.CDLL, kind: str, n: int, k: int, group: int | None) -> None:
    g = torch.Generator().manual_seed(k)
    weight = torch.randn(n, k, generator=g)
    matrix = layout.make_matrix(kind, group, n, k)
    arena = layout.Arena(library, [matrix])
    library.whorl_pack(ctypes.byref(matrix), weight.data_ptr(), None, None, 2)
    step, bf16_rounds = library.whorl_open(), library.whorl_features() & 2
    for m in (1, 16, 17, 33, 300):
        x, found = torch.randn(m, k, generator=g), {}
        for method in {"vectors", "emulated tiles", *layout.usable_methods(library, kind)}:
            matrix.method, found[method] = layout.METHODS[method], torch.full((m, n), float("nan"))
            library.whorl_product(
                step, ctypes.byref(matrix), x.data_ptr(), m, found[method].data_ptr(), 0, 0.0, 2
            )
        assert torch.equal(found["emulated tiles"], found.get("tiles", found["emulated tiles"]))
        if kind != "bfloat16":
            assert torch.equal(found["emulated tiles"], found["vectors"])
        else:
            want = _rounded(x, kind, 0, False).double() @ _rounded(weight, kind, 0, True).double().T
            torch.testing.assert_close(found["emulated tiles"], want.float(), atol=2e-4, rtol=1e-5)
            if bf16_rounds:
                torch.testing.assert_close(found["vectors"], want.float(), atol=2e-4, rtol=1e-5)
    library.whorl_close(step)
    assert arena.n_bytes > 0


@pytest.mark.parametrize(("m", "n"), [(5000, 3), (1, 64 * 70_000)])
def test_each_piece_of_work_runs_once(m: int, n: int) -> None:
    """Many rows, in pieces of several; more blocks than a phase has pieces."""
    weight, x, y = torch.arange(1.0, n + 1), torch.arange(1.0, m + 1), torch.full((m, n), float("nan"))
    matrix = layout.make_matrix("float32", None, n, 1)
    arena = layout.Arena(build.library(), [matrix])
    build.library().whorl_pack(ctypes.byref(matrix), weight.data_ptr(), None, None, 3)
    step = build.library().whorl_open()
    build.library().whorl_product(step, ctypes.byref(matrix), x.data_ptr(), m, y.data_ptr(), 0, 0.0, 3)
    build.library().whorl_close(step)
    assert torch.equal(y, x[:, None] * weight)
    del arena


def _packed_codes(matrix: layout.Matrix, data: bytes) -> torch.Tensor:
    """The codes [n, k] of a packed matrix, by the layout at the top of packed.h."""
    n_groups, n_blocks = -(-matrix.k // matrix.inputs), -(-matrix.n // 64)
    lines = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(n_blocks, n_groups, -1, 64, 4)
    if matrix.kind == layout.KINDS["int4"]:
        lines = torch.cat([lines & 15, lines >> 4], dim=2).to(torch.int8) - 8
    by_output = lines.view(torch.int8).permute(0, 3, 1, 2, 4).reshape(n_blocks * 64, n_groups, -1)
    return by_output[: matrix.n, :, : matrix.inputs].flatten(1)


@pytest.mark.parametrize("method", ["vectors", "emulated tiles"])
@pytest.mark.parametrize(
    ("kind", "k", "group"),
    [("int8", 75, None), ("int8", 66, 2), ("int8", 70, 14), ("int8", 128, 64), ("int8", 96, 32),
     ("int4", 66, None), ("int4", 66, 2), ("int4", 70, 14), ("int4", 128, 64), ("int4", 384, 128)],
)  # fmt: skip
def test_given_codes_are_packed_unchanged(kind: str, k: int, group: int | None, method: str) -> None:
    """Stored codes to the bit, and their product with rounded rows by fp32 scales, in every grouping of the quantizer."""
    g, n = torch.Generator().manual_seed(k), 70
    layer = Linear(k, n, std=0.1)
    layer.weight.data = torch.randn(n, k, generator=g)
    quantized = QuantizedLinear.from_linear(layer, kind, group)  # type: ignore[arg-type]
    quantized.scales *= (
        torch.rand(quantized.scales.shape, generator=g) - 0.5
    )  # signs, and more bits than bf16 has
    codes, scales = quantized.unpacked_codes.contiguous(), quantized.scales
    matrix = layout.make_matrix(kind, group, n, k, scale_kind="float32")
    matrix.method = layout.METHODS[method]
    arena = layout.Arena(build.library(), [matrix])
    build.library().whorl_pack(ctypes.byref(matrix), None, codes.data_ptr(), scales.data_ptr(), 2)
    assert torch.equal(
        _packed_codes(matrix, ctypes.string_at(matrix.data, matrix.scales - matrix.data)), codes
    )
    step, x, y = build.library().whorl_open(), torch.randn(37, k, generator=g), torch.empty(37, n)
    build.library().whorl_product(step, ctypes.byref(matrix), x.data_ptr(), 37, y.data_ptr(), 0, 0.0, 2)
    build.library().whorl_close(step)
    rows = _rounded(x, kind, group or k, False).double()
    torch.testing.assert_close(y, (rows @ quantized.weight.double().T).float(), atol=2e-5, rtol=1e-5)
    del arena


@pytest.mark.parametrize("size", [2, 3, 64])
def test_activations_match_torch(size: int) -> None:
    """Each activation function over its whole range of inputs."""
    library = build.library()
    x = torch.cat([torch.linspace(-30, 30, 997), torch.tensor([0.0, -100.0, 100.0])])[:, None]
    for name, number in layout.ACTIVATIONS.items():
        gated = name in ("swiglu", "geglu")
        weight = torch.ones(2 * size if gated else size, 1)
        matrix = layout.make_matrix("float32", None, len(weight), 1, gated)
        arena = layout.Arena(library, [matrix])
        library.whorl_pack(ctypes.byref(matrix), weight.data_ptr(), None, None, 1)
        step, y = library.whorl_open(), torch.empty(len(x), size)
        library.whorl_product(step, ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr(), number, 0.0, 1)
        library.whorl_close(step)
        torch.testing.assert_close(y, activate(x @ weight.T, name), atol=2e-5, rtol=2e-6)  # type: ignore[arg-type]
        del arena


def test_structure_sizes_match_library() -> None:
    layout.check_sizes(build.library())


AVX2 = "avx2" in native_build.cpu_description()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("-O0",), id="any CPU"),
        pytest.param(
            ("-O0", "-march=x86-64-v3"),
            id="AVX2",
            marks=pytest.mark.skipif(not AVX2, reason="the CPU has no AVX2"),
        ),
    ],
)
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library for any CPU of this family, and without AVX-512."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native_build, "ARCH_FLAGS", (request.param,))
        library = build.load_library(tmp_path_factory.mktemp("portable"))
    assert library.whorl_features() == 0
    return library


@pytest.mark.xdist_group("portable library")  # one worker compiles it
@pytest.mark.parametrize("kind", BOUNDS)
def test_portable_product_matches_rounded_weights(kind: str, portable: ctypes.CDLL) -> None:
    check_products(portable, kind, 130, 70, 32)
    if kind != "float32":
        check_tiles(portable, kind, 130, 70, 64)


@pytest.mark.xdist_group("portable library")
def test_portable_step_matches_forward(portable: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: portable)
    for shape in ("plain", "head_dim 20", "smear, norm"):
        model = llama(**SHAPES[shape])
        for dtype in (torch.float32, torch.int8):
            texts = Texts(model, 16, [1, 3, 33, 70], dtype=dtype)
            assert texts.compare(NativeStep(model, 16, threads=2), most=60, decode_from=25) < 1e-4


def test_missing_compiler_warns_and_torch_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no-such-compiler"):
            assert unsupported_reason(llama()) == "the native library could not be built"
        with force_choices({"engine_step": "torch"}):
            assert type(make_runner(llama(), {None: 4}, 16, 2, 64)) is ModelRunner
        with (
            force_choices({"engine_step": "native, vectors, 1 threads"}),
            pytest.raises(ConfigError, match=r"impossible here: the native library could not be(.|\n)*torch"),
        ):
            make_runner(llama(), {None: 4}, 16, 2, 64)
        with pytest.raises(ConfigError, match="int8"):
            make_runner(llama(), {None: 4}, 16, 2, 64, weight_dtype="int8")
    finally:
        build.library.cache_clear()


def test_failing_compiler_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'it is broken' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(BuildError, match="it is broken"):
        build.load_library(tmp_path / "kept")
    assert [p.suffix for p in (tmp_path / "kept").iterdir()] == [".lock"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1, 15, 64, 1000, 8192])
def test_summary_of_logits_matches_numpy(size: int, threads: int) -> None:
    summarize = row_summary(NativeStep(llama(), 16, threads=threads) if threads > 1 else None)
    assert summarize is not None
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(size)).mul(30).numpy()
    logits[1] = 2.0  # all are equal
    logits[2] = -np.inf
    logits[3, size // 2] = np.nan
    logits[4, size // 3] = np.inf
    logits[5, 1:] = -np.inf
    logits[6, size // 2] = logits[6, size - 1] = 1e3
    found, log_sums = summarize(logits)
    assert found.tolist() == logits.argmax(axis=1).tolist()
    want = torch.from_numpy(logits).double().logsumexp(-1)
    finite = [row for row in range(9) if row not in (2, 3, 4)]
    np.testing.assert_allclose(log_sums[finite], want[finite], rtol=2e-6, atol=2e-6)
    assert not np.isfinite(log_sums[[2, 3, 4]]).any()
    transposed = np.asfortranarray(logits)
    assert summarize(transposed)[0].tolist() == found.tolist()
