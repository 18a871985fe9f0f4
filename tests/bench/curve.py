"""`python -m tests.bench curve`: what encryption costs, by rounds with and without it, in turn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from fednet.experiment import placement
from fednet.plain import JsonDict, JsonMapping
from tests.bench.run import fednet, spread, torch_version
from tests.bench.workloads import WORKLOADS


def curve(
    names: Sequence[str], repeat: int, out: Path, workers: int | None = None
) -> list[JsonDict]:
    """One record a workload: seconds a round with and without CURVE, run in turn, and their ratio
    pair by pair; and the processor's seconds that all processes took for a round, which other work
    on the machine disturbs less.
    """
    records = []
    for name in names:
        work, runs = WORKLOADS[name], dict[bool, list[JsonDict]]()
        for k in range(2 * repeat):
            # Off, on, on, off: a machine that slows down steadily favours neither.
            on = k % 4 in (1, 2)
            folder = out / f"{name}-{k}"
            runs.setdefault(on, []).append(fednet(work, workers or placement.cores(), folder, on))
            shutil.rmtree(folder)
        pairs = list(zip(runs[False], runs[True]))
        records.append(
            {
                "workload": name,
                "what": work.text,
                "repeat": repeat,
                "torch": torch_version(),
                **{
                    f"{mode}_{figure}": spread([r[figure] for r in runs[on]])
                    for mode, on in (("plain", False), ("curve", True))
                    for figure in ("seconds", "cpu_s")
                },
                **{
                    f"ratio_{figure}": spread([b[figure] / a[figure] for a, b in pairs])
                    for figure in ("seconds", "cpu_s")
                },
            }
        )
    return records


def curve_lines(records: Sequence[JsonMapping]) -> Iterator[str]:
    for r in records:
        yield f"{r['workload']:4} {r['what']}"
        for what, name in (("seconds", "s a round"), ("cpu_s", "s of the processor a round")):
            plain, on, ratio = (
                "{median:.3f} [{min:.3f} {max:.3f}]".format(**r[f"{mode}_{what}"])
                for mode in ("plain", "curve", "ratio")
            )
            yield f"     {name}: plain {plain}, CURVE {on}, ratio {ratio}"
