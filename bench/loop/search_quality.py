"""Quality of search: the first sentence of a docstring, removed from its function, finds the function.

    python -m venv ENV && ENV/bin/pip install bm25s
    python bench/loop/search_quality.py --peer bm25s=ENV/bin/python [--steps 800]

Documents are the functions of this interpreter's standard library whose first sentences are unique. The title is the dotted
name. Queries are the sentences of one fifth of them, in five splits; the index has all functions. The measure is MRR@10.

1. text: within 0.01 of `bm25s` (Lucene's BM25, k1 1.2, b 0.75) on the same tokens (those of the title twice);
2. split identifiers and stems: at least 1.1 times tantivy's default analysis and parser;
3. one wrong letter in each word of five or more letters keeps 0.8 of the MRR;
4. hybrid: above text and above vectors, with a paired bootstrap interval of 95 % that excludes zero. The embedder of a split
   is an artifact of the step `embedder`. It is trained on the functions of the other splits with their sentences, and on
   those of this one without, 300 characters of each, with `words`: it reads the words of the index's analysis.

Documents are cut into passages, and these are embedded, as `whorl watch` does; `bm25s` gets the same passages.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tantivy

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._peers import environment, interpreters
from bench._run import claim, parse, sized

from whorl.embedding.embedder import Embedder
from whorl.loop.search.passages import cut
from whorl.loop.search.settings import SearchSettings
from whorl.recipes import parse_recipe, run_recipe
from whorl.search.analysis import Analysis
from whorl.search.documents import Encode, Passage, SearchDocument, SearchQuery
from whorl.search.index import Index, open_index
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

SPLITS, QUERIES, K = 5, sized(600, 40), 10
HEAD = 300
ANALYSIS = Analysis()
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
RECIPE = """
name = "functions"
[steps.ingest]
sources = ["{folder}"]
include = ["*.jsonl"]
[steps.curate]
parents = ["ingest"]
validation_bytes = 20000
max_held_out_fraction = 0.3
[steps.tokenizer]
parents = ["ingest", "curate"]
vocab_size = {vocab_size}
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
[steps.embedder]
parents = ["tokens", "tokenizer"]
steps = {steps}
batch_size = {batch}
min_span = 6
words = true
evaluations = 1
threads = 1
"""
PEER = """
import bm25s, json, sys
given = json.load(sys.stdin)
index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
index.index(given["documents"], show_progress=False)
known = set(word for document in given["documents"] for word in document)
found = []
for query in given["queries"]:
    words = [word for word in query if word in known]
    found.append(index.retrieve([words], k=given["k"], show_progress=False)[0][0].tolist() if words else [])
json.dump(found, sys.stdout)
"""


class Function(NamedTuple):
    """text: its source without the sentence."""

    title: str
    text: str
    sentence: str

    def passages(self) -> list[tuple[int, str]]:
        """(start, text) of each."""
        return cut(self.text, SearchSettings.model_fields["passage"].default)


def functions() -> list[Function]:
    """The functions of the standard library, in a fixed order."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), list[Function]()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts):
            try:
                source = path.read_text("utf-8")
                collect(ast.parse(source), source.splitlines(keepends=True), ".".join(parts), found)
            except (SyntaxError, UnicodeDecodeError):
                continue
    seen = Counter(each.sentence for each in found)
    unique = [each for each in found if seen[each.sentence] == 1]
    return random.Random(0).sample(unique, min(len(unique), sized(len(unique), 300)))


def collect(node: ast.AST, lines: Sequence[str], name: str, found: list[Function]) -> None:
    """Append the functions below a node of a file's tree."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            collect(child, lines, name, found)
            continue
        full = f"{name}.{child.name}"
        docstring = None if isinstance(child, ast.ClassDef) else ast.get_docstring(child, clean=False)
        if docstring and len(child.body) > 1:
            sentence = re.split(r"(?<=[.!?])\s|\n\s*\n", docstring.strip())[0]
            text = "".join(lines[child.lineno - 1 : child.end_lineno])
            if sentence in text and len(sentence.split()) > 2:
                found.append(Function(full, text.replace(sentence, "", 1), " ".join(sentence.split())))
        collect(child, lines, full, found)


def with_typos(text: str, rng: random.Random) -> str:
    """Replace one letter of each word with at least five letters."""
    words = text.split()
    for number, word in enumerate(words):
        places = [at for at, c in enumerate(word) if c.isalpha()]
        if len(places) >= 5:
            at = rng.choice(places)
            other = rng.choice([c for c in "abcdefghijklmnopqrstuvwxyz" if c != word[at].lower()])
            words[number] = word[:at] + other + word[at + 1 :]
    return " ".join(words)


def reciprocal_ranks(found: Sequence[Sequence[int]], right: Sequence[int]) -> np.ndarray:
    """1 / rank of the right document of each query, 0 beyond K."""
    return np.array(
        [1 / (list(f).index(r) + 1) if r in f else 0.0 for f, r in zip(found, right, strict=True)]
    )


def searched(index: Index, queries: Sequence[str], mode: str) -> list[list[int]]:
    return [
        [int(hit.id) for hit in index.search(SearchQuery(text, K, mode, marks=False)).hits]  # type: ignore[arg-type]
        for text in queries
    ]


def default_tantivy(documents: Sequence[Function]) -> Callable[[Sequence[str]], list[list[int]]]:
    """tantivy with its default analysis and query parser."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("text")
    builder.add_unsigned_field("number", stored=True)
    index = tantivy.Index(builder.build())
    writer = index.writer(64_000_000, 1)
    for number, each in enumerate(documents):
        writer.add_document(tantivy.Document(text=f"{each.title}\n{each.text}", number=number))
    writer.commit()
    index.reload()
    searcher = index.searcher()

    def search(queries: Sequence[str]) -> list[list[int]]:
        parsed = [index.parse_query_lenient(text, ["text"])[0] for text in queries]
        hits = [searcher.search(query, K).hits for query in parsed]
        return [[searcher.doc(address).get_first("number") for _, address in each] for each in hits]

    return search


