"""Chat templates: conversations to ids, no injection of special tokens, and the assistant mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import DataError
from whorl.tokens.chat import IM_END, IM_START, ChatTemplate, load_chat_template
from whorl.tokens.tokenizer import BOS, EOS, Tokenizer

BYTES = [bytes([i]) for i in range(256)]
CHATML = Tokenizer([*BYTES, b"<|", b"|>", b"im", b"im_", b"user", b"end"], (IM_START, IM_END, "<<"))
BARE = Tokenizer(BYTES)
CONVERSATION = [
    {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"},
]  # fmt: skip
# A template that trims, searches and splits its input.
FUSSY = r"""{{ bos_token }}{% for m in messages %}
{% if m.role not in ["user", "assistant"] %}{{ raise_exception("no " + m.role) }}{% endif %}
{{ "<|im_start|>" + m.role + "\n" }}{% if "</think>" in m.content %}{{ m.content.split("</think>")[-1] | trim }}
{%- else %}{{ m.content | trim }}{% endif %}{{ "<|im_end|>\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""

SPELLINGS = [IM_START, IM_END, BOS, EOS, "<<", "<|im_", "start|>", "<", "|>", "user", "é", " ", "\n", "<<<"]
spellings = st.lists(st.sampled_from(SPELLINGS), max_size=8).map("".join)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chatml_text_is_exact() -> None:
    text = CHATML.decode(ChatTemplate(CHATML).encode_prompt(CONVERSATION)).decode()
    assert text == (
        f"{BOS}{IM_START}system\nbe kind{IM_END}\n{IM_START}user\nhi{IM_END}\n{IM_START}assistant\nhello{IM_END}\n"
        f"{IM_START}user\nbye{IM_END}\n{IM_START}assistant\n"
    )
    assert ChatTemplate(CHATML).stop_ids == {CHATML.eos_id, CHATML.special_token_ids[IM_END]}


def test_base_model_gets_transcript() -> None:
    template = ChatTemplate(BARE)
    assert not template.is_trained and template.stop_ids == {BARE.eos_id}
    text = BARE.decode(template.encode_prompt(CONVERSATION)).decode()
    assert text == f"{BOS}be kind\n\nUser: hi\n\nAssistant: hello\n\nUser: bye\n\nAssistant:"
    assert b"\n\nUser:" in template.stop


TEMPLATES = (ChatTemplate(CHATML), ChatTemplate(CHATML, FUSSY))


@given(spellings, spellings, spellings)
def test_message_text_never_becomes_special_tokens(user_text: str, system: str, assistant: str) -> None:
    """The special ids equal those of the same conversation with harmless text, and the text is kept."""
    conversation = [
        {"role": "system", "content": system},
        {"role": "user", "content": user_text},
        {"role": "assistant", "content": assistant},
        {"role": "user", "content": user_text, "name": user_text},
    ]
    plain = [{**m, "content": "x"} for m in conversation]
    for template in TEMPLATES:
        if template.source == FUSSY:  # no system message, no tools
            ids, want = template.encode_prompt(conversation[1:], []), template.encode_prompt(plain[1:], [])
        else:
            ids = template.encode_prompt(conversation, [{"name": user_text}])
            want = template.encode_prompt(plain, [{"name": "x"}])
        assert [i for i in ids if i >= CHATML.n_ordinary] == [i for i in want if i >= CHATML.n_ordinary]
        text = CHATML.decode(ids).decode()
        assert all(m["content"].strip() in text for m in conversation[template.source == FUSSY :])


def test_one_character_special_token_is_rejected() -> None:
    with pytest.raises(DataError, match="special token '~'"):
        ChatTemplate(Tokenizer(BYTES, (IM_START, IM_END, "~"))).encode_prompt(user("a ~ b"))


def test_encode_with_mask_covers_assistant_turns() -> None:
    conversation = [*CONVERSATION, {"role": "assistant", "content": f"see you {IM_END}"}]
    template = ChatTemplate(CHATML)
    ids, mask = template.encode_with_mask(conversation)
    assistant = CHATML.decode(i for i, own in zip(ids, mask, strict=True) if own).decode()
    assert assistant == f"hello{IM_END}see you {IM_END}{IM_END}"
    assert ids == template.encode_prompt(conversation, add_generation_prompt=False)
    # Where generation would start, the ids equal those of the prompt: training and sampling see the same ids.
    begin = template.encode_prompt(CONVERSATION)
    assert ids[: len(begin)] == begin and mask[len(begin)] and not mask[len(begin) - 1]


def test_encode_with_mask_rejects_rewriting_template() -> None:
    source = "{% for m in messages %}{{ m.role }}{{ loop.last }}:{{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="message 2"):
        ChatTemplate(CHATML, source).encode_with_mask(CONVERSATION)


@pytest.mark.parametrize(
    "source", ["messages[5].content", "raise_exception('no')", "''.__class__.__mro__ }}{{ x.y", "1 / 0"]
)
def test_template_errors_raise_data_error(source: str) -> None:
    with pytest.raises(DataError, match="rejects these messages"):
        ChatTemplate(CHATML, "{{ " + source + " }}").encode_prompt(CONVERSATION)


def test_load_chat_template_rejects_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be compiled"):
        ChatTemplate(CHATML, "{% for %}")
    for name, text in (("tokenizer_config.json", "{"), ("tokenizer_config.json", '{"chat_template": 3}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="tokenizer_config"):
            load_chat_template(tmp_path, CHATML)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"chat_template\.jinja in UTF-8"):
        load_chat_template(tmp_path, CHATML)


@pytest.mark.parametrize("content", [5, {"text": "a"}])
def test_content_that_is_no_text_is_refused(content: Any) -> None:
    with pytest.raises(DataError, match="message 0 has content of the type"):
        ChatTemplate(CHATML).encode_prompt([{"role": "user", "content": content}])


def test_load_chat_template_finds_model_template(tmp_path: Path) -> None:
    def prompt(template: Any, file: str = "tokenizer_config.json") -> bytes:
        config = {"bos_token": {"content": BOS}, "chat_template": template}
        (tmp_path / file).write_text(json.dumps(config) if file.endswith("json") else template)
        return BARE.decode(load_chat_template(tmp_path, BARE).encode_prompt(CONVERSATION))

    assert load_chat_template(tmp_path, BARE).kind == "transcript"
    written = "{% for m in messages %}{{ m.content }}{% endfor %}"
    contents = b"be kindhihellobye"
    assert prompt("{{ bos_token }}" + written) == BOS.encode() + contents
    assert (
        prompt([{"name": "rag", "template": "b"}, {"name": "default", "template": "c" + written}])
        == b"c" + contents
    )
    generation = "{% generation %}" + written + "{% endgeneration %}"
    assert prompt(generation, "chat_template.jinja") == contents
