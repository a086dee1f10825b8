"""Checkerboard artifacts of transposed convolutions, as numbers and as an image.

    python bench/nn/checkerboard.py                     # numbers
    python bench/nn/checkerboard.py --out FOLDER        # and FOLDER/checkerboard.png

A constant input should give a constant output. The printed value is the share of the output's energy that repeats with
the stride (`whorl.nn.convolution.checkerboard`), averaged over layers of random weights, without borders. A second
value has all weights equal, which isolates the effect of overlapping taps.

A constant input favours nearest-neighbour upsampling: on a slope its output has steps of the stride's length, which
bilinear upsampling avoids. The image shows one output channel of each layer in grey, for a constant (upper row) and a
smooth blob (lower row), with titles if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse
from torch import Tensor, nn

from whorl.nn.convolution import ConvTranspose2d, ResizeConv, checkerboard_energy
from whorl.tracking.seeds import generator

CHANNELS, SIZE = 16, 12
LAYERS: dict[str, Callable[[int, torch.Generator], nn.Module]] = {
    "transposed, kernel 3, stride 2": lambda c, g: ConvTranspose2d(c, c, 3, generator=g),
    "transposed, kernel 4, stride 2": lambda c, g: ConvTranspose2d(c, c, 4, generator=g),
    "nearest, then 3 x 3": lambda c, g: ResizeConv(c, c, 3, generator=g),
    "bilinear, then 3 x 3": lambda c, g: ResizeConv(c, c, 3, mode="bilinear", generator=g),
}


def pictures() -> dict[str, list[Tensor]]:
    """By layer: the first output channel [20, 20] for a constant and for a blob, each scaled to 0 to 1, without borders."""
    at = torch.linspace(-2, 2, SIZE)
    blob = torch.exp(-(at[:, None] ** 2 + at**2))
    channels = torch.randn(CHANNELS, 1, 1, generator=generator(0, "checkerboard", "channels"))
    found = {}
    for name, build in LAYERS.items():
        layer = build(CHANNELS, generator(0, "checkerboard", name))
        with torch.no_grad():
            outputs = [layer((image * channels)[None])[0, 0] for image in (torch.ones_like(blob), blob)]
        found[name] = [scaled(y[2:-2, 2:-2]) for y in outputs]
    return found


def scaled(y: Tensor) -> Tensor:
    """Scale to [0, 1]; 1/2 if the values differ by rounding only."""
    spread = y.max() - y.min()
    return torch.full_like(y, 0.5) if spread < 1e-5 * y.abs().max() else (y - y.min()) / spread


def draw(path: Path) -> None:
    """Writes the picture."""
    found = pictures()
    try:
        from matplotlib.figure import Figure
    except ImportError:
        rows = [
            torch.cat([nn.functional.pad(p[i], (1,) * 4, value=1.0) for p in found.values()], 1)
            for i in (0, 1)
        ]
        write_png(path, torch.cat(rows).repeat_interleave(6, 0).repeat_interleave(6, 1))
        return
    figure = Figure(figsize=(3 * len(found), 6.2), layout="constrained")
    axes = figure.subplots(2, len(found))
    for column, (name, both) in enumerate(found.items()):
        axes[0, column].set_title(name, fontsize=10)
        for axis, image in zip(axes[:, column], both, strict=True):
            axis.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
    axes[0, 0].set_ylabel("constant input")
    axes[1, 0].set_ylabel("smooth input")
    figure.savefig(path, dpi=120)


def write_png(path: Path, image: Tensor) -> None:
    """image: [H, W] from 0 to 1, as 8-bit grey (the PNG specification, section 5: header, data, end)."""
    height, width = image.shape
    grey = (image * 255).round().byte().numpy()
    lines = b"".join(b"\0" + row.tobytes() for row in grey)  # each line with filter 0

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder for the picture")
    parser.add_argument("--quick", action="store_true", help="8 draws in place of 64")


def main() -> None:
    a = parse(__doc__, arguments, smoke={"quick": True})
    draws = 8 if a.quick else 64
    rows = []
    print(f"{'':32} random weights   equal weights")
    for name, build in LAYERS.items():
        shares = []
        for draw_number in range(draws):
            rng = generator(draw_number, "checkerboard", name)
            shares.append(checkerboard_energy(build(CHANNELS, rng), CHANNELS, 2, size=SIZE, generator=rng))
        equal = build(1, generator(0, "checkerboard", name))
        for p in equal.parameters():
            nn.init.ones_(p)
        rows.append((name, sum(shares) / draws, checkerboard_energy(equal, 1, 2, size=SIZE)))
        print(f"{name:32} {rows[-1][1]:14.4f} {rows[-1][2]:15.4f}", flush=True)
    if a.out:
        a.out.mkdir(parents=True, exist_ok=True)
        draw(a.out / "checkerboard.png")
        print(f"picture: {a.out / 'checkerboard.png'}")
    three, resized = rows[0][1], max(row[1] for row in rows[2:])
    claim(
        "checkerboard of resize-convolution: share of the output's energy for a constant input", ours=resized, peer=three,
        unit="share", ratio=resized, bar=1e-6, ok=resized <= 1e-6 < three, quick=a.quick, samples=rows,
        peer_name="transposed convolution",
    )  # fmt: skip


if __name__ == "__main__":
    main()
