"""The optimizer's passes in C++ against torch's."""

from __future__ import annotations

import pytest
import torch
from tests.support.compiler import needs_compiler
from tests.support.nn.cpu import VARIANTS, build_variant, dtype_of
from torch import Tensor

from whorl.machine.kernel_choice import FORCE
from whorl.nn.cpu import orthogonalize as native_orthogonalize
from whorl.nn.cpu import update
from whorl.train.optim.clipping import squared_norm, sum_replicas
from whorl.train.optim.optimizers import POLAR_EXPRESS, Muon, SparseAdagrad, orthogonalize, own_rows

pytestmark = needs_compiler


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("replicas", [2, 3])
def test_sum_and_norm_match_torch(replicas: int) -> None:
    gradients = {"a": randn(replicas, 70, 65), "b": randn(replicas, 3), "other": randn(replicas, 2)}
    native, plain = ({n: torch.full_like(gradients[n][0], torch.nan) for n in "ab"} for _ in range(2))
    square = sum_replicas(gradients, native, True)
    assert sum_replicas(gradients, plain, False) is None
    for name, value in plain.items():
        torch.testing.assert_close(native[name], value, rtol=0, atol=1e-6)
    assert square == pytest.approx(squared_norm(list(plain.values())), rel=1e-6)
    assert sum_replicas(gradients, {}, True) == 0.0


@pytest.mark.parametrize(
    ("decay", "dtype"), [(0.0, torch.bfloat16), (0.1, torch.bfloat16), (0.1, torch.float32)]
)
def test_native_muon_matches_torch(decay: float, dtype: torch.dtype) -> None:
    """Wide, tall and square matrices, most of odd sizes, in two groups that take turns."""
    shapes = {"wide": (33, 70), "tall": (70, 33), "square": (40, 40), "large": (96, 64)}
    starts = {n: randn(*shape, seed=len(n)) for n, shape in shapes.items()}
    found: dict[bool, dict[str, Tensor]] = {}
    for native in (False, True):
        weights = {n: t.clone() for n, t in starts.items()}
        groups = [[(n, weights[n]) for n in turn] for turn in (("wide", "tall"), ("square", "large"))]
        muon = Muon(groups, 0.05, weight_decay=decay, dtype=dtype, native=native)
        assert muon.native == native
        for step in range(4):
            muon.step({n: randn(*shape, seed=step) for n, shape in shapes.items()}, 0.7)
        found[native] = weights | muon.state
    for name, want in found[False].items():
        change = want - starts[name] if name in starts else want
        difference = float((found[True][name] - want).norm() / change.norm())
        bound = 0.02 if dtype == torch.bfloat16 else 1e-4  # directions are rounded
        assert difference < (bound if name in starts else 1e-6), name


def test_fp16_muon_has_no_native_passes() -> None:
    assert not Muon([[("a", torch.zeros(4, 4))]], 0.1, dtype=torch.float16, native=True).native


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("shape", "threads"), [((3, 32, 96), 2), ((1, 64, 64), 1), ((2, 96, 160), 1)])
def test_native_orthogonalization_matches_torch(
    variant: str, shape: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_variant("orthogonalize", variant)
    monkeypatch.setattr(native_orthogonalize, "product_library", lambda *_: library)
    x, dtype = randn(*shape), dtype_of(variant)
    want = orthogonalize(x.clone())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = native_orthogonalize.orthogonalize_(x.to(dtype, copy=True), POLAR_EXPRESS).float()
    finally:
        torch.set_num_threads(before)
    by_torch = orthogonalize(x.to(dtype, copy=True)).float()
    margin = 1e-3 if dtype == torch.bfloat16 else 1e-5
    assert float((found - want).norm()) < 1.5 * float((by_torch - want).norm()) + margin * float(want.norm())


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_native_row_adagrad_matches_torch(replicas: int) -> None:
    tables = {native: torch.zeros(11, 6) for native in (False, True)}
    rules = {native: SparseAdagrad([("t", table)], 0.1) for native, table in tables.items()}
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        rows = [torch.randint(0, 11, (n,), generator=g) for n in (9, 0, 5)[:replicas]]
        gradients = [torch.randn(len(each), 6, generator=g) for each in rows]
        for rank in range(replicas):
            ids, values = own_rows(rows, gradients, rank)
            rules[False].step("t", tables[False], ids, values / 4.0, 0.5)
            rules[True].step_native("t", tables[True], rows, gradients, rank, 4.0, 0.5)
    torch.testing.assert_close(tables[True], tables[False], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(rules[True].state["t/square"], rules[False].state["t/square"])
    assert tables[False].abs().sum() > 0


def test_update_is_torch_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE, "update=native")
    assert update.choose_update(8, 8, torch.float32)
    monkeypatch.delenv(FORCE)
    torch.use_deterministic_algorithms(True)
    try:
        assert not update.choose_update(8, 8, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
