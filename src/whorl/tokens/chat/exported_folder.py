"""Completes the tokenizer files of an exported folder, so that `transformers` encodes, chats and stops as Whorl does.

- `tokenizer.json` of a tokenizer of Whorl gets the post-processor that puts <|bos|> before a text, as `encode_prompt` does.
- The chat template is written where it is missing: a model of Whorl may have a built-in one, or only the Jinja file.
- `eos_token_id` gets every id that ends a text or a turn.

A transcript is not written: it is only a way to prompt a base model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whorl.store.files import load_json
from whorl.tokens.chat.template import ChatTemplate, load_chat_template
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.template_source import read_template
from whorl.tokens.tokenizer import BOS, TOKENIZER_FILE, Tokenizer


def complete_exported_folder(folder: Path) -> ChatTemplate | None:
    """Complete the files of a folder with a model and a copy of its tokenizer; return the chat template.

    None without a tokenizer; then nothing is written.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    chat = load_chat_template(folder, load_tokenizer(folder))
    if isinstance(chat.tokenizer, Tokenizer):
        _update(folder / TOKENIZER_FILE, post_processor=_bos_processor(chat.tokenizer.bos_id))
        # Without this, transformers 4 also gives token_type_ids, which `generate` refuses.
        _update(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    if chat.is_trained and (isinstance(chat.tokenizer, Tokenizer) or read_template(folder)[0] is None):
        (folder / "chat_template.jinja").write_text(chat.source, encoding="utf-8")
        _update(folder / "tokenizer_config.json", chat_template=chat.source)  # for older programs
    ends = [*dict.fromkeys((*chat.tokenizer.end_ids, *sorted(chat.stop_ids)))]
    for name in ("generation_config.json", "config.json") if ends else ():
        _update(folder / name, eos_token_id=ends if len(ends) > 1 else ends[0])
    return chat


def _update(file: Path, **fields: Any) -> None:
    data = load_json(file) if file.is_file() else {}
    file.write_text(json.dumps({**data, **fields}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _bos_processor(bos_id: int) -> dict[str, Any]:
    """Return the step of `tokenizers` that puts <|bos|> before a text, and once before a pair."""
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, second],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos_id], "tokens": [BOS]}},
    }
