"""Number formats against torch."""

import pytest
import torch

from whorl.errors import ConfigError
from whorl.plan.accounting.number_formats import FORMATS, number_format

FLOATS = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@pytest.mark.parametrize(("name", "dtype"), FLOATS.items())
def test_range_and_spacing_equal_torch_finfo(name: str, dtype: str) -> None:
    own, theirs = FORMATS[name], torch.finfo(getattr(torch, dtype))
    assert (own.max, own.smallest_normal, own.spacing) == (theirs.max, theirs.smallest_normal, theirs.eps)
    assert own.bits == theirs.bits


def test_integers_and_tf32_by_their_definition() -> None:
    assert FORMATS["int8"].max == torch.iinfo(torch.int8).max and FORMATS["int4"].max == 7
    tf32, fp32 = FORMATS["tf32"], FORMATS["fp32"]
    assert tf32.spacing == FORMATS["fp16"].spacing and tf32.smallest_normal == fp32.smallest_normal
    assert tf32.bits == fp32.bits == 8 * FORMATS["int4"].bits and tf32.max < fp32.max


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="bf15") as error:
        number_format("bf15")
    assert "'bf16'" in str(error.value)
