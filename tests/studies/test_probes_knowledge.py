"""The probe of facts: training sets, reported steps, and refusal rates."""

from __future__ import annotations

import pytest
import torch
from studies.probes.knowledge import make_lesson, refusal_rates, track_sft

from whorl.align.config import SFTConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import ConfigError
from whorl.evals.suites.biographies import REFUSAL, Biographies, PersonGroup
from whorl.models import Transformer, whorl_decoder
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.tokenizer import Tokenizer

SHARES: dict[PersonGroup, float] = {
    "known_train": 0.2, "known_test": 0.2, "new": 0.2, "stranger_train": 0.2, "stranger_test": 0.2,
}  # fmt: skip
WORLD = Biographies(10, seed=0, fractions=SHARES)
SETTINGS = SFTConfig(lr_scale=1.0, data={"epochs": 40, "seq_len": 128, "batch_size": 2})


@pytest.fixture(scope="module")
def scribe() -> TokenEncoder:
    questions = WORLD.questions("new", "stranger_train", "stranger_test")
    texts = [*(text for _, text in WORLD.texts(2)), *(q.question for q in questions), REFUSAL]
    return TokenEncoder(Tokenizer.train(texts, 400, special_tokens=("<|im_start|>", "<|im_end|>")))


def fresh(scribe: TokenEncoder) -> PolicyModel:
    sizes = {"d_model": 64, "n_layers": 2, "mlp_hidden": 128, "n_heads": 2, "n_kv_heads": 2, "head_dim": 32}
    config = whorl_decoder(vocab_size=408, ngram_buckets=64, **sizes)
    banned = scribe.banned_ids(408)
    return PolicyModel(Transformer(config, torch.Generator().manual_seed(0)), banned_ids=banned)


def test_make_lesson_uses_training_groups_only() -> None:
    for facts, group in (("known", "known_train"), ("new", "new")):
        got = make_lesson(WORLD, facts, 8, 0.25)  # type: ignore[arg-type]
        assert sorted(q.group for q in got) == [group] * 6 + ["stranger_train"] * 2
        assert {q.answer for q in got if q.group == "stranger_train"} == {REFUSAL}
        assert len({q.id for q in got}) == 8
        assert got == make_lesson(WORLD, facts, 8, 0.25) != make_lesson(WORLD, facts, 8, 0.25, seed=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs 9 questions of new, and there are 8"):
        make_lesson(WORLD, "new", 9, 0.0)


def test_track_sft_reports_at_requested_steps(scribe: TokenEncoder) -> None:
    taught, test = make_lesson(WORLD, "new", 8, 0.5), WORLD.questions("known_test", "stranger_test")
    pad_id = scribe.tokenizer.control_ids[0]
    course = track_sft(fresh(scribe), scribe, taught, test, SETTINGS, pad_id=pad_id, every=16)
    assert [m.step for m in course[:3]] == [0, 16, 32] and course[-1].epoch == pytest.approx(40)
    assert len({m.step for m in course}) == len(course)
    first, last = course[0], course[-1]
    assert (first.train_scores.n_facts, first.train_scores.n_strangers) == (4, 4)
    assert (first.test_scores.n_facts, first.test_scores.n_strangers) == (8, 8)
    assert first.train_scores.correct == 0 and first.test_scores.hallucinated == 1
    assert last.train_scores.correct == 1 and last.train_scores.hallucinated == 0


def test_refusal_rates_at_zero_and_full_refusal(scribe: TokenEncoder) -> None:
    pad_id = scribe.tokenizer.control_ids[0]
    rates = [0.0, 1.0]
    none, all_ = refusal_rates(lambda: fresh(scribe), scribe, WORLD, rates, 8, SETTINGS, pad_id=pad_id)
    assert (none.unanswerable, none.answerable) == (0.0, 0.0)
    assert (all_.unanswerable, all_.answerable, all_.correct) == (1.0, 1.0, 0.0)
