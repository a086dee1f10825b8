"""Steps of the learner under a layout: norm, Muon, AdamW, tables and experts; planted faults are caught."""

import pytest
from bench.parallel.equal import BAR, FAULTS, compare, run

STEPS = 2


def test_two_ranks_train_as_one_rank_and_faults_are_caught():
    layouts = [
        ("ours", "tp=2", ""),
        ("ours", "fsdp=2", ""),
        ("tied", "pp=2", ""),
        ("experts", "dp=2,ep=2", ""),
    ]
    planted = [(*FAULTS[name][:2], name) for name in FAULTS]
    found = compare([*layouts, *planted], STEPS)
    for case, (far, control) in zip(layouts, found[: len(layouts)], strict=True):
        assert far < 2 * BAR * control, case  # two steps: the control is small by chance
    for case, (far, control) in zip(planted, found[len(layouts) :], strict=True):
        assert far > 2 * BAR * control, case


def test_a_setting_that_a_layout_excludes_is_named():
    with pytest.raises(Exception, match=r"nearest are 2 and 4"):
        run(3, [("llama", "dp=3", 4, 1)])