def trained(folder: Path, documents: Sequence[Function], held_out: set[int], steps: int) -> Embedder:
    """Train an embedder on the passages of a split. A function of another split begins with its sentence."""
    (folder / "texts").mkdir(parents=True)
    with (folder / "texts" / "functions.jsonl").open("w") as file:
        for number, each in enumerate(documents):
            sentence = "" if number in held_out else f"{each.sentence}\n"
            text = f"{sentence}{each.title}\n{each.text[:HEAD]}"
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")
    text = RECIPE.format(
        folder=folder / "texts", vocab_size=sized(8192, 512), steps=steps, batch=sized(256, 8)
    )  # fmt: skip
    made = run_recipe(
        parse_recipe(text, "functions.toml"), Store(folder / "store"), Progress.silent()
    ).artifacts
    print(made["embedder"].manifest.summary, flush=True)
    return Embedder.load(made["embedder"].path, Tokenizer.load(made["embedder"].path))


def interval(difference: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a mean by bootstrap."""
    rng = np.random.default_rng(0)
    means = rng.choice(difference, (2000, len(difference))).mean(axis=1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
        parser.add_argument("--steps", type=int, default=800, help="of each embedder; 0: text alone")
        parser.add_argument("--splits", type=int, default=SPLITS)

    args = parse(__doc__, arguments, smoke={"steps": 5, "splits": 1})
    documents = functions()
    passages = [(n, *part) for n, each in enumerate(documents) for part in each.passages()]
    owners, titles = [n for n, *_ in passages], [each.title for each in documents]
    tokens = [ANALYSIS.terms(f"{titles[n]}\n{titles[n]}\n{text}") for n, _, text in passages]
    peer = interpreters(args.peer, ("bm25s",), 1).get("bm25s")
    default = default_tantivy(documents)
    measured: dict[str, list[np.ndarray]] = {}
    for split in range(args.splits):
        right = list(range(split, len(documents), SPLITS))[:QUERIES]
        queries = [documents[n].sentence for n in right]
        rng = random.Random(split)
        results = {"tantivy's default": default(queries)}
        if peer:
            sent = {"documents": tokens, "queries": [ANALYSIS.terms(text) for text in queries], "k": 8 * K}
            done = subprocess.run(
                [peer, "-c", PEER], input=json.dumps(sent), capture_output=True, text=True, check=True,
                env=environment(peer, 1),
            )  # fmt: skip
            rows = json.loads(done.stdout)
            results["bm25s"] = [[*dict.fromkeys(owners[row] for row in each)][:K] for each in rows]
        with tempfile.TemporaryDirectory() as place:
            embed: Encode | None = None
            if args.steps:
                held_out = set(range(split, len(documents), SPLITS))
                embed = trained(Path(place), documents, held_out, args.steps).embed
            made = embed([f"{titles[n]}\n{text}" for n, _, text in passages]) if embed else None
            parts = list[list[Passage]]([] for _ in documents)
            for row, (n, start, text) in enumerate(passages):
                parts[n].append(Passage(start, text, {} if made is None else {"e": made[row]}))
            index = open_index(Path(place) / "index", writable=True, encode=embed, encoder="e")
            index.write([SearchDocument(str(n), n, parts[n], title) for n, title in enumerate(titles)])
            results["text"] = searched(index, queries, "text")
            results["typos"] = searched(index, [with_typos(text, rng) for text in queries], "text")
            if embed:
                results |= {mode: searched(index, queries, mode) for mode in ("vectors", "hybrid")}
            index.close()
        for name, found in results.items():
            measured.setdefault(name, []).append(reciprocal_ranks(found, right))
        print(split, {name: round(float(each[-1].mean()), 4) for name, each in measured.items()}, flush=True)
    report(len(documents), {name: np.concatenate(each) for name, each in measured.items()}, measured)


def report(n: int, ranks: dict[str, np.ndarray], splits: dict[str, list[np.ndarray]]) -> None:
    """Print the claims."""
    means = {name: float(each.mean()) for name, each in ranks.items()}
    samples = {name: [round(float(one.mean()), 4) for one in each] for name, each in splits.items()}
    what = f"MRR@10 of {len(ranks['text']):,} first sentences among {n:,} functions"

    def compared(variant: str, ours: str, peer: str, bar: float, ok: bool, note: str = "") -> None:
        claim(
            f"{what}: {ours}{note}", ours=means[ours], peer=means[peer], unit="MRR", ratio=means[ours] / means[peer],
            bar=bar, ok=ok, samples=[samples[ours], samples[peer]], peer_name=peer, variant=variant,
        )  # fmt: skip

    if "bm25s" in means:
        compared("bm25s", "text", "bm25s", 0.99, abs(means["text"] - means["bm25s"]) <= 0.01)
    compared("default", "text", "tantivy's default", 1.1, means["text"] >= 1.1 * means["tantivy's default"])
    compared("typos", "typos", "text", 0.8, means["typos"] >= 0.8 * means["text"])
    if "hybrid" in means:
        for side in ("text", "vectors"):
            low, high = interval(ranks["hybrid"] - ranks[side])
            compared(side, "hybrid", side, 1.0, low > 0, f", difference {low:+.4f} to {high:+.4f}")


if __name__ == "__main__":
    main()
