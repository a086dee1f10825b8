"""Events of a log become preferences: ranges of offsets, erased actors, votes of raters, pairs and labels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.support.loop_events import append, completion, open_synthetic_log

from whorl.errors import DataError
from whorl.log import Event, open_log
from whorl.loop.events import COMPLETIONS, FEEDBACK, CompletionMade, FeedbackGiven, LoggedAnswer
from whorl.loop.feedback_pairs import feedback_examples
from whorl.loop.frozen_events import (
    current_offsets,
    is_held_out,
    latest_completion,
    log_identity,
    read_events,
)
from whorl.loop.raters import RaterVote, rate


def frozen(tmp_path, *events, fraction=0.2):
    log, keys = open_synthetic_log(tmp_path)
    append(log, keys, *events)
    return read_events(log, keys, current_offsets(log), fraction)


def test_the_last_vote_of_an_actor_on_an_answer_counts(tmp_path):
    kinds = ("like", "dislike", "like", "none")
    made = [completion("a", "1?", "yes"), completion("b", "1?", "nay")]
    votes = [FeedbackGiven("bob", "a", kind) for kind in kinds]
    votes += [FeedbackGiven("eve", "b", "like"), FeedbackGiven("eve", "b", "edit", text="no")]
    votes += [FeedbackGiven("eve", "a", "better", over="b"), FeedbackGiven("eve", "b", "better", over="a")]
    votes += [FeedbackGiven("eve", "lost", "like")]
    found = frozen(tmp_path, *made, *votes)
    assert [(row["kind"], row["completion"]) for row in found.feedback] == [
        ("like", "b"),
        ("edit", "b"),
        ("better", "b"),
    ]
    left_out = {"replaced by a later vote": 4, "taken back": 1, "on a completion that was not kept": 1}
    assert found.left_out == left_out and found.actors == ["ada", "eve"]


def test_erased_actors_are_left_out_and_counted(tmp_path):
    log, keys = open_synthetic_log(tmp_path)
    append(log, keys, completion("a", "1?", "yes", actor="eve"), completion("b", "1?", "nay"))
    append(log, keys, FeedbackGiven("eve", "b", "dislike"), FeedbackGiven("bob", "b", "like"), start=5)
    before = current_offsets(log)
    keys.erase("eve")
    log.append(FEEDBACK, Event("actor.erased", "eve", {"actor": "eve"}))
    assert current_offsets(log) != before
    found = read_events(log, keys, current_offsets(log), 0.2)
    assert [row["id"] for row in found.completions] == ["b"] and found.actors == ["ada", "bob"]
    assert found.left_out == {"of an erased actor": 2}


def test_a_range_is_read_again_as_it_was(tmp_path):
    log, keys = open_synthetic_log(tmp_path)
    append(log, keys, completion("a", "1?", "yes"), FeedbackGiven("bob", "a", "like"))
    offsets, identity = current_offsets(log), log_identity(log)
    first = read_events(log, keys, offsets, 0.2)
    append(
        log,
        keys,
        completion("c", "2?", "yes", model="newer", digest="abc"),
        FeedbackGiven("bob", "a", "dislike"),
        start=10,
    )
    log.append(COMPLETIONS, Event("completion.made", "x", {"id": "x"}))  # no completion of this version
    again = read_events(log, keys, offsets, 0.2)
    assert dataclasses.asdict(again) == dataclasses.asdict(first)
    assert log_identity(open_log(log.url)) == identity
    assert read_events(log, keys, current_offsets(log), 0.2).left_out["unreadable"] == 1
    append(
        log,
        keys,
        completion("d", "2?", "yes", digest="def", arm="challenger"),
        completion("e", "2?", "yes"),
        start=20,
    )
    assert latest_completion(log)["id"] == "c"


def test_a_log_without_topics_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no topic 'completions'"):
        current_offsets(open_log(f"sqlite:{tmp_path / 'other.db'}"))


def test_held_out_prompts_stay_held_out():
    prompts = [f"{n}?" for n in range(5000)]
    small, large = ([is_held_out(prompt, share) for prompt in prompts] for share in (0.1, 0.3))
    assert 0.08 < np.mean(small) < 0.12 and all(b for a, b in zip(small, large, strict=True) if a)


def test_each_kind_of_feedback_gives_its_pair(tmp_path):
    made = [
        completion(name, prompt, f"answer {name}") for name, prompt in zip("abcdef", "112233", strict=True)
    ]
    votes = [
        FeedbackGiven("bob", "a", "better", over="b"),
        FeedbackGiven("bob", "c", "like"), FeedbackGiven("bob", "d", "dislike"),
        FeedbackGiven("bob", "e", "edit", text="mine"), FeedbackGiven("bob", "f", "like"),
        FeedbackGiven("bob", "a", "better", over="f"),
    ]  # fmt: skip
    found = frozen(tmp_path, *made, *votes)
    examples = feedback_examples(found.completions, found.feedback)
    pairs = {(p["chosen"], p["rejected"]) for own in examples.pairs.values() for p in own}
    assert pairs == {("answer a", "answer b"), ("answer c", "answer d"), ("mine", "answer e")}
    assert examples.kinds == {"better": 1, "liked over disliked": 1, "edit": 1} and examples.singles == 1
    assert examples.left_out == {"two answers to different prompts": 1}
    labels = {(p["completion"], p["label"]) for own in examples.labels.values() for p in own}
    assert ("answer f", True) in labels and ("answer d", False) in labels and len(labels) == 7
    edit = next(p for own in examples.pairs.values() for p in own if p["chosen"] == "mine")
    assert "chosen_ids" not in edit and bytes(edit["rejected_ids"][:-1]) == b"answer e"


def test_the_healed_end_of_a_prompt_belongs_to_the_prompt(tmp_path):
    made = []
    for name, text, forced in (("a", "yes", b"?"), ("b", "nay", b"?"), ("c", "no", b"??")):
        answer = LoggedAnswer(text, [*forced, *text.encode(), 257], forced=len(forced))
        made.append(CompletionMade(name, "m", "", "ada", "1?", [256, 49], [answer]))
    votes = [FeedbackGiven("bob", "a", "better", over="b"), FeedbackGiven("bob", "a", "better", over="c")]
    found = frozen(tmp_path, *made, *votes)
    pairs = feedback_examples(found.completions, found.feedback).pairs
    one, other = pairs["train"] + pairs["test"]
    assert one["prompt_ids"] == (256, 49, 63) and bytes(one["chosen_ids"][:-1]) == b"yes"
    assert (
        other["prompt_ids"] == (256, 49) and bytes(other["rejected_ids"][:-1]) == b"??no"
    )  # other tokens: in the loss


def test_raters_who_agree_outvote_random_ones():
    rng, votes, truth = np.random.default_rng(0), [], {}
    for item in range(300):
        truth[str(item)] = int(rng.choice([-1, 1]))
        for rater in rng.choice(20, 5, replace=False):  # the first ten are random
            right = rng.random() < (0.5 if rater < 10 else 0.9)
            votes.append(RaterVote(f"r{rater}", str(item), truth[str(item)] * (1 if right else -1)))
    found = rate(votes)
    plain = {item: sum(v.value for v in votes if v.item == item) for item in truth}
    accuracy = [
        np.mean([np.sign(own[item]) == truth[item] for item in truth]) for own in (found.log_odds, plain)
    ]
    good, bad = (np.mean([found.agreement[f"r{n}"] for n in own]) for own in (range(10, 20), range(10)))
    assert accuracy[0] > accuracy[1] + 0.03 and good > bad + 0.15


def test_the_favour_of_the_left_position_is_estimated_and_corrected():
    votes = [RaterVote(f"r{n}", f"{n}", 1, side=1 if n % 10 < 7 else -1) for n in range(1000)]
    found = rate(votes)
    assert found.left == 0.7
    left, right = (
        found.log_odds["0"],
        found.log_odds["9"],
    )  # one vote each, for the left and for the right answer
    assert 0 < left < right
