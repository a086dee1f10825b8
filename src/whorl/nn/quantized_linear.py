"""Quantized weights: storage formats, their meaning, and a `Linear` that multiplies with them.

    w[o, i] ~ codes[o, i] * scales[o, g],      g = i // group_size: a scale per row, or per group of a row's columns

    int8   codes -127 .. 127, scale = max |w| / 127
    int4   codes -8 .. 7, scale = -(the number farthest from 0, with its sign) / 8, so all 16 codes are used. Two codes per
           byte, the earlier column in the low half, each as code + 8 (0 .. 15)
    fp8    E4M3, scale = max |w| / 448 (`nn/float8.py`)

Quantization is symmetric (no zero point): trained weights are centered at 0, and integer products need no correction.

Weight-only: the weights are dequantized to the type of x, which saves memory and memory traffic. Dynamic: activations
are quantized too, with one scale per row of x (Dettmers et al. 2022, arXiv:2208.07339, section 2.1, vector-wise):

    y[n, o] = x_scale[n] * scales[o] * sum over i of x_code[n, i] codes[o, i]

This requires one scale per row of weights. The subtle part is that the fastest product depends on the machine, the
shape and the rows of x. `QuantizedLinear` times the kernels that apply at the first call of each kind and keeps the
fastest (`KERNELS`; a name in `kernel` forces one). Tests compare each with `dequantize`. The fp8 product follows the
documentation and has NOT been run on a GPU.

Shapes: weight [out, in]; codes [out, in], of int4 [out, in / 2] uint8; scales [out, groups] fp32; x [..., in] -> [..., out].
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError, one_of
from whorl.nn import float8
from whorl.nn.linear import Linear
from whorl.nn.ngram import NGramEmbedding, ngram_bucket_ids

WeightFormat = Literal["int8", "int4", "fp8"]
FORMATS = ("int8", "int4", "fp8")
CODE_MIN = {"int8": -127, "int4": -8}
CODE_MAX = {"int8": 127, "int4": 7}
MIN_SCALE = 1e-30  # smallest scale


def check_group(d_in: int, group_size: int | None, kind: str, name: str = "weight") -> None:
    """Raise ConfigError unless `group_size` divides a row of `d_in`, and is even for int4."""
    if kind not in FORMATS:
        raise ConfigError(f"the format of {name} is {kind!r}", expected=one_of(kind, FORMATS))
    if group_size is not None and (group_size < 1 or d_in % group_size):
        fitting = [g for g in (32, 64, 128) if d_in % g == 0]
        raise ConfigError(
            f"group {group_size} does not divide the {d_in} columns of {name}",
            expected="a divisor" + (f", as {', '.join(map(str, fitting))}" if fitting else ""),
        )
    if kind == "int4" and (d_in if group_size is None else group_size) % 2:
        raise ConfigError(
            f"{name} has groups of {group_size or d_in} columns",
            expected="an even number: int4 packs two codes per byte",
        )


def split_groups(t: Tensor, groups: int) -> Tensor:
    """Return weight [out, in] as [out, groups, in / groups]."""
    return t.reshape(t.shape[0], groups, t.shape[1] // groups)


def compute_scales(weight: Tensor, kind: WeightFormat, group_size: int | None = None) -> Tensor:
    """Return the smallest scales without clipping, [out, groups] fp32, none of them 0. weight: [out, in]."""
    check_group(weight.shape[1], group_size, kind)
    w = split_groups(weight.float(), weight.shape[1] // (group_size or weight.shape[1]))
    if kind == "int4":
        extreme = w.gather(2, w.abs().argmax(2, keepdim=True)).squeeze(2)
        scale = extreme / CODE_MIN["int4"]
    else:
        scale = w.abs().amax(2) / (
            CODE_MAX["int8"] if kind == "int8" else torch.finfo(float8.FORWARD_DTYPE).max
        )
    return torch.where(scale.abs() < MIN_SCALE, torch.ones_like(scale), scale)


def encode(weight: Tensor, scales: Tensor, kind: WeightFormat) -> Tensor:
    """Return the nearest codes, [out, in] int8 (fp8: float8). weight: [out, in]; scales: [out, groups]."""
    ratio = (split_groups(weight.float(), scales.shape[1]) / scales[:, :, None]).flatten(1)
    if kind == "fp8":
        top = torch.finfo(float8.FORWARD_DTYPE).max
        return ratio.clamp(-top, top).to(float8.FORWARD_DTYPE)
    return ratio.round().clamp(CODE_MIN[kind], CODE_MAX[kind]).to(torch.int8)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weights [out, in] fp32 of codes [out, in], not packed, and scales [out, groups]."""
    return (split_groups(codes.float(), scales.shape[1]) * scales[:, :, None]).flatten(1)


