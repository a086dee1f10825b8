"""`whorl promote`: a model is served from now on, if the gate passes."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def promote(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The challenger, such as flywheel/preference.")
    ] = "",
    name: Annotated[
        str, typer.Option(help="Name in the API; default: that of the newest completion of the log.")
    ] = "",
    rollback: Annotated[bool, typer.Option("--rollback", help="Return to the model before.")] = False,
    log: Annotated[
        str, typer.Option(metavar="URL", help="The event log; default: $WHORL_LOG, or the store's.")
    ] = "",
    store: StoreOption = None,
) -> None:
    """Serve a better model from now on: move the name served/NAME, if the gate passes.

    The gate is a test on blind votes, which may be read after each vote: at most 5 % false promotions. Without blind votes
    it is the step `compare`. Guards on bits per byte and on the length of answers hold in either case.

    Examples:

        whorl promote flywheel/preference

        whorl promote --rollback
    """
    from whorl.errors import ConfigError
    from whorl.log import default_log, open_log
    from whorl.loop import promotion
    from whorl.loop.frozen_events import latest_completion
    from whorl.loop.gate import gate_state
    from whorl.store import Store

    opened = Store(store).require()
    if rollback == bool(model):
        raise ConfigError("give a model, or --rollback", expected="one of them")
    challenger = opened.open(model) if model else None  # an unknown one is named first
    with open_log(log or default_log(opened.root)) as events:
        name = name or str(latest_completion(events).get("model", ""))
        tests = [] if rollback else gate_state(events)["tests"]
    if not name:
        raise ConfigError("the log has no completion, so the name is unknown", do="give --name NAME")
    if challenger is None:
        promotion.roll_back(opened, name)
        print(f"served/{name} is {opened.open(f'served/{name}').label} again")
    else:
        print(promotion.promote(opened, challenger, name, tests))
        print(f"served/{name} is {model} from now on; to return: whorl promote --rollback --name {name}")
