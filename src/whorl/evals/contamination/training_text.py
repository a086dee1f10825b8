"""The text of a model's training tokens: all token sets among its ancestors, decoded document by document.

Tokens and not source files are read, because they are the text that the model was trained on: after filters,
deduplication, rewriting and the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whorl.errors import ConfigError
from whorl.evals.suites.held_out import ancestors
from whorl.store import Store
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Tokenizer

TOKENS, TOKENIZER, SPLIT = "tokens", "tokenizer", "train"


@dataclass(frozen=True)
class TrainingText:
    """Token sets with their tokenizers.

    Attributes:
        sets: (name, folder of the token set, folder of the tokenizer).
    """

    sets: Sequence[tuple[str, Path, Path]]

    @property
    def n_documents(self) -> int:
        return sum(TokenSet(folder).split(SPLIT).n_documents for _, folder, _ in self.sets)

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (place, text) of every training document. Raises DataError: a token set is damaged."""
        for name, folder, tokenizer_folder in self.sets:
            tokenizer, split = Tokenizer.load(tokenizer_folder), TokenSet(folder).split(SPLIT)
            paths = split.documents["path"]
            for number, ids in enumerate(split.iter_documents()):
                text = tokenizer.decode(ids, skip_special_tokens=True).decode("utf-8", "replace")
                yield f"{name}: {paths[number].as_py()}", text


def training_text(ref: str, store: Store) -> TrainingText:
    """Return the training text of a model.

    Args:
        ref: an artifact, or a folder that `whorl.train` wrote.

    Raises:
        StoreError: no such artifact. ConfigError: the model has no token set among its ancestors.
    """
    folder = Path(ref)
    if (folder / TOKENS).is_dir():
        return TrainingText([(folder.name, folder / TOKENS, folder)])
    sets = []
    if not folder.is_dir():
        for artifact in ancestors(store, store.open(ref)):
            tokenizer = store.find(artifact.parents.get(TOKENIZER, ""))
            if artifact.kind == TOKENS and tokenizer is not None:
                for each in (artifact, tokenizer):
                    each.check()
                sets.append((artifact.name or artifact.address[:8], artifact.path, tokenizer.path))
    if not sets:
        raise ConfigError(
            f"{ref} has no training tokens among its ancestors, so contamination cannot be searched",
            expected="a model of a recipe, in its store, or a folder of whorl.train",
            do="leave out --contamination",
        )
    return TrainingText(sets)
