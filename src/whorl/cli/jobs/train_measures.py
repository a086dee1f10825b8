"""`whorl corpus train-classifier`, `train-perplexity` and `train-importance`: models of measures, from named samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="File that the model is written to.")]
Field = Annotated[str, typer.Option(help="The text's field in each record.")]


def train_classifier(
    model: Model,
    positive: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Samples of the class that texts are scored for; may be repeated."),
    ],
    negative: Annotated[
        list[str], typer.Option(metavar="FILE", help="Samples of the other class; may be repeated.")
    ],
    field: Field = "text",
    held_out: Annotated[
        float, typer.Option(help="Fraction of each class that is tested and not trained on.")
    ] = 0.2,
    l2: Annotated[
        float, typer.Option(help="Penalty on the weights; a larger one suits fewer samples.")
    ] = 1e-5,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the texts that are held out.")] = 0,
) -> None:
    """Train a classifier of texts on samples of two classes, and print how well it separates held-out ones.

    Samples are records of JSONL, Parquet, Arrow or tar files; patterns and URLs are allowed. The classifier is a logistic
    regression over words and pairs of words. As a measure named quality, it gives the query the column quality_probability.

    Examples:

        whorl corpus train-classifier quality.safetensors --positive good.jsonl --negative bad.jsonl

        whorl corpus filter --set 'measures=[{name="quality", measure="classifier", model="quality.safetensors"}]'
    """
    from whorl.corpus.measures.trained.classifier import train_classifier as train

    found = train(positive, negative, model, field=field, l2=l2, held_out=held_out, seed=seed)
    both = f", {found['in_both']:,} in both classes are left out" if found["in_both"] else ""
    print(f"{model}: {found['positive']:,} positive and {found['negative']:,} negative texts{both}")
    test = found["held_out"]
    print(
        f"on {test['texts']:,} held-out texts: accuracy {test['accuracy']:.3f}, AUC {test['auc']:.3f}, "
        f"log loss {test['log_loss']:.3f} nats"
    )


def train_perplexity(
    model: Model,
    samples: Annotated[
        list[str], typer.Option(metavar="FILE", help="Texts of the target kind; may be repeated.")
    ],
    field: Field = "text",
    order: Annotated[int, typer.Option(min=1, max=6, help="Words of the longest n-gram.")] = 3,
    min_count: Annotated[
        int, typer.Option(min=1, help="Rarer n-grams of two and more words are pruned.")
    ] = 2,
    max_words: Annotated[
        int, typer.Option(min=1, help="Words that are read at most; each needs about 85 bytes of memory.")
    ] = 10_000_000,
) -> None:
    """Train an n-gram model of words with modified Kneser-Ney smoothing, for the perplexity of texts.

    Samples are records of JSONL, Parquet, Arrow or tar files; patterns and URLs are allowed. As a measure named wiki, it
    gives the query the column wiki_perplexity: low for texts like the samples.

    Examples:

        whorl corpus train-perplexity encyclopedia.safetensors --samples wikipedia.jsonl

        whorl corpus filter --set 'measures=[{name="wiki", measure="perplexity", model="encyclopedia.safetensors"}]'
    """
    from whorl.corpus.measures.trained.perplexity import train_perplexity as train

    found = train(samples, model, field=field, order=order, min_count=min_count, max_words=max_words)
    print(f"{model}: {found['n_grams']:,} n-grams of {found['words']:,} words in {found['texts']:,} texts")
    if left := found["texts_left_out"]:
        print(f"{left:,} texts were not read; --max-words {2 * max_words} would read more")


def train_importance(
    model: Model,
    target: Annotated[
        list[str], typer.Option(metavar="FILE", help="Texts of the target distribution; may be repeated.")
    ],
    raw: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="A sample of the corpus to select from; may be repeated."),
    ],
    field: Field = "text",
) -> None:
    """Estimate importance weights of texts over hashed n-grams (DSIR), to select texts like a target.

    As a measure named dsir, it gives the query the columns dsir_log_weight and dsir_resampling_score. The documents with
    the highest scores are a sample without replacement in proportion to the weights.

    Examples:

        whorl corpus train-importance dsir.safetensors --target good.jsonl --raw 'crawl/*.jsonl'

        whorl corpus filter --set 'measures=[{name="dsir", measure="importance", model="dsir.safetensors"}]'
    """
    from whorl.corpus.measures.trained.importance import train_importance as train

    found = train(target, raw, model, field=field)
    print(
        f"{model}: {found['target']:,} target and {found['raw']:,} raw texts, "
        f"divergence {found['divergence']:.3f} nats per n-gram"
    )
