"""The chat format of a model that learns from conversations: its own template, else ChatML.

A base model has no template, and its vocabulary often no token that ends a turn. Then the vocabulary gets the markers
<|im_start|> and <|im_end|>, and the folder a ChatML template, so that sampling, server and exports use what was trained. The
new rows of embedding and head begin as copies: <|im_start|> of the token that begins a text, <|im_end|> of the one that ends
it. So the end of a turn has the probability of the end of a text from the first step on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from whorl.align.stage.io import copy_text_files
from whorl.errors import DataError
from whorl.models import LanguageModel
from whorl.models.serialization import make_model
from whorl.tokens.chat import load_chat_template
from whorl.tokens.chat.builtin_templates import CHATML, IM_END, IM_START
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.token_encoder import TokenEncoder

MARKERS = (IM_START, IM_END)


def chat_files(folder: Path, out: Path) -> Path:
    """Return a folder with the tokenizer and template to train conversations with: `folder`, or `out`, which is written.

    Raises:
        DataError: the template writes markers that are no tokens, or the tokenizer has no token that ends a text.
    """
    tokenizer = load_tokenizer(folder)
    chat = load_chat_template(folder, tokenizer)
    if chat.kind == "model":
        if missing := chat.unknown_markers():
            raise DataError(
                f"the chat template of {folder} writes {missing[0]}, which is no token of its tokenizer",
                expected="a tokenizer with the markers of the template",
                do="copy the tokenizer's files of the same model, or remove the template: ChatML takes its place",
            )
        return folder
    if not tokenizer.end_ids:
        raise DataError(f"the tokenizer of {folder} has no end-of-text token", do="choose another model")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    copy_text_files(folder, out)
    path = out / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    added = content["added_tokens"]
    ids = {entry["content"]: entry["id"] for entry in added}
    n_ids = 1 + max([*content["model"]["vocab"].values(), *ids.values()])
    for text in MARKERS:
        if text not in ids:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            ids[text], n_ids = n_ids, n_ids + 1
            added.append({"id": ids[text], "content": text, **flags, "special": True})
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (out / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    generation = out / "generation_config.json"
    kept = json.loads(generation.read_text()) if generation.is_file() else {}
    ends = [*dict.fromkeys((*tokenizer.end_ids, ids[IM_END]))]
    generation.write_text(json.dumps({**kept, "eos_token_id": ends}, indent=1) + "\n")
    return out


@torch.no_grad()
def with_chat_rows(model: LanguageModel, files: Path, folder: Path) -> LanguageModel:
    """Return the model of `folder` with rows for the markers of `files` (`chat_files`) that its vocabulary lacks."""
    before, after = load_tokenizer(folder), TokenEncoder.load(files)
    known = after.chat.special_ids
    copies = {
        known[text]: source
        for text, source in zip(MARKERS, (after.prefix_id, before.end_ids[0]), strict=True)
        if known[text] >= before.vocab_size
    }
    return with_rows(model, copies) if copies else model


def with_rows(model: LanguageModel, copies: Mapping[int, int]) -> LanguageModel:
    """Return the model with a row for each id of `copies`, equal to that of another id: id -> id to copy."""
    size = max(model.config.vocab_size, 1 + max(copies))
    state = model.state_dict()
    for name in ("embedding", "head"):
        if name in state:
            table = state[name]
            wider = table.mean(0, keepdim=True).repeat(size, 1)
            wider[: len(table)] = table
            for new, source in copies.items():
                wider[new] = table[source]
            state[name] = wider
    if size > model.config.vocab_size:
        config = model.config.model_copy(update={"vocab_size": size})
        device = next(model.parameters()).device
        model = make_model(config, torch.Generator(), model.dtype).to(device).train(model.training)
    model.load_state_dict(state)
    return model
