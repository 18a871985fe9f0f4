"""What a module keeps beside the tensors of its layout, as it was when it was built: counts, lists,
buffers that it makes as it is called. Nothing of it crosses; it is put back before each task, so
that no client finds another's.

What is changed in place is put back in place: a hook may hold the same list. Of a module's own
objects, those are looked into whose class is written where the module's is.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

Undo = Callable[[], object]

OF_MODULES = frozenset(vars(nn.Module()))


class AsBuilt:
    """places: names of what the layout has. known: how the names of those files begin whose modules
    keep nothing.
    """

    def __init__(self, module: nn.Module, places: Container[str], known: tuple[str, ...]) -> None:
        self._undo: list[Undo] = [
            partial(value.copy_, value.clone())
            for name, value in module.named_buffers()
            if name not in places
        ]
        seen: dict[int, object] = {}
        for part in module.modules():
            self._undo.append(partial(_refill, part._buffers, dict(part._buffers)))
            if not type(part).__module__.startswith(known):
                own = {name: v for name, v in vars(part).items() if name not in OF_MODULES}
                self._undo.append(partial(_keep, part, own))
                for value in own.values():
                    self._undo += _inside(value, type(part).__module__, seen)

    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _keep(part: nn.Module, own: dict[str, object]) -> None:
    now = vars(part)
    for new in now.keys() - own.keys() - OF_MODULES:
        del now[new]
    now.update(own)


# Any: a user's own objects.
def _inside(value: Any, where: str, seen: dict[int, object]) -> Iterator[Undo]:
    """What puts back what is in a value, and in what that holds."""
    if id(value) in seen or isinstance(value, (nn.Module, nn.Parameter)):
        return
    seen[id(value)] = value  # held, so that its id stays its own
    held: Iterable[object] = ()
    if isinstance(value, dict):
        held = list(value.values())
        yield partial(_refill, value, dict(value))
    elif isinstance(value, (list, deque, set)):
        held = list(value)
        yield partial(_refill, value, held)
    elif isinstance(value, tuple):
        held = value
    elif isinstance(value, torch.Tensor):
        if not value.is_sparse and 0 not in value.stride():
            yield partial(value.data.copy_, value.detach().clone())
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            yield partial(np.copyto, value, value.copy())
    elif isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif type(value).__module__ == where and hasattr(value, "__dict__"):
        held = [vars(value)]
    for one in held:
        yield from _inside(one, where, seen)


# Any: of a list, a deque, a set and a dictionary.
def _refill(value: Any, held: Iterable[object]) -> None:
    value.clear()
    (value.extend if isinstance(value, (list, deque)) else value.update)(held)
