"""A module whose tensors lie in flat buffers: loading a model, or reading it back, is one copy a
role.

A site's model is scratch (see "Bits" in docs/architecture.md): every task overwrites all of it, so
that nothing of one logical client reaches the next one that the same process hosts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fednet.buffers import FROM_BYTES
from fednet.errors import ConfigError, StateError
from fednet.models.trained import frozen_parts
from fednet.tensors import Layout, Tensors, to_device
from fednet.tensors.values import room
from fednet.training.as_built import AsBuilt
from fednet.training.graphs import Replay

DRAWS = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.RNNBase,
    nn.MultiheadAttention,
)
# Draw only where DRAWS does.
KNOWN = (
    "torch.nn.",
    "fednet.models.",
    "fednet.algorithms.",
    "fednet.training.",
    "torchvision.models.resnet",
    "torchvision.models.vgg",
)


def draws(part: object) -> bool:
    """Whether a module is of those of torch's that draw from its own generator while they train."""
    return isinstance(part, DRAWS) and bool(getattr(part, "p", getattr(part, "dropout", True)))


def may_draw(part: object) -> bool:
    """The same of any module, task or loss function. A user's own is taken to, whatever it is made
    from.
    """
    return draws(part) or not getattr(part, "__module__", "").startswith(KNOWN)


def replaced(name: str) -> str:
    """The sentence about a parameter in whose place a model puts another tensor."""
    return (
        f"model: it puts another tensor in the place of its parameter {name!r}, which would not be "
        f"trained; change it in place, under torch.no_grad()."
    )


def unmoved(name: str) -> str:
    """The sentence about a parameter that takes no gradient, and that a model changes."""
    return (
        f"model: it changes its parameter {name!r}, which takes no gradient and so is not sent; "
        f"register it as a buffer."
    )


def _stay_flat(*_: object) -> None:
    """In place of `nn.RNNBase.flatten_parameters`, which on a GPU moves the parameters."""


