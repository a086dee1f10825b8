"""`whorl gen`: generative models of pictures and of densities in the plane.

    whorl gen methods                     which methods there are; with a name, its settings
    whorl gen train ddpm digits           train, and measure the samples
    whorl gen sample MODEL --out grid.png
    whorl gen compare MODEL MODEL         one table and page: distances, likelihoods, time

`docs/generative.md` explains each method by its difference from another.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from whorl.cli.options import RefArgument, SetOption, StoreOption

CLASSIFIER = """uses = "image_classifier"  # that of `recipes/classify-digits.toml` in fewer steps
network = { kind = "resnet", widths = [24, 48], depths = [1, 1] }
steps = 300
lr = 4e-3
max_shift = 1
threads = 1
"""


def train(
    method: Annotated[str, typer.Argument(help="A name of `whorl gen methods`.")],
    data: Annotated[
        str,
        typer.Argument(
            help="digits, glyphs, shapes, scenes, 8-gaussians, 25-gaussians, ring, checkerboard, or a folder of pictures."
        ),
    ],
    steps: Annotated[int | None, typer.Option(min=1, help="Steps; default: the method's.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and noise.")] = 0,
    changes: SetOption = None,
    store: StoreOption = None,
) -> None:
    """Train a generative model, and measure its samples against held-out data and against the noise of that comparison.

    Start with flow: it is as simple as ddpm and needs fewer steps of sampling. The result is the artifact gen/METHOD-DATA,
    with a page of samples and measures. The run can be interrupted at any moment; the same command continues it.

    Examples:

        whorl gen train flow 8-gaussians

        whorl gen train ddpm digits --steps 8000 --set prediction=eps

        whorl gen train flow photos --set patch=4
    """
    from whorl.errors import ConfigError
    from whorl.recipes import parse_recipe, run_recipe
    from whorl.recipes.steps.generative import GenerativeStepConfig
    from whorl.store import Store
    from whorl.tracking.progress import Progress

    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{method}-{Path(data).name}")
    text, sets = _recipe(name, data), [f"{name}.method={json.dumps(method)}", f"{name}.seed={seed}"]
    if steps is not None:
        sets.append(f"{name}.settings.steps={steps}")
    for change in changes or ():
        if "=" not in change:
            raise ConfigError(f"--set {change}: not a setting", expected="--set FIELD=VALUE")
        sets.append(f"{name}.settings.{change}")
    recipe = parse_recipe(text, "whorl gen train", sets=sets)
    config = recipe.steps[name].config
    assert isinstance(config, GenerativeStepConfig)
    config.generative()  # raises for impossible settings before a store is made
    progress = Progress()
    artifact = run_recipe(recipe, Store(store), progress).artifacts[name]
    progress.log(f"page:   {artifact.file('page.html')}")
    if artifact.summary["measures"]:
        progress.log(f"next:   whorl gen sample {name}")


def _recipe(name: str, data: str) -> str:
    """Return the recipe of a model of `data`: a density, or images with a classifier where there are classes."""
    from whorl.errors import ConfigError, one_of
    from whorl.generative.densities import DENSITIES
    from whorl.vision.config import NATIVE_SIZE

    made = [source for source in NATIVE_SIZE if source != "files"]
    if data in DENSITIES:
        return f'name = "gen"\n[steps.{name}]\nuses = "generative"\ndensity = "{data}"\n'
    if data in made:
        source = f'source = "{data}"'
    elif Path(data).exists():
        source = f"path = {json.dumps(data)}"
    else:
        expected = one_of(data, [*made, *DENSITIES])
        raise ConfigError(f"there is no data {data!r}", expected=f"{expected}; or a folder of pictures")
    images = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(data).name)
    text = f'name = "gen"\n[steps.{images}]\nuses = "images"\n{source}\n'
    parents = f'images = "{images}"'
    if data in made and data != "scenes":
        text += f'[steps.{data}-classifier]\n{CLASSIFIER}parents = ["{data}"]\n'
        parents += f', classifier = "{data}-classifier"'
    return text + f'[steps.{name}]\nuses = "generative"\nparents = {{ {parents} }}\n'


def sample(
    artifact: RefArgument,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of samples.")] = 64,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the sampler; default: the method's.")
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="ancestral, ddim or heun.")] = None,
    label: Annotated[str | None, typer.Option(help="Draw this class, by name; default: all.")] = None,
    guidance: Annotated[float, typer.Option(help="Strength of the class; 1 for none.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Decode this picture: ae, vae, vqvae or pix2pix.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the PNG.")] = Path("samples.png"),
    store: StoreOption = None,
) -> None:
    """Draw samples of a generative model as a picture: a grid of pictures, or a histogram of the plane.

    With --picture, it has what the model is given on the left and what it decodes on the right.

    Examples:

        whorl gen sample flow-digits --label 7 --guidance 2

        whorl gen sample ddpm-8-gaussians -n 20000 --steps 50 --sampler ddim --out histogram.png

        whorl gen sample pix2pix-shapes --picture square.png --out completed.png
    """
    import time

    from whorl.cli.images import read_files
    from whorl.errors import ConfigError
    from whorl.generative.pictures import write_png
    from whorl.generative.saved_model import decode_pictures, draw_picture
    from whorl.store import Store

    found, began = Store(store).open(artifact), time.monotonic()
    if picture is None:
        drawn = draw_picture(
            found, n, steps=steps, sampler=sampler, label=label, guidance=guidance, seed=seed
        )
    elif (steps, sampler, label, guidance) != (None, None, None, 1):
        raise ConfigError("--picture takes no --steps, --sampler, --label or --guidance", do="leave them out")
    else:
        drawn, n = decode_pictures(found, lambda shape: read_files([picture], shape)[1]), 1
    write_png(out, drawn)
    print(f"wrote {out}: {n:,} sample{'s' * (n > 1)} in {time.monotonic() - began:.1f} s")


def compare(
    artifacts: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Names or addresses of models, from `whorl ls`.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the page.")] = Path("compare.html"),
    store: StoreOption = None,
) -> None:
    """Compare generative models of the same data: distances, also those of real data; likelihoods, time.

    The figures are those measured after training. A bound is marked.

    Examples:

        whorl gen compare flow-digits ddpm-digits

        whorl gen compare flow-8-gaussians gan-8-gaussians --out page.html
    """
    from whorl.cli.text_table import print_table
    from whorl.errors import ConfigError
    from whorl.generative.saved_model import draw_picture, read_measures
    from whorl.report import render
    from whorl.report.generative import comparison_page, comparison_table
    from whorl.store import Store

    found = [Store(store).open(ref) for ref in artifacts]
    saved = [read_measures(artifact) for artifact in found]
    for artifact, other in zip(found, saved, strict=True):
        if not other.measures:
            raise ConfigError(f"{artifact.name} draws no samples", expected="models that draw samples")
        if other.fingerprint != saved[0].fingerprint:
            raise ConfigError(
                f"{artifact.name} is a model of {other.data}, and {found[0].name} of {saved[0].data}",
                expected="models of the same data",
            )
    names = [artifact.name.rpartition("/")[2] for artifact in found]
    if len({*names}) < len(names):
        names = [f"{name} {artifact.address[:6]}" for name, artifact in zip(names, found, strict=True)]
    models = dict(zip(names, saved, strict=True))
    n = 20_000 if len(saved[0].shape) == 1 else 64
    pictures = {name: draw_picture(artifact, n) for name, artifact in zip(names, found, strict=True)}
    table = comparison_table(models)
    print(f"{table.title}. {table.note}")
    heads = [column.name for column in table.columns]
    print_table(heads, [[*map(str, row)] for row in table.rows], ["Method"])
    print(f"\npage: {render(comparison_page(models, pictures, saved[0].data), out)}")


def methods(
    method: Annotated[str | None, typer.Argument(help="List the settings of this one.")] = None,
) -> None:
    """List the methods; or the settings of one, with their defaults.

    Examples:

        whorl gen methods

        whorl gen methods ddpm
    """
    from whorl.cli.text_table import print_methods, print_settings
    from whorl.generative.methods.registration import METHODS, parse_config

    if method is None:
        print_methods(METHODS)
        return
    parse_config(method, {})  # raises for an unknown name
    print_settings(METHODS[method].Config, ("method", "seed", "run"))
