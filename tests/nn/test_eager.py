"""Functions that are never compiled."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl.nn.eager import eager_only


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


def test_import_of_models_leaves_compiler_out() -> None:
    code = "import sys, whorl.models; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