def pack_int4(codes: Tensor) -> Tensor:
    """Return int4 codes [out, in] in -8 .. 7 as [out, in / 2] uint8, each as code + 8, the earlier column low."""
    pairs = (codes.to(torch.int16) + 8).view(len(codes), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return [out, in] int8 in -8 .. 7 of packed codes [out, in / 2] uint8: the inverse of `pack_int4`."""
    halves = torch.stack([packed & 15, packed >> 4], dim=-1)
    return (halves.to(torch.int8) - 8).flatten(1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [..., d] and scales fp32 [..., 1] of x [..., d]: each row has the scale of its largest number."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / CODE_MAX["int8"]).clamp(min=MIN_SCALE)
    return (x / scale).round_().clamp_(CODE_MIN["int8"], CODE_MAX["int8"]).to(torch.int8), scale


class QuantizedLinear(Linear):
    """A `Linear` with quantized weights, for inference only: x [..., in] -> [..., out] in the type of x.

    Attributes:
        codes, scales: as at the top of this file (int4 packed).
        kernel: "auto", or a name in `KERNELS`.

    `weight` returns the dequantized matrix in fp32.

    Raises:
        ConfigError: a group size that does not divide a row; `dynamic` with groups or int4.
    """

    kernel: str = "auto"
    codes: Tensor
    scales: Tensor

    def __init__(
        self, d_in: int, d_out: int, kind: WeightFormat, group_size: int | None = None, *, dynamic: bool = False,
        bias: bool = False,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        check_group(d_in, group_size, kind)
        if dynamic and (group_size is not None or kind == "int4"):
            raise ConfigError(
                f"dynamic, with {kind}" + (f" in groups of {group_size}" if group_size else ""),
                expected="int8 or fp8 with one scale per row: integer sums have one scale",
            )
        self.d_in, self.d_out, self.kind, self.group_size, self.dynamic = (
            d_in,
            d_out,
            kind,
            group_size,
            dynamic,
        )
        kept = {"int8": torch.int8, "int4": torch.uint8, "fp8": float8.FORWARD_DTYPE}[kind]
        self.register_buffer("codes", torch.zeros(d_out, d_in // (2 if kind == "int4" else 1), dtype=kept))
        self.register_buffer("scales", torch.ones(d_out, d_in // (group_size or d_in)))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        self._packed: tuple[object, Tensor, Tensor] | None = None

    @classmethod
    def from_linear(
        cls, linear: Linear, kind: WeightFormat, group_size: int | None = None, *, dynamic: bool = False,
        codes: Tensor | None = None, scales: Tensor | None = None,
    ) -> QuantizedLinear:  # fmt: skip
        """Return `linear` quantized: rounded to nearest, or with the given `codes` [out, in] and `scales`."""
        weight = linear.weight.detach()
        layer = cls(
            weight.shape[1], weight.shape[0], kind, group_size, dynamic=dynamic, bias=linear.bias is not None
        )
        scales = compute_scales(weight, kind, group_size) if scales is None else scales
        codes = encode(weight, scales, kind) if codes is None else codes
        layer.codes, layer.scales = pack_int4(codes) if kind == "int4" else codes, scales
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        return layer.to(weight.device)

    @property
    def unpacked_codes(self) -> Tensor:
        """Return the codes [out, in], not packed."""
        return unpack_int4(self.codes) if self.kind == "int4" else self.codes

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the dequantized weights [out, in], fp32."""
        return dequantize(self.unpacked_codes, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.d_in)
        name = self.kernel if self.kernel != "auto" else _fastest_kernel(self, flat)
        y = KERNELS[name].run(self, flat).view(*x.shape[:-1], self.d_out)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def torch_int4_operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return codes and scales in the layout of torch's int4 product; cached until the codes are replaced."""
        if self._packed is None or self._packed[0] is not self.codes:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                self.unpacked_codes.to(torch.int32) + 8, 1
            )
            pairs = torch.stack([self.scales, torch.zeros_like(self.scales)], dim=-1)  # scale and zero point
            self._packed = self.codes, packed, pairs.transpose(0, 1).contiguous().to(dtype)
        return self._packed[1], self._packed[2]

    def extra_repr(self) -> str:
        how = f", groups of {self.group_size}" if self.group_size else ""
        return f"{self.d_in} -> {self.d_out}, {self.kind}{how}{', dynamic' if self.dynamic else ''}"


