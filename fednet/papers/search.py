"""`fednet reproduce --grid`: the values that a paper searched, as sweeps with samples held out.

FOLDER/CELL.yaml         the sweep: `fednet sweep FOLDER/CELL.yaml`
FOLDER/CELL-base.yaml    the configuration of the cell's run, with samples held out
"""

from __future__ import annotations

from pathlib import Path

import yaml

from fednet import papers
from fednet.errors import ConfigError
from fednet.experiment.rundir import writable
from fednet.files import write_aside
from fednet.papers.job import Reproduction

HELD_OUT = 0.1  # share of the training samples, where the command line says no other


def write(job: Reproduction, folder: Path) -> list[Path]:
    """Writes a sweep for each cell that the paper has a grid for. Returns their paths. Raises
    ConfigError if there is none.
    """
    grids = [(cell.config, papers.grid(cell)) for cell in job.cells]
    if not any(values for _, values in grids):
        raise ConfigError(f"--grid: the paper of {job.table} states no grid for these methods.")
    writable(folder, "--grid")
    written = []
    for config, values in grids:
        if not values:
            continue
        if not config["data"].get("validation"):
            config = papers.lay(config, {"data": {"validation": HELD_OUT}})
        base = folder / f"{config['name']}-base.yaml"
        write_aside(base, yaml.safe_dump(config, sort_keys=False))
        sweep = {"base": base.name, "vary": values, "seeds": list(job.seeds)}
        path = folder / f"{config['name']}.yaml"
        write_aside(path, yaml.safe_dump(sweep, sort_keys=False))
        written.append(path)
    return written
