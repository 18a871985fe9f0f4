"""What a paper leaves open, contradicts itself on, or ablates, as variants of its own method: how
much does the choice move?
"""

from __future__ import annotations

from dataclasses import replace

from fednet.papers.cell import Cell, lay
from fednet.plain import JsonDict

OWN = {
    "fedpdc": "FedPDC",
    "fedabc": "FedABC",
    "feddc": "FedDC",
    "feddpc": "FedDPC",
    "fedrds": "FedRDS",
    "niidbench": "SCAFFOLD",
}
CHOICES: dict[str, dict[str, JsonDict]] = {
    # The penalty as printed has no gradient; two readings have one.
    "fedpdc": {
        "penalty=prox": {"algorithm": {"penalty": "prox"}},
        "penalty=scale": {"algorithm": {"penalty": "scale"}},
        # Algorithm 3's adaptive lambda: it acts where the penalty has a gradient.
        "penalty=prox lambda=adaptive": {"algorithm": {"penalty": "prox", "lambda": "adaptive"}},
        "penalty=scale lambda=adaptive": {"algorithm": {"penalty": "scale", "lambda": "adaptive"}},
        "weighting=samples": {"algorithm": {"weighting": "samples"}},
    },
    "fedabc": {
        "without sampling and mining": {
            "algorithm": {"m_p": 1, "m_n": 0, "m_nn": 0, "focal_gamma": 0}
        },
    },
    # v of Eq. 8 is unstated, and Eq. 6 as printed is not what its source does
    "feddc": {
        "clip=0.1": {"algorithm": {"clip_v": 0.1}},
        "clip=5": {"algorithm": {"clip_v": 5.0}},
        "match=layer": {"algorithm": {"match": "layer"}},
        # Images are condensed and sent, and of no use.
        "no fine-tuning": {"algorithm": {"ft_epochs": 0}},
    },
    # Its ablations, Figures 6 and 7.
    "feddpc": {
        "no projection": {"algorithm": {"projection": False}},
        "no scaling": {"algorithm": {"scaling": False}},
        "no projection, no scaling": {"algorithm": {"projection": False, "scaling": False}},
        **{f"lambda={v}": {"algorithm": {"lambda": v}} for v in (3, 2, 0.1, 0, -0.1, -0.5)},
    },
    # Eq. 4 and section 4.7 disagree on sigma; Figure 6 takes the halves apart
    "fedrds": {
        "sharing alone": {"algorithm": {"sigma_mode": "fixed", "sigma0": 0.0}},
        # Nobody gets any of it; the pool stays that of the others.
        "regularisation alone": {"algorithm": {"alpha": 0.0}},
        "sigma=Eq. 4": {"algorithm": {"sigma_mode": "eq4"}},
        "sigma=scaled": {"algorithm": {"sigma_mode": "scaled"}},
    },
    # What is done in other code, one thing at a time, and all that NIID-Bench's code does: today,
    # and, `as published`, until August 2022.
    "niidbench": {
        "momentum=0": {"train": {"momentum": 0.0, "lr": 0.1}},
        "divisor=steps": {"algorithm": {"divisor": "steps"}},
        "correction=post": {"algorithm": {"correction": "post"}},
        "weighting=samples": {"algorithm": {"weighting": "samples"}},
        "variates=random": {"algorithm": {"variates": "random"}},
        "variates=random momentum=0": {
            "algorithm": {"variates": "random"},
            "train": {"momentum": 0.0, "lr": 0.1},
        },
        "variates=random correction=post": {
            "algorithm": {"variates": "random", "correction": "post"}
        },
        "mean_over=participants": {"algorithm": {"mean_over": "participants"}},
        "code of today": {
            "algorithm": {"variates": "random", "correction": "post", "weighting": "samples"}
        },
        "as published": {
            "algorithm": {
                "variates": "random",
                "correction": "post",
                "weighting": "samples",
                "mean_over": "participants",
            }
        },
    },
}


def variants(cell: Cell) -> list[Cell]:
    """The choices of the cell's paper, where the cell is of the paper's own method; none where it
    is not.
    """
    if cell.method != OWN.get(cell.paper):
        return []
    empty: dict[str, float | None] = dict.fromkeys(cell.figures)
    made = []
    for label, over in CHOICES[cell.paper].items():
        other = replace(cell, method=f"{cell.method} {label}", figures=empty, grids={})
        made.append(replace(other, config={**lay(cell.config, over), "name": other.name}))
    return made
