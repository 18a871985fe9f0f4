"""A module whose tensors are views of flat vectors, so that loading a model or reading it takes one
copy for parameters, one for buffers and one for counters.

Every task overwrites all of a worker's model (see "Bits" in docs/architecture.md), so that nothing
of one client reaches the next one that the same process hosts.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from fednet.buffers import FROM_BYTES
from fednet.errors import ConfigError, StateError
from fednet.models.trained import frozen_parts
from fednet.tensors import Layout, Tensors, to_device
from fednet.tensors.values import room
from fednet.training.graphs import Captured

DRAWS = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.RNNBase,
    nn.MultiheadAttention,
)
NEEDS_GRADIENT = operator.attrgetter("requires_grad")
TRAINS = operator.attrgetter("training")
# Modules written in these draw nothing unless they contain one of DRAWS.
KNOWN = (
    "torch.nn.",
    "fednet.models.",
    "fednet.algorithms.",
    "fednet.training.",
    "torchvision.models.resnet",
    "torchvision.models.vgg",
)


def draws(part: object) -> bool:
    """Whether it is a module of torch that draws from torch's generator while it trains."""
    return isinstance(part, DRAWS) and bool(getattr(part, "p", getattr(part, "dropout", True)))


def may_draw(part: object) -> bool:
    """Whether a module, task or loss function may draw from torch's generator while it trains. A
    user's own is assumed to.
    """
    return draws(part) or not getattr(part, "__module__", "").startswith(KNOWN)


# The attributes of a module that torch itself needs.
OF_MODULES = frozenset(vars(nn.Module()))


