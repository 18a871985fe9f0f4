"""Whether a run ends before its last round, as `stop:` in its configuration says."""

from __future__ import annotations

from fednet.config import Config
from fednet.records.manifest import RunProgress


def reached(config: Config, progress: RunProgress) -> str | None:
    """Why the run need not go on; None where it must."""
    stop = config.stop
    spent = sum(progress.totals.get(way, 0) for way in ("up", "down"))
    if stop.accuracy is not None and progress.best is not None and progress.best >= stop.accuracy:
        return f"{progress.best_of} accuracy {progress.best:.4f} reached".lstrip()
    if stop.megabytes is not None and spent >= stop.megabytes * 1e6:
        return f"{spent / 1e6:.4g} MB spent"
    seconds = progress.virtual if config.link.clock == "virtual" else progress.seconds
    if stop.seconds is not None and seconds >= stop.seconds:
        return f"{seconds:.4g} s spent"
    return None


def may_overlap(config: Config) -> bool:
    """Whether a round may start before the one before it is judged: not where what is found may end
    the run, and not where the clients are asked for it in a phase of its own.
    """
    stop, evaluate = config.stop, config.evaluate
    return (
        stop.accuracy is None
        and stop.megabytes is None
        and stop.seconds is None
        and not (evaluate.every and evaluate.clients == "all")
    )
