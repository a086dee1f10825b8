"""Tokenizer files of exported folders: the ids of `transformers` against those of Whorl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.hf_folders import sentences, write_tokenizer

from whorl.tokens.chat import load_chat_template
from whorl.tokens.chat.exported_folder import complete_exported_folder
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
MARKERS = ("<|im_start|>", "<|im_end|>")
TEXTS = [
    "",
    "the red dog",
    " A cat,\n\n  7 houses!\t",
    "naïve “日本語” 👩‍🔬",
    "def f(x):\n    return x + 1\n",
]
USER, REPLY = {"role": "user", "content": "Who sees\nthe tree?"}, {"role": "assistant", "content": "The cat."}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, REPLY, USER],
    [USER, REPLY],
]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "é", "parameters": PARAMETERS}}]
CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": {"text": "tree"}}}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def folder_with(tokenizer: Tokenizer, folder: Path) -> Any:
    """Write a folder as an export does, complete it, and return the tokenizer of `transformers`."""
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": tokenizer.eos_id}))
    complete_exported_folder(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_texts_and_conversations_have_whorls_ids(tmp_path: Path) -> None:
    ours = Tokenizer.train(sentences(50), 400, special_tokens=MARKERS, workers=1)
    hf = folder_with(ours, tmp_path)
    for text in TEXTS:
        assert hf(text).input_ids == ours.encode_prompt(text)
        assert hf.decode(hf(text).input_ids, skip_special_tokens=True) == text
    assert hf("a", "b").input_ids == [ours.bos_id, *ours.encode_to_list("a"), *ours.encode_to_list("b")]
    chat = load_chat_template(tmp_path, load_tokenizer(tmp_path))
    assert (hf.bos_token_id, hf.eos_token_id, hf.pad_token_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    for ask in (True, False):
        options: dict[str, Any] = {"add_generation_prompt": ask}
        for messages in CONVERSATIONS:
            found = hf.apply_chat_template(messages, return_dict=False, **options)
            assert found == chat.encode_prompt(messages, **options) and found[0] == ours.bos_id
        for messages in ([SYSTEM, USER], CALLED):
            found = hf.apply_chat_template(messages, tools=TOOLS, return_dict=False, **options)
            assert found == chat.encode_prompt(messages, TOOLS, **options)
    ends = [ours.eos_id, ours.special_token_ids[MARKERS[1]]]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == ends
    assert set(ends) == set(chat.stop_ids) and chat.kind == "model"
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert written == (tmp_path / "chat_template.jinja").read_text() == chat.source
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    complete_exported_folder(tmp_path)  # twice is the same
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_base_model_gets_no_chat_template(tmp_path: Path) -> None:
    ours = Tokenizer.train(sentences(50), 400, workers=1)
    hf = folder_with(ours, tmp_path)
    assert hf.chat_template is None and hf("the dog").input_ids == ours.encode_prompt("the dog")
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == ours.eos_id


def test_imported_tokenizer_keeps_its_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "gpt2", sentences(50))
    before = (tmp_path / "tokenizer.json").read_bytes()
    chat = complete_exported_folder(tmp_path)
    assert chat is not None and chat.kind == "transcript"
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    assert complete_exported_folder(tmp_path / "nothing") is None
