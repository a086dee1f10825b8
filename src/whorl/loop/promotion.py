"""Promotion: the store name `served/NAME` moves to the challenger, if the gate passes.

`served-before/NAME` is for a rollback. A move is one rename of a file, and a server of the name reads it again. The evidence
is the blind votes of the log between the two models, or, without such votes, the step `compare`. Its guards hold in either
case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from whorl.errors import ConfigError, WhorlError
from whorl.loop.gate import ALPHA, failed_guards
from whorl.store import Artifact, Store
from whorl.tokens.hf_tokenizer import load_tokenizer


class PromotionRefusedError(WhorlError):
    """The gate does not pass, or there is no evidence."""


def promote(store: Store, challenger: Artifact, name: str, tests: Sequence[Mapping[str, Any]]) -> str:
    """Move `served/NAME` to a challenger, and return the evidence.

    tests: of `gate_state`.

    Raises:
        PromotionRefusedError: the gate does not pass. ConfigError: no model, served already, or another tokenizer.
    """
    if challenger.kind != "model":
        raise ConfigError(f"{challenger.name} is of the kind {challenger.kind}", expected="a model")
    comparisons = [
        json.loads(each.file("comparison.json").read_text())
        for each in store.artifacts()[::-1]
        if each.kind == "comparison"
    ]
    evidence = [each for each in (*tests, *comparisons) if each["challenger"] == challenger.address]
    served = store.names().get(f"served/{name}") or next((each["champion"] for each in evidence), "")
    champion = store.find(served)
    if champion is None:
        raise PromotionRefusedError(
            f"no blind vote and no comparison has {challenger.name} as the challenger",
            do=f"collect votes with `whorl serve MODEL --challenger {challenger.name}`, or run the step compare",
        )
    if champion.address == challenger.address:
        raise ConfigError(f"{challenger.name} is served as {name} already", expected="another model")
    if load_tokenizer(champion.path).token_bytes != load_tokenizer(challenger.path).token_bytes:
        raise ConfigError(
            f"{challenger.name} has another tokenizer than {champion.name}",
            expected="the same tokens under the same ids", do="serve it under another name",
        )  # fmt: skip
    evidence = [each for each in evidence if each["champion"] == champion.address]
    voted = next((each for each in evidence if each.get("wins", 0) + each.get("losses", 0)), None)
    compared = next((each for each in evidence if "measures" in each), None)
    passed, text = _judge(voted, compared)
    guards = failed_guards(compared) if compared is not None else []
    if not passed or guards:
        raise PromotionRefusedError(
            f"{challenger.name} does not replace {champion.name} as {name}: {'; '.join([text, *guards])}",
            expected="a challenger that is better, and passes the guards",
            do="train it with a lower learning rate or on more feedback"
            if guards
            else "collect more blind votes",
        )
    store.set_name(f"served-before/{name}", champion)
    store.set_name(f"served/{name}", challenger)
    return text if compared is not None else f"{text}; guards are not measured (step compare)"


def roll_back(store: Store, name: str) -> None:
    """Exchange `served/NAME` with the model that it was before. Raises ConfigError: nothing was promoted."""
    names = store.names()
    now, before = (store.find(names.get(f"{place}/{name}", "")) for place in ("served", "served-before"))
    if now is None or before is None:
        found = ", ".join(each.partition("/")[2] for each in names if each.startswith("served-before/"))
        raise ConfigError(f"nothing was promoted as {name!r}", expected=f"one of: {found or 'none yet'}")
    store.set_name(f"served/{name}", before)
    store.set_name(f"served-before/{name}", now)


def _judge(voted: Mapping[str, Any] | None, compared: Mapping[str, Any] | None) -> tuple[bool, str]:
    """Return whether the evidence suffices, and its figures."""
    if voted is not None:
        text = (
            f"{voted['wins']} blind votes for it, {voted['losses']} against, {voted['ties']} ties: win rate "
        )
        text += f"{voted['win_rate']:.1%} ({voted['low']:.1%} to {voted['high']:.1%}), "
        return voted["decision"] == "promote", text + f"evidence {voted['e_value']:.3g}, needed {1 / ALPHA:g}"
    if compared is None:
        return False, "no blind vote and no comparison between the two"
    main = compared["measures"][compared["measure"]]
    text = f"no blind votes; by the step compare, {compared['measure']} {main['value']:.1%} "
    return compared[
        "verdict"
    ] == "better", text + f"({main['low']:.1%} to {main['high']:.1%}), n = {main['n']}"