class OwnState:
    """What a module keeps beside the tensors of its layout, as it is now: further buffers, and
    attributes of a user's own modules. Nothing of it is sent. `restore` puts it back before each
    task, so that no client finds another's. Raises ConfigError for an attribute that cannot be
    copied.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._beside = [
            (buffer, buffer.clone())
            for name, buffer in module.named_buffers()
            if name not in layout.places
        ]
        parts = list(module.modules())
        self._buffers = [(part, dict(part._buffers)) for part in parts]
        self._own = [part for part in parts if not type(part).__module__.startswith(KNOWN)]
        # Attributes may name these too, which are not copied.
        self._shared = [*parts, *module.parameters(), *module.buffers()]
        self._attributes = self._copied(
            [{k: v for k, v in vars(part).items() if k not in OF_MODULES} for part in self._own]
        )

    def restore(self) -> None:
        for part, held in self._buffers:
            part._buffers.clear()
            part._buffers.update(held)
        for buffer, value in self._beside:
            buffer.copy_(value)
        if not self._own:
            return
        for part, own in zip(self._own, self._copied(self._attributes)):
            for name in vars(part).keys() - OF_MODULES:
                del vars(part)[name]
            vars(part).update(own)

    def _copied(self, attributes: list[dict[str, object]]) -> list[dict[str, object]]:
        try:
            return copy.deepcopy(attributes, {id(one): one for one in self._shared})
        except Exception as broken:  # a user's own objects may raise anything
            raise ConfigError(
                f"model: its attributes cannot be copied, as they are for each client: {broken}"
            ) from broken


def _innermost_gradient(flatten: nn.Flatten, inputs: tuple[torch.Tensor, ...]) -> None:
    """Before images with their channels innermost are flattened: their gradient gets that layout
    too. torch leaves it in that of the vector, and a max pooling before it then copies its input,
    indices and result from one layout to the other, which takes longer than the pooling.
    """
    x = inputs[0]
    if x.requires_grad and x.dim() == 4 and x.stride(1) == 1:
        # (vmap has no `contiguous` with a memory format.)
        x.register_hook(lambda g: g.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))


def _eval_of_one_value(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    x = inputs[0]  # (n, C, ...)
    norm.train(x.numel() > x.shape[1])


class Scratch:
    """A module that make() returns, moved to `device`, with its parameters and buffers as views of
    flat vectors in the order of `layout`.

    Parameters that the layout leaves out (`train.only`) keep their initial values and take no
    gradient. Buffers that it leaves out, and attributes of the model's own, get their initial
    values back at each load. Modules without a tensor in the layout are never in train mode. If the
    model replaces a buffer (`self.mean = ...`), the new value is taken over; replacing a parameter
    is refused at the start of a run. Do not move the module to another device.

    channels_last: kernels of convolutions have their channels innermost in memory, which is faster
    on the CPU and changes bits (`train.memory_format`); `values` returns the usual order.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        layout: Layout,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self._make = make
        self.module = make().to(device)
        self.channels_last = channels_last
        self.layout = layout
        self.device = torch.device(device)
        self.replays: dict[object, Captured] = {}
        self._spares: list[Scratch] = []
        parameters, buffers, counters = layout.sizes
        vector = room(parameters, torch.float32, self.device)
        self.buffers = torch.zeros(buffers, device=self.device)
        self.counters = torch.zeros(counters, dtype=torch.int64, device=self.device)
        self.frozen = frozen_parts(self.module, layout)
        self.parameters: dict[str, nn.Parameter] = {}
        self._buffer_views: list[tuple[nn.Module, str, torch.Tensor]] = []  # owner, name there
        self._kernels: dict[str, torch.Tensor] = {}  # views whose channels are innermost
        known = dict(self.module.named_parameters())
        for parameter in known.values():
            parameter.requires_grad_(False)
        flat = Tensors(layout, vector, self.buffers, self.counters)
        made: list[torch.Tensor] = []
        for slot in layout.slots:
            if slot.role == "parameter":
                parameter = known[slot.name]
                made.append(parameter.detach())
                self.parameters[slot.name] = parameter.requires_grad_(True)
            else:
                view = flat[slot.name]
                path, _, leaf = slot.name.rpartition(".")
                owner = self.module.get_submodule(path)
                view.copy_(owner._buffers[leaf])  # type: ignore[arg-type]
                owner._buffers[leaf] = view
                self._buffer_views.append((owner, leaf, view))
        self._place(vector)
        for parameter, value in zip(self.parameters.values(), made):
            parameter.data.copy_(value)
        self._parts = [(part, list(part.parameters())) for part in self.module.modules()]
        for part, _ in self._parts:
            if isinstance(part, nn.RNNBase):  # on a GPU it would move the parameters
                part.flatten_parameters = lambda: None  # type: ignore[method-assign]
            if isinstance(part, nn.Flatten) and channels_last and self.device.type == "cpu":
                part.register_forward_pre_hook(_innermost_gradient)
        self._own = OwnState(self.module, self.layout)
        frozen = {id(part) for part in self.frozen}
        self.batch_norm = any(
            isinstance(part, _BatchNorm) and id(part) not in frozen for part, _ in self._parts
        )
        self.may_draw = any(may_draw(part) for part, _ in self._parts)
        self._modules = [part for part, _ in self._parts]
        kinds: set[type[nn.Module]] = {type(part) for part in self._modules}
        # Whether no module of it is a user's own.
        self.known = all(kind.__module__.startswith(KNOWN) for kind in kinds)
        # Whether `eval` of the module sets the mode of its parts and does nothing else.
        self._sets_modes = all(
            (kind.train, kind.eval) == (nn.Module.train, nn.Module.eval) for kind in kinds
        )

    def _place(self, vector: torch.Tensor) -> None:
        """Makes the parameters views of this vector."""
        self.vector = vector
        flat = Tensors(self.layout, vector, self.buffers, self.counters)
        for name, parameter in self.parameters.items():
            view = flat[name]
            if self.channels_last and view.dim() == 4:
                out, c, h, w = view.shape
                view = view.view(out, h, w, c).permute(0, 3, 1, 2)
                self._kernels[name] = view
            parameter.data = view

    def train_mode(self, alone: bool) -> list[RemovableHandle]:
        """Sets train mode, but eval mode for modules whose parameters are all frozen. alone: the
        batches have one sample. Where that is one value a channel, which has no variance and which
        torch refuses, BatchNorm is in eval mode too. Returns hooks to remove after the training.
        """
        self.module.train()
        for part, own in self._parts:
            if own and not any(map(NEEDS_GRADIENT, own)):
                part.eval()
        for part in self.frozen:
            part.eval()
        if not alone:
            return []
        return [
            part.register_forward_pre_hook(_eval_of_one_value)
            for part, _ in self._parts
            if isinstance(part, _BatchNorm) and part.training
        ]

    def load(self, x: Tensors) -> nn.Module:
        """Overwrites every tensor of the layout by `x` and returns the module. Raises StateError
        for another layout.
        """
        if x.layout != self.layout:
            raise StateError(
                f"a model of {len(self.layout.slots)} tensors cannot hold {len(x.layout.slots)} "
                f"of another layout."
            )
        x = x.to(self.device)
        if not self.vector.numel():  # given away
            self._place(room(len(x.vector), torch.float32, self.device))
        self.vector.copy_(x.vector)
        for name, view in self._kernels.items():
            view.copy_(x[name])
        self.buffers.copy_(x.buffers)
        self.counters.copy_(x.counters)
        self._own.restore()
        return self.module

    def in_eval_mode(self) -> nn.Module:
        """Returns the module, in eval mode. It mostly is: to set it calls each part several times,
        which takes longer than to compute a small model.
        """
        if not self._sets_modes or any(map(TRAINS, self._modules)):
            self.module.eval()
        return self.module

    def values(self, give_away: bool = False) -> Tensors:
        """Returns a copy of the module's tensors. give_away: on the CPU a large model's memory is
        not copied but returned: the module has none until `load`.
        Raises ConfigError if a buffer has changed its shape.
        """
        for owner, leaf, view in self._buffer_views:  # which the module may have replaced
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
        vector = self.vector
        given = give_away and vector.nbytes >= FROM_BYTES and self.device.type == "cpu"
        if not given:
            vector = room(vector.numel(), torch.float32, self.device).copy_(vector)
        out = Tensors(self.layout, vector, self.buffers.clone(), self.counters.clone())
        for name, view in self._kernels.items():
            out[name].copy_(view.clone() if given else view)  # else from the same memory
        if given:
            self.vector = torch.empty(0)
            for parameter in self.parameters.values():
                parameter.data = self.vector
            self._kernels.clear()
        return out

    def views(self, x: Tensors, names: Iterable[str]) -> list[torch.Tensor]:
        """Returns x's parameters of these names as shaped views on this device."""
        vector = to_device(x.vector, self.device)
        places = [x.layout.places[name] for name in names]
        return [vector[start:end].view(shape) for _, start, end, shape in places]

    def flat(self, x: Tensors, names: Iterable[str]) -> list[torch.Tensor]:
        """Returns x's parameters of these names, each as one vector in the order of the module's
        own memory.
        """
        names = list(names)
        found = []
        for name, view in zip(names, self.views(x, names)):
            if name in self._kernels:
                kernel = torch.empty_like(self.parameters[name]).copy_(view)
                view = kernel.as_strided((view.numel(),), (1,))
            found.append(view.reshape(-1))
        return found

    def lend(self) -> Scratch:
        """Returns a further scratch of the same architecture, which nobody else has until it is
        given to `take_back`.
        """
        if self._spares:
            return self._spares.pop()
        return Scratch(self._make, self.layout, self.device, self.channels_last)

    def take_back(self, lent: Iterable[Scratch]) -> None:
        self._spares += lent
