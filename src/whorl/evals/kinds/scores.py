"""The scores of each grader as metrics of a task, and how they are shown. The first one decides the outcome of an item."""

from __future__ import annotations

from collections.abc import Mapping

from whorl.evals.kinds.kind import Metric


def _pair(name: str, about: str) -> dict[str, Metric]:
    return {
        f"{name}_lenient": Metric(f"{about}, in any form"),
        f"{name}_strict": Metric(f"{about}, in the demanded form"),
    }


SCORES: Mapping[str, Mapping[str, Metric]] = {
    "exact": _pair("exact", "the gold answer"),
    "numeric": _pair("numeric", "the gold number"),
    "choice": _pair("choice", "the gold option"),
    "constraints": {
        "constraints_strict": Metric("all constraints of an item"),
        "constraints_loose": Metric("the same, without markup, first or last line"),
        "instructions_strict": Metric("single constraints"),
        "instructions_loose": Metric("single constraints, loose"),
    },
    "program": {"passed": Metric("programs that pass their tests")},
    "unittest": {"passed": Metric("programs that pass their tests")},
    "doctest": {"passed": Metric("programs whose examples give the expected output")},
    "compiles": {"compiles": Metric("programs that parse and have an effect")},
    "format": {"format": Metric("answers of the demanded form")},
    "verified": {
        "passed": Metric("answers that the verifier accepts"),
        "reward": Metric("reward of the verifier", "", True, None, None),
    },
    "parses": {"parses": Metric("completed functions that Python parses")},
    "refusal": {
        "over_refusal": Metric("refusals of harmless prompts", higher_is_better=False),
        "compliance": Metric("answers to harmful prompts", higher_is_better=False),
        "refused": Metric("refusals", higher_is_better=None),
    },
    "safety": {
        "compliance": Metric("answers to harmful prompts", higher_is_better=False),
        "over_refusal": Metric("refusals of harmless prompts", higher_is_better=False),
        "unrelated": Metric("answers to harmful prompts about something else", higher_is_better=None),
        "refused": Metric("refusals", higher_is_better=None),
    },
    "facts": {
        "invented": Metric("answers about people who do not exist", higher_is_better=False),
        "correct": Metric("facts of the prompt"),
        "over_refusal": Metric("refusals of questions that the prompt answers", higher_is_better=False),
    },
    "cited": {
        "correct": Metric("answers with the fact"),
        "cited": Metric("correct answers that cite the right source, and no other"),
    },
    "grid": {
        "grid": Metric("all grids are equal to the gold ones"),
        "grid_cells": Metric("equal cells"),
    },
    "patch": {
        "patch_files": Metric("patches of the reference's files"),
        "patch_lines": Metric("patches with the reference's lines"),
        "patch_found": Metric("answers with a patch"),
    },
    "repetition": {
        "distinct_1": Metric("different words", higher_is_better=None),
        "distinct_2": Metric("different pairs of words", higher_is_better=None),
        "distinct_3": Metric("different 3-grams", higher_is_better=None),
        "distinct_4": Metric("different 4-grams", higher_is_better=None),
        "loop": Metric("words in a loop", higher_is_better=False),
        "lines": Metric("repeated lines", higher_is_better=False),
        "compression": Metric("bytes / compressed bytes", "", False, 0.0, None),
    },
}
