"""Functions that are never compiled, networks without values, and processes that do not import the compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import decoder_config, transformer_config
from tests.support.train.model_shapes import EXPERTS
from torch import Tensor

from whorl.models import make_model, save_model
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.nn.compiler import cache_folder, compiled, eager_only, meta_device

LOAD = """
import sys
from pathlib import Path
from whorl.models import load_model
load_model(Path(sys.argv[1]))
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
ENCODER = EncoderConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=2, mlp_hidden=32, max_length=12)
MAKES = {
    "decoder": lambda: make_model(decoder_config()),
    "transformer": lambda: make_model(transformer_config()),
    "experts": lambda: make_model(transformer_config(experts=EXPERTS)),
    "encoder": lambda: Encoder(ENCODER),
}


@pytest.mark.parametrize("mark", [eager_only, torch.compiler.disable], ids=["ours", "torch"])
def test_marked_function_breaks_graph_and_is_not_traced(mark: Any) -> None:
    """Both marks leave x + 1 and - 1 to the compiler, and neither the function nor what it calls."""
    from torch._dynamo.testing import CompileCounter

    traced: list[bool] = []

    def helper(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x * 2

    class Layer:
        @mark
        def double(self, x: Tensor) -> Tensor:
            traced.append(torch.compiler.is_compiling())
            return helper(x)

    layer, counter = Layer(), CompileCounter()
    run = torch.compile(lambda x: layer.double(x + 1) - 1, backend=counter)
    x = torch.arange(4.0)
    assert torch.equal(run(x), (x + 1) * 2 - 1)
    assert traced == [False, False] and counter.frame_count == 2


@pytest.mark.parametrize("name", MAKES)
def test_meta_network_has_shapes_and_types_of_a_drawn_one(name: str) -> None:
    drawn = MAKES[name]()
    state = torch.random.get_rng_state()
    with meta_device():
        empty = MAKES[name]()
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(t.is_meta for t in empty.parameters())
    shapes = [{n: (t.shape, t.dtype) for n, t in each.state_dict().items()} for each in (drawn, empty)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["tiny_decoder", "tiny_transformer"])
def test_load_imports_no_compiler(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    save_model(request.getfixturevalue(name), tmp_path)
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


COMPILE = """
import sys, torch
import torch._functorch.config, torch._inductor.config
from torch._dynamo.utils import counters
from whorl.nn import compiler

configs = (torch._functorch.config, torch._inductor.config, torch.compiler.config)
before = [config.save_config() for config in configs]

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FACTOR

for number, FACTOR in enumerate(map(float, sys.argv[1:])):
    if number == 3:
        compiler.code_digest = lambda: "edited"
    x = torch.ones(4, requires_grad=True)
    out = compiler.compiled(lambda x: Scaled.apply(x).sum())(x)
    written = [*compiler.cache_folder().rglob("*.main.cpp")]
    out.backward()
    assert written == [*compiler.cache_folder().rglob("*.main.cpp")], "the first backward pass compiles"
    print(x.grad[0].item())
assert before == [config.save_config() for config in configs], "settings stay"
print(*(counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("miss", "hit")))
"""


def test_kernels_are_kept_but_another_backward_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lasting cache serves what is compiled again. Its key covers the backward of autograd functions, and our code.

    Torch's settings are as before.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    command = [sys.executable, "-c", COMPILE, "2", "2", "3", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2.0", "2.0", "3.0", "2.0", "3 1"]
    assert [*cache_folder().rglob("*.cpp")] and cache_folder().is_relative_to(tmp_path)


def test_failing_compiler_warns_and_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx
    from torch._inductor.exc import CppCompileError, InductorError

    def fails(graph: Any, inputs: Any) -> Any:
        output = "header.hpp:1:\ng++: error: unrecognized option '-std=c++20'\n"
        raise InductorError(CppCompileError(["g++"], output), None)

    monkeypatch.setattr(compile_fx, "compile_fx", fails)
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(
        RuntimeWarning, match=r"runs uncompiled, .*: g\+\+: error: unrecognized option '-std=c\+\+20'"
    ):
        y = compiled(lambda x: (x * x).sum())(x)
    y.backward()
    assert y.item() == 3.0 and torch.equal(x.grad, 2 * x)
