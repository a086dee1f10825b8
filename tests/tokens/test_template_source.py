"""Templates of chats and tasks have a bound on memory, and write what Jinja writes."""

from __future__ import annotations

import tracemalloc

import pytest
from jinja2 import Environment

from whorl.errors import DataError
from whorl.evals.tasks.template import Template
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.template_source import compile_template
from whorl.tokens.tokenizer import Tokenizer

DOUBLES = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}"
BOMBS = [
    '{{ "a" * 4000000000 }}', "{{ [1] * 4000000000 }}", "{{ 10 ** 4000000000 }}", '{{ "a" | center(4000000000) }}',
    '{{ "a".ljust(4000000000) }}', '{{ "%(a)4000000000d" % {"a": 1} }}', '{{ "%4000000000d" | format(1) }}',
    '{{ "{:>{w}}".format("a", w=4000000000) }}', '{{ "{:4000000000}".format(1) }}', "{{ [1] | tojson(indent=4000000000) }}",
    "{{ [1] | batch(4000000000, 1) | list }}", "{{ range(4000000000) | list }}",
    '{% set x = "a" * 9999999 %}{{ x.replace("a", x) }}', '{% set x = "a" * 9999999 %}{{ x | replace("a", x) }}',
    '{% set x = "a" * 9999 %}{{ x.join([x] * 9999) }}', '{% set x = "a" * 9999 %}{{ ([x] * 9999) | join(x) }}',
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{{ 'text' * 1000 }}{% endfor %}{% endfor %}",
    DOUBLES + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    DOUBLES + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLES + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS)
def test_memory_of_a_template_is_bounded(source: str, byte_tokenizer: Tokenizer) -> None:
    chat = ChatTemplate(byte_tokenizer, "{{ messages[0].content }}" + source)
    tracemalloc.start()
    with pytest.raises(DataError, match="rejects these messages"):
        chat.encode_prompt([{"role": "user", "content": "go"}])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500e6


def test_bounded_template_writes_what_jinja_writes() -> None:
    source = """{{ "a" ~ 1 ~ none }} {{ "%s %05d" % ("x", 1700000000) }} {{ "{} {:>4}".format(1700000000, "b") }}
{{ "-" * 9 }} {{ ["a", "b"] | join(", ") }} {{ "x" | indent(4, true) }} {{ ",".join(["a", "b"]) }} {{ [1] + [2] }}
{{ [1, 2, 3] | batch(2) | list }} {{ [] | join }} {{ 2 ** 10 * 3 % 1000 }}
 {{ 1700000000 | tojson }} {{ "a,b".replace(",", ";") }} {{ '{{"a":{}}}'.format(1700000000) }}"""
    assert compile_template(source).render() == Environment(trim_blocks=True).from_string(source).render()


def test_memory_of_a_task_template_is_bounded() -> None:
    with pytest.raises(DataError, match=r"task t fails on the record 'a'.*more than 16,777,216"):
        Template("{{ x * 4000000000 }}", "task t")({"x": "a"}, "a")
