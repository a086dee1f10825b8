"""The gate: its evidence, its fold, its guards; and the promotion that it allows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.support.loop_events import append, completion, open_synthetic_log

from whorl.log import Event
from whorl.loop.events import FEEDBACK, FeedbackGiven
from whorl.loop.gate import GateState, e_value, failed_guards, figures, gate_state, win_rate_interval


def test_evidence_is_a_martingale_for_equal_models():
    for n in (1, 7, 40):
        total = sum(np.exp(_log_binomial(n, w)) * e_value(w, n - w) for w in range(n + 1))
        assert total == pytest.approx(1.0)


def _log_binomial(n: int, w: int) -> float:
    from scipy.special import gammaln

    return float(gammaln(n + 1) - gammaln(w + 1) - gammaln(n - w + 1) - n * np.log(2))


def test_equal_models_rarely_pass_and_a_better_one_does():
    rng, passed = np.random.default_rng(1), {0.5: 0, 0.65: 0}
    for rate in passed:
        for _ in range(60):
            wins = (rng.random(400) < rate).cumsum()
            passed[rate] += any(e_value(int(w), n - int(w)) >= 20 for n, w in enumerate(wins, 1))
    assert passed[0.5] <= 6 and passed[0.65] >= 57


def test_interval_contains_the_rate_and_shrinks():
    assert win_rate_interval(0, 0) == (0.0, 1.0)
    wide, narrow = win_rate_interval(6, 4), win_rate_interval(600, 400)
    assert wide[0] < narrow[0] < 0.6 < narrow[1] < wide[1]
    assert win_rate_interval(10, 0)[1] == 1.0 and figures(0, 40)["decision"] == "reject"


def test_the_fold_counts_blind_votes_in_any_order_of_topics(tmp_path):
    log, keys = open_synthetic_log(tmp_path)
    events = []
    for n in range(30):
        for arm, side in (("champion", "left"), ("challenger", "right")):
            events.append(
                completion(f"{arm}{n}", f"{n}?", arm, arm=arm, side=side, pair=f"p{n}", digest=f"of {arm}")
            )
        better, other = ("challenger", "champion") if n < 20 else ("champion", "challenger")
        kind = "tie" if n == 29 else "better"
        events.append(FeedbackGiven(f"r{n}", f"{better}{n}", kind, over=f"{other}{n}"))
    events += [FeedbackGiven("r0", "champion0", "better", over="challenger0")]  # r0 votes again
    events += [FeedbackGiven("r1", "challenger1", "better", over="champion2")]  # of two pairs
    append(log, keys, *events)
    log.append(FEEDBACK, Event("actor.erased", "r2", {"actor": "r2"}))
    (test,) = gate_state(log)["tests"]
    assert (test["champion"], test["challenger"]) == ("of champion", "of challenger")
    assert (test["wins"], test["losses"], test["ties"]) == (18, 10, 1) and test["decision"] == "wait"
    backwards = GateState().apply(log.replay("feedback")).apply(log.replay("completions"))
    assert (
        backwards.counts()
        == GateState().apply(log.replay("completions")).apply(log.replay("feedback")).counts()
    )


def test_guards_name_what_got_worse():
    fine = {
        "bits_per_byte": {"champion": 2.0, "challenger": 2.01},
        "characters": {"champion": 50.0, "challenger": 60.0},
    }
    assert failed_guards(fine) == []
    worse = {
        "bits_per_byte": {"champion": 2.0, "challenger": 2.2},
        "characters": {"champion": 50.0, "challenger": 80.0},
    }
    assert [text.split(" ")[0] for text in failed_guards(json.loads(json.dumps(worse)))] == [
        "bits",
        "answers",
    ]
