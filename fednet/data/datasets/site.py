"""`data.dataset: site`: each client brings its own data. The server knows only shapes and
classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np

from fednet import places
from fednet.config.parts import READERS
from fednet.config.schema import AtLeast1, DataSection
from fednet.data.base import Data, digest_of
from fednet.data.federation import Federation
from fednet.data.loading import make_data
from fednet.errors import ConfigError, DataError, unknown
from fednet.plain import JsonDict
from fednet.registry import dataset

# Keys of `data:` that declare the data of every site. Others are options of the site's dataset.
DECLARED = ("shape", "classes", "targets", "format")


@dataset("site")
def site(
    *,
    shape: Annotated[list[AtLeast1], "Shape of one input, such as [3, 32, 32] or [16]."],
    classes: Annotated[
        AtLeast1 | list[str] | None,
        "Number of classes, or their names in order; null: y holds values.",
    ] = None,
    targets: Annotated[AtLeast1, "Values per sample, if y holds values. [values]"] = 1,
    format: Annotated[
        str | None,
        "Dataset that reads the data at each site, with its options beside this one; null: folder "
        "or arrays, by what is there.",
    ] = None,
) -> Data:
    """Each client brings its own data (--data DIR); the server knows only shape and classes."""
    raise ConfigError(
        "data.dataset: site is read by each client from its own --data DIR; nothing is loaded here."
    )


def load_site(section: DataSection, directory: Path | str | None, seed: int = 0) -> Data:
    """Reads a client's own `directory` (its `--data`), and compares it with the configuration.

    section.options: shape and classes (see `declared_form`); format: `folder`, `arrays` or the name
    of a registered dataset, which gets `directory` as its root. Without a format: a folder with
    train/ is `folder`, one with a single .npz file (or such a file itself) is `arrays`. Raises
    DataError if the data differ from the declaration.
    """
    if directory is None:
        raise ConfigError(
            "data.dataset: site needs each client to name its own data, with --data DIR."
        )
    root = places.expand_home(directory, "--data")
    if not root.exists():
        raise DataError(f"--data {root}: there is no such folder or file.")
    given = section.options
    shape, classes, outputs = declared_form(section)
    name = given.get("format")
    own: JsonDict = {}
    if name == "site":
        raise ConfigError("data.format: " + unknown("format", name, READERS))
    if name is None:
        name = "folder" if (root / "train").is_dir() else "arrays"
    if name == "folder":
        own = {"path": str(root)}
    elif name == "arrays":
        arrays = [root] if root.is_file() else sorted(root.glob("*.npz"))
        if len(arrays) != 1:
            raise DataError(
                f"--data {root}: found neither train/<class>/ nor one .npz file; say data.format: "
                f"folder, arrays or the name of your own dataset."
            )
        own = {"path": str(arrays[0])}
    own |= {k: v for k, v in given.items() if k not in DECLARED}
    if name in READERS:
        own.setdefault("classes", given.get("classes"))
        if len(shape) == 3:
            # Statistics of one site would normalise its images unlike those of other sites.
            own.setdefault("mean", [0.5] * shape[0])
            own.setdefault("std", [0.25] * shape[0])
    data = make_data(name, own, root, False, seed)
    if not section.normalise:
        data = data.replace(mean=None, std=None)
    if data.outputs != outputs and classes is None:
        raise DataError(
            f"--data {root}: a target holds {data.outputs} values; data.targets says {outputs}."
        )
    if data.input_shape != shape or data.classes != classes:
        raise DataError(
            f"--data {root}: holds samples of shape {list(data.input_shape)} in {data.classes} "
            f"classes; data.shape and data.classes say {list(shape)} and {classes}."
        )
    return data


def declared_form(section: DataSection) -> tuple[tuple[int, ...], int | None, int]:
    """Returns (input shape, C, width of a model's output) that the configuration declares for every
    site. Option classes: a number, a list of names in order, or null for values, whose width is
    that of the targets. Raises ConfigError without a shape.
    """
    given = section.options
    if not given.get("shape"):
        raise ConfigError(
            "data (dataset 'site'): say the shape of a sample and the number of classes, such as "
            "{dataset: site, shape: [3, 32, 32], classes: 10}."
        )
    classes = given.get("classes")
    if isinstance(classes, (list, tuple)):
        classes = len(classes)
    outputs = given.get("targets", 1) if classes is None else classes
    return tuple(given["shape"]), classes, outputs


def class_names(section: DataSection) -> str:
    """Returns the digest of the class names that the configuration lists, "" without any."""
    names = section.options.get("classes")
    return digest_of(map(str, names)) if isinstance(names, (list, tuple)) else ""


def alone(data: Data) -> Federation:
    """Returns a site's data as a federation of one client."""
    none = np.empty(0, dtype=np.int64)
    return Federation(data, [np.arange(data.n_train)], [np.arange(data.n_test)], none, none, "site")