class MatmulKernel(NamedTuple):
    """One implementation of the product. x: [n, in], not empty -> [n, out] in the type of x, without the bias."""

    fits: Callable[[QuantizedLinear, Tensor], bool]
    run: Callable[[QuantizedLinear, Tensor], Tensor]


def _dequantized_matmul(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """Return the product by the definition. For a dynamic layer it sums the integers in fp64, which is exact."""
    if not layer.dynamic:
        return F.linear(x, layer.weight.to(x.dtype))
    if layer.kind == "fp8":
        codes, scale = quantize_rows_float8(x)
        return (F.linear(codes.float(), layer.codes.float()) * scale * layer.scales[:, 0]).to(x.dtype)
    codes, scale = quantize_rows(x)
    sums = F.linear(codes.double(), layer.codes.double()).float()
    return (sums * scale * layer.scales[:, 0]).to(x.dtype)


def _torch_packed_matmul(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """Return torch's product of bf16 rows with int8 or int4 weights, which does not dequantize the matrix."""
    if layer.kind == "int8":
        return torch._weight_int8pack_mm(x, layer.codes, layer.scales[:, 0].to(x.dtype))
    packed, pairs = layer.torch_int4_operands(x.dtype)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, layer.group_size or layer.d_in, pairs)
    return y


def _int8_matmul(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """Return the product by torch's integer instructions (VNNI, AMX, or a GPU's)."""
    codes, scale = quantize_rows(x)
    sums = torch._int_mm(codes, layer.codes.t())
    return (sums.float() * scale * layer.scales[:, 0]).to(x.dtype)


def _float8_matmul(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """Return a GPU's fp8 product, with a scale per row of both operands. Not run on a GPU yet."""
    codes, scale = quantize_rows_float8(x)
    y: Tensor = torch._scaled_mm(
        codes, layer.codes.t(), scale_a=scale, scale_b=layer.scales.t().contiguous(), out_dtype=torch.bfloat16
    )
    return y.to(x.dtype)


def quantize_rows_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, d] as E4M3 [n, d] and scales fp32 [n, 1]."""
    top = torch.finfo(float8.FORWARD_DTYPE).max
    scale = (x.float().abs().amax(-1, keepdim=True) / top).clamp(min=MIN_SCALE)
    return (x.float() / scale).clamp(-top, top).to(float8.FORWARD_DTYPE), scale


def _fits_torch(layer: QuantizedLinear, x: Tensor) -> bool:
    if layer.dynamic or x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return False  # in fp32, torch runs these products as a plain loop, hundreds of times slower
    if layer.codes.data_ptr() % 64 or layer.d_in % 32:
        return False  # where torch's kernel crashes, or reads past the end of a row
    if layer.kind == "int8":
        return layer.group_size is None
    return layer.kind == "int4" and layer.group_size in (32, 64, 128, 256) and layer.d_out % 32 == 0


def _fits_integers(layer: QuantizedLinear, x: Tensor) -> bool:
    if not layer.dynamic or layer.kind != "int8":
        return False
    return not x.is_cuda or (x.shape[0] > 16 and layer.d_in % 8 == 0 and layer.d_out % 8 == 0)


def _fits_float8(layer: QuantizedLinear, x: Tensor) -> bool:
    return (
        layer.dynamic
        and layer.kind == "fp8"
        and float8.is_native(x)
        and not (layer.d_in % 16 or layer.d_out % 16)
    )


KERNELS: dict[str, MatmulKernel] = {
    "dequantize": MatmulKernel(lambda layer, x: True, _dequantized_matmul),
    "torch": MatmulKernel(_fits_torch, _torch_packed_matmul),
    "int8": MatmulKernel(_fits_integers, _int8_matmul),
    "float8": MatmulKernel(_fits_float8, _float8_matmul),
}
_kernel_cache: dict[tuple[object, ...], str] = {}


def _fastest_kernel(layer: QuantizedLinear, x: Tensor) -> str:
    """Return the fastest kernel for this number of rows (to the next power of 2), timed at the first call and cached."""
    if not len(x):
        return "dequantize"
    fitting = [name for name, kernel in KERNELS.items() if kernel.fits(layer, x)]
    if len(fitting) == 1 or torch.are_deterministic_algorithms_enabled():  # timing must not decide
        return fitting[0]
    rows = min(len(x) - 1, 255).bit_length()
    key = (
        layer.kind, layer.group_size, layer.dynamic, layer.d_in, layer.d_out, x.dtype, x.device, rows,
        torch.get_num_threads(), *fitting,
    )  # fmt: skip
    if key not in _kernel_cache:
        seconds = dict.fromkeys(fitting, float("inf"))
        for _ in range(4):  # the first call builds cached operands
            for name in fitting:
                began = time.perf_counter()
                KERNELS[name].run(layer, x)
                seconds[name] = min(seconds[name], time.perf_counter() - began)
        _kernel_cache[key] = min(seconds, key=lambda name: seconds[name])
    return _kernel_cache[key]


class QuantizedNGramEmbedding(nn.Module):
    """An `NGramEmbedding` with int8 tables and a scale per row: a lookup reads a quarter of the bytes."""

    def __init__(self, orders: tuple[int, ...], buckets: int, d: int) -> None:
        super().__init__()
        self.orders, self.buckets = orders, buckets
        for order in orders:
            self.register_buffer(f"codes_{order}", torch.zeros(buckets, d, dtype=torch.int8))
            self.register_buffer(f"scales_{order}", torch.ones(buckets, 1))

    @classmethod
    def from_embedding(cls, embedding: NGramEmbedding) -> QuantizedNGramEmbedding:
        """Return `embedding` quantized, each row with the scale of its largest number."""
        quantized = cls(embedding.orders, embedding.buckets, embedding.tables[0].shape[1])
        for order, table in zip(embedding.orders, embedding.tables, strict=True):
            codes, scales = quantize_rows(table.detach())
            setattr(quantized, f"codes_{order}", codes)
            setattr(quantized, f"scales_{order}", scales)
        return quantized

    def forward(
        self, ids: Tensor, segments: Tensor | None = None, prefix_ids: Tensor | None = None
    ) -> Tensor:
        """Return the embeddings as `NGramEmbedding` does: ids [B, T] -> [B, T, d] fp32."""
        total: Tensor | None = None
        for order, rows in zip(
            self.orders, ngram_bucket_ids(ids, self.orders, self.buckets, segments, prefix_ids), strict=True
        ):
            part = F.embedding(rows, getattr(self, f"codes_{order}")) * F.embedding(
                rows, getattr(self, f"scales_{order}")
            )
            total = part if total is None else total + part
        assert total is not None
        return total