class Scratch:
    """`module`, moved to `device`, with its parameters and buffers re-pointed into flat vectors
    laid out by `layout`.

    Parameters that the layout leaves out (`train.only`) keep their initial values and take no
    gradient, and to change one is an error; buffers that it leaves out get theirs back at each
    load, and so do attributes of the model's own; modules of which it has nothing are never in
    train mode. Do not move the module to another device. A buffer that it puts another in the
    place of (`self.mean = ...`) is taken over; a parameter is not, and is an error.

    channels_last: kernels of convolutions lie with their channels innermost, which the CPU's
    convolutions and pools are faster with. It changes bits, so it is the configuration's choice
    (`train.memory_format`); what comes out of `values` has the usual order.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.module = module.to(device)
        self.channels_last = channels_last
        self.layout = layout
        self.device = torch.device(device)
        self._spares: list[Scratch] = []
        self.replays: dict[object, Replay] = {}
        self._lent = 0
        self._given = False
        parameters, buffers, counters = layout.sizes
        self.vector = room(parameters, torch.float32, self.device)
        self.buffers = torch.zeros(buffers, device=self.device)
        self.counters = torch.zeros(counters, dtype=torch.int64, device=self.device)
        flat = Tensors(layout, self.vector, self.buffers, self.counters)
        self.frozen = frozen_parts(self.module, layout)
        known = dict(self.module.named_parameters())
        self.parameters: dict[str, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, str]] = []  # (module, its name of one, ours)
        self._held: list[tuple[nn.Module, str, torch.Tensor]] = []  # and the same of buffers
        self._kernels: dict[
            str, torch.Tensor
        ] = {}  # the views whose order in memory is not the usual one
        for parameter in known.values():
            parameter.requires_grad_(False)
        for slot in layout.slots:
            view = flat[slot.name]
            path, _, leaf = slot.name.rpartition(".")
            owner = self.module.get_submodule(path)
            if slot.role == "parameter":
                parameter = known[slot.name]
                if channels_last and len(slot.shape) == 4:
                    view = view.view(slot.shape[0], *slot.shape[2:], slot.shape[1]).permute(
                        0, 3, 1, 2
                    )
                    self._kernels[slot.name] = view
                view.copy_(parameter.detach())
                parameter.data = view
                self.parameters[slot.name] = parameter.requires_grad_(True)
                self._places.append((owner, leaf, slot.name))
            else:
                view.copy_(owner._buffers[leaf])  # type: ignore[arg-type]
                owner._buffers[leaf] = view
                self._held.append((owner, leaf, view))
        self._parts = [(part, list(part.parameters())) for part in self.module.modules()]
        self._remember()
        still = {id(part) for part in self.frozen}
        self.batch_norm = any(
            isinstance(part, _BatchNorm) and id(part) not in still for part, _ in self._parts
        )
        self.may_draw = any(may_draw(part) for part, _ in self._parts)

    def _remember(self) -> None:
        """What a module is as it was built, beside what the layout has."""
        for part, _ in self._parts:
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters = _stay_flat  # type: ignore[method-assign]
        self._still = {
            name: (p, p.data_ptr(), p._version)
            for name, p in self.module.named_parameters()
            if name not in self.layout.places
        }
        self._built = AsBuilt(self.module, self.layout.places, KNOWN)

    def train_mode(self, alone: bool) -> None:
        """Train mode, but eval mode where all parameters of a module are frozen; `alone`: BatchNorm
        in eval mode too, because a batch of one sample has no variance.
        """
        # To ask is a tenth of setting it, and this is each task's.
        if not all(part.training for part, _ in self._parts):
            self.module.train()
        for part, own in self._parts:
            if (own and not any(p.requires_grad for p in own)) or (
                alone and isinstance(part, _BatchNorm)
            ):
                part.eval()
        for part in self.frozen:
            part.eval()

    def load(self, x: Tensors) -> nn.Module:
        """Overwrites every tensor of the layout by `x` and returns the module. StateError: another
        layout.
        """
        if x.layout != self.layout:
            raise StateError(
                f"a model of {len(self.layout.slots)} tensors cannot hold {len(x.layout.slots)} "
                f"of "
                "another layout."
            )
        x = x.to(self.device)
        self._own()
        self.vector.copy_(x.vector)
        for name, view in self._kernels.items():
            view.copy_(x[name])
        self.buffers.copy_(x.buffers)
        self.counters.copy_(x.counters)
        self._built.restore()
        flat = Tensors(self.layout, self.vector, self.buffers, self.counters)
        for owner, leaf, name in self._moved():
            owner._parameters[leaf] = self.parameters[name]
            self.parameters[name].data = self._kernels.get(name, flat[name])
        return self.module

    def values(self) -> Tensors:
        """A copy of what the module holds now. Raises ConfigError where a parameter is not the one
        that was trained.
        """
        self._settle()
        vector = self._room().copy_(self.vector)
        out = Tensors(self.layout, vector, self.buffers.clone(), self.counters.clone())
        for name, view in self._kernels.items():
            out[name].copy_(view)
        return out

    def given(self) -> Tensors:
        """What the module holds now, for good: a large model's memory itself, in whose place the
        next `load` takes other. Until then nobody may write to the module.
        """
        large = self.vector.numel() * self.vector.itemsize >= FROM_BYTES
        if not large or self.device.type != "cpu" or self._kernels:
            return self.values()
        self._settle()
        self._given = True
        return Tensors(self.layout, self.vector, self.buffers.clone(), self.counters.clone())

    def _settle(self) -> None:
        """What the module put in the place of its buffers is in the vectors."""
        for owner, leaf, view in self._held:
            now = owner._buffers.get(leaf)
            if now is view:
                continue
            if now is None or now.shape != view.shape:
                form = None if now is None else tuple(now.shape)
                raise ConfigError(
                    f"model: its buffer {leaf!r} of shape {tuple(view.shape)} became {form} in "
                    f"training; expected the same shape."
                )
            view.copy_(now.detach())
            owner._buffers[leaf] = view
        for _, _, name in self._moved():
            raise ConfigError(replaced(name))
        for name, (p, place, version) in self._still.items():
            if p.data_ptr() != place or p._version != version:
                raise ConfigError(unmoved(name))

    def _moved(self) -> Iterator[tuple[nn.Module, str, str]]:
        """The parameters that the module has another tensor, or other memory, in the place of."""
        base, size = self.vector.data_ptr(), self.vector.itemsize
        for owner, leaf, name in self._places:
            mine, start = self.parameters[name], self.layout.places[name][1]
            if owner._parameters.get(leaf) is not mine or (
                mine.numel() and mine.data_ptr() != base + start * size
            ):
                yield owner, leaf, name

    def _room(self) -> torch.Tensor:
        return room(self.vector.numel(), torch.float32, self.device)

    def _own(self) -> None:
        """Other memory for the parameters, where theirs was given away."""
        if not self._given:
            return
        self._given, self.vector = False, self._room()
        flat = Tensors(self.layout, self.vector, self.buffers, self.counters)
        for name, parameter in self.parameters.items():
            parameter.data = flat[name]

    def views(self, x: Tensors, names: Iterable[str]) -> list[torch.Tensor]:
        """x's parameters of these names as shaped views on this device."""
        vector = to_device(x.vector, self.device)
        places = [x.layout.places[name] for name in names]
        return [vector[start:end].view(shape) for _, start, end, shape in places]

    def flat(self, x: Tensors, names: Iterable[str]) -> list[torch.Tensor]:
        """x's parameters of these names, each as one vector in the order in which the module's own
        elements lie.
        """
        names = list(names)
        found = []
        for name, view in zip(names, self.views(x, names)):
            if name in self._kernels:
                view = (
                    torch.empty_like(self.parameters[name])
                    .copy_(view)
                    .as_strided((view.numel(),), (1,))
                )
            found.append(view.reshape(-1))
        return found

    def lend(self) -> Scratch:
        """A further scratch of the same architecture; each call a different one until
        `take_back`.
        """
        if self._lent == len(self._spares):
            now = AsBuilt(self.module, self.layout.places, KNOWN)
            self._built.restore()  # in the midst of a task: the copy is to have nothing of it
            module = copy.deepcopy(self.module)
            now.restore()
            self._spares.append(Scratch(module, self.layout, self.device, self.channels_last))
        self._lent += 1
        return self._spares[self._lent - 1]

    def take_back(self) -> None:
        """A new task begins: what was lent may be lent again."""
        self._lent = 0
