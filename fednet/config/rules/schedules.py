"""What cannot be asked for where training waits for nobody (`schedule`)."""

from __future__ import annotations

from fednet.config.parts import Method
from fednet.config.schema import Config
from fednet.config.tree import Refuse


def check(c: Config, refuse: Refuse) -> None:
    """Raises what `refuse(key, sentence)` makes of the first rule that is broken."""
    section, mode = c.schedule, c.schedule.mode
    if section.buffer is not None and mode != "async":
        raise refuse("schedule.buffer", f"belongs to async; the mode is {mode}.")
    if section.every is not None and mode != "semi-sync":
        raise refuse("schedule.every", f"belongs to semi-sync; the mode is {mode}.")
    if section.every is None and mode == "semi-sync":
        raise refuse("schedule", "semi-sync needs every, the seconds between two updates.")
    if section.buffer is not None and section.buffer > c.clients:
        raise refuse(
            "schedule.buffer", f"{section.buffer} is more than the {c.clients} clients there are."
        )
    if mode == "sync":
        return
    for key, given, why in (
        ("round.first", c.round.first is not None, "no round closes on its first replies"),
        ("round.ask", c.round.ask is not None, "nobody is asked in another's stead"),
        ("round.select_extra", c.round.select_extra > 0, "nobody is asked in another's stead"),
        ("evaluate.clients", c.evaluate.clients == "all", "nobody is stopped to be judged"),
        ("train.pack", c.train.pack > 1, "clients do not begin together"),
        ("privacy.noise", c.privacy.noise > 0, "what it hides is reckoned by rounds"),
        ("privacy.secagg", c.privacy.secagg.protocol != "none", "there is no set to sum over"),
        (
            "faults.replay",
            c.faults.replay is not None and c.link.clock == "virtual",
            "a run on the virtual clock repeats as it is",
        ),
        (
            "round.min_results",
            c.buffer is not None and c.round.min_results > c.buffer,
            f"{c.buffer} replies make an update",
        ),
    ):
        if given:
            raise refuse(key, f"cannot be had with schedule: {mode}, where {why}.")
    if "crash" in c.faults.random or any(f.kind == "crash" for f in c.faults.schedule):
        raise refuse(
            "faults",
            f"a crash keeps its client away for whole rounds, which schedule: {mode} does not "
            f"have; drop_before_training loses its task.",
        )


def objection(config: Config, method: Method) -> tuple[str, str] | None:
    """(key, sentence) where the method cannot run without rounds."""
    name, mode = config.algorithm.name, config.schedule.mode
    if mode == "sync" and method.own_schedule:
        return (
            "schedule.mode",
            f"{name} makes an update of replies as they come, and has no rounds that wait for all; "
            f"expected async or semi-sync, got sync (without a mode it is async).",
        )
    if mode == "sync":
        return None
    if not method.asynchronous or len(method.exchanges) > 1:
        why = (
            f"has {len(method.exchanges)} exchanges a round"
            if len(method.exchanges) > 1
            else "does not declare `asynchronous = True`: what it folds is not known to make sense "
            "where replies started from older models"
        )
        return "schedule", f"{name} {why}; expected sync, got {mode}."
    return None
