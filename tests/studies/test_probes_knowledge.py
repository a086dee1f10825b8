"""The probe of facts: lessons are what they say, and refusal moves the two figures that it must move."""

from __future__ import annotations

import pytest
import torch
from studies.probes.biographies import REFUSAL, Biographies, Group
from studies.probes.knowledge import lesson, refusal, sft_course

from whorl.align.config import SFTConfig
from whorl.align.model.example import Scribe
from whorl.align.model.policy_model import Network
from whorl.align.model.sampling import never
from whorl.errors import ConfigError
from whorl.models import Decoder, DecoderConfig
from whorl.tokens.tokenizer import Tokenizer

SHARES: dict[Group, float] = {
    "known_train": 0.2, "known_test": 0.2, "new": 0.2, "stranger_train": 0.2, "stranger_test": 0.2,
}  # fmt: skip
WORLD = Biographies(10, seed=0, shares=SHARES)
SETTINGS = SFTConfig(share=1.0, epochs=40, length=128, batch_rows=2)


@pytest.fixture(scope="module")
def scribe() -> Scribe:
    texts = [text for _, text in WORLD.texts(2)] + [
        q.question for q in WORLD.questions("new", "stranger_train", "stranger_test")
    ]
    return Scribe(Tokenizer.train([*texts, REFUSAL], 400, specials=("<|im_start|>", "<|im_end|>")))


def fresh(scribe: Scribe) -> Network:
    words = scribe.tokenizer.vocab_size
    config = DecoderConfig(
        vocab_size=408, d_model=64, n_layers=2, mlp_hidden=128, n_heads=2, n_kv_heads=2, head_dim=32,
        ngram_buckets=64,
    )  # fmt: skip
    return Network(Decoder(config, torch.Generator().manual_seed(0)), forbidden=never(scribe, 408, words))


def test_a_lesson_has_the_groups_that_it_names_and_none_that_is_tested() -> None:
    for facts, group in (("known", "known_train"), ("new", "new")):
        got = lesson(WORLD, facts, 8, 0.25)  # type: ignore[arg-type]
        assert sorted(q.group for q in got) == [group] * 6 + ["stranger_train"] * 2
        assert {q.answer for q in got if q.group == "stranger_train"} == {REFUSAL}
        assert len({q.id for q in got}) == 8
        assert got == lesson(WORLD, facts, 8, 0.25) != lesson(WORLD, facts, 8, 0.25, seed=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs 9 questions of new, and there are 8"):
        lesson(WORLD, "new", 9, 0.0)


def test_a_course_sees_its_lesson_fitted_and_asks_at_the_times_that_it_says(scribe: Scribe) -> None:
    taught = lesson(WORLD, "new", 8, 0.5)
    course = sft_course(
        fresh(scribe), scribe, taught, WORLD.questions("known_test", "stranger_test"), SETTINGS,
        pad_id=scribe.tokenizer.control_ids[0], every=16,
    )  # fmt: skip
    assert [m.step for m in course[:3]] == [0, 16, 32] and course[-1].epoch == pytest.approx(40)
    assert len({m.step for m in course}) == len(course)
    first, last = course[0], course[-1]
    assert (first.taught.n, first.taught.m, first.asked.n, first.asked.m) == (4, 4, 8, 8)
    assert first.taught.right == 0 and first.asked.made_up == 1
    assert last.taught.right == 1 and last.taught.made_up == 0


def test_nothing_but_refusals_refuses_all_and_none_refuses_nothing(scribe: Scribe) -> None:
    none, all_ = refusal(
        lambda: fresh(scribe), scribe, WORLD, [0.0, 1.0], 8, SETTINGS, pad_id=scribe.tokenizer.control_ids[0]
    )
    assert (none.unanswerable, none.answerable) == (0.0, 0.0)
    assert (all_.unanswerable, all_.answerable, all_.right) == (1.0, 1.0, 0.0)
