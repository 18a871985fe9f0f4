"""All switches that decide whether the same program gives the same bits: set here, and recorded."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from fednet import proc
from fednet.config.schema import TrainSection
from fednet.errors import ConfigError
from fednet.plain import JsonDict, JsonMapping

if TYPE_CHECKING:
    import torch

# cuBLAS needs this before its first call; it is harmless without a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Settings of torch, oneDNN and MKL for `train.portable`: instructions that x86-64 processors have
# had since 2013, and the code of MKL that is the same for every maker of processors.
PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
# Whether this process computes so: the libraries ask once, at their first kernel. _kept keeps the
# registered square roots.
_portable: bool | None = None
_kept: list[torch.library.Library] = []
# Threads that torch computes an operation with, see `set_thread`.
_threads = 1


def set_switches(train: TrainSection | None = None) -> JsonDict:
    """Sets thread counts and determinism switches of this process; returns them, for the record.
    train: None if there is no configuration yet. Raises ConfigError.
    """
    global _threads
    import torch

    _threads, precision = (1, "fp32") if train is None else (train.threads, train.precision)
    if train is not None:
        choose_kernels(train.portable)
    set_thread()
    if torch.get_num_interop_threads() != 1:
        # Once work has started, the number is fixed; it is recorded below.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
    # Like use_deterministic_algorithms(True, warn_only=True), which takes 3 s to import
    # torch._inductor.
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    tf32 = precision == "tf32"
    # Of the CPU too, where "medium" is bfloat16.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": "warn_only",
        "cudnn_deterministic": True,
        "cudnn_benchmark": False,
        "tf32": tf32,
        "portable": is_portable(),
        "cublas_workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }


def set_thread() -> None:
    """Gives the calling thread the number of threads that `set_switches` set: torch keeps that
    number for each thread, and bits depend on it.
    """
    import torch

    if torch.get_num_threads() != _threads:
        torch.set_num_threads(_threads)


def choose_kernels(portable: bool) -> None:
    """Chooses the CPU kernels that this process computes with. Raises ConfigError if that is not
    possible, or not any more.
    """
    global _portable
    import torch

    if _portable is not None and _portable != portable:
        raise ConfigError(
            f"train.portable: this process has computed with train.portable: "
            f"{str(_portable).lower()} already; start another one."
        )
    if portable and not _portable:
        if not torch.backends.mkl.is_available():  # which is for x86-64 alone
            raise ConfigError(
                f"train.portable: expected an x86-64 processor and a torch with MKL, found "
                f"{platform.machine()}; leave train.portable out."
            )
        os.environ.update(PORTABLE)
        found = torch.backends.cpu.get_cpu_capability()
        if found == "DEFAULT":
            raise ConfigError(
                "train.portable: this processor has no AVX2; leave train.portable out."
            )
        if found != "AVX2":
            needed = " ".join(f"{key}={value}" for key, value in PORTABLE.items())
            raise ConfigError(
                f"train.portable: this process has computed with {found} already; start another "
                f"one with {needed} in its environment."
            )
    if portable and not _kept:
        _round_roots()
    _portable = portable


def _round_roots() -> None:
    """Computes square roots on a CPU by NumPy, rounded as IEEE 754 says. Torch's come from MKL and
    begin with an instruction that differs between makers of processors.
    """
    import numpy as np
    import torch

    def root(x: torch.Tensor) -> torch.Tensor:
        if not (x.is_complex() or x.dtype in (torch.float32, torch.float64)):
            wide = torch.float32 if x.is_floating_point() else torch.get_default_dtype()
            return root(x.to(wide)).to(x.dtype if x.is_floating_point() else wide)
        with np.errstate(invalid="ignore"):
            found = np.sqrt(x.detach().resolve_conj().resolve_neg().numpy())
        return torch.from_numpy(np.asarray(found))

    def into(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(x.shape).copy_(root(x))

    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("sqrt", root, "CPU")
    kernels.impl("sqrt_", lambda x: x.copy_(root(x)), "CPU")
    kernels.impl("sqrt.out", into, "CPU")
    _kept.append(kernels)


def is_portable() -> bool:
    """Returns whether this process computes with `train.portable`."""
    return bool(_portable)


def processor() -> str:
    """Returns its maker and the widest instructions that torch has kernels for, such as
    `AuthenticAMD with AVX2`. Torch is not asked, since it would then choose its kernels.
    """
    known = proc.processor()
    flags = known.get("flags", "").split()
    widest = [name for name in ("avx512f", "avx2") if name in flags]
    maker = known.get("vendor_id", platform.machine())
    return f"{maker} with {widest[0].upper()}" if widest else maker


def versions() -> dict[str, str]:
    """Returns what the bits of a run may depend on beside its configuration: versions, and the
    processor, unless the bits are portable.
    """
    import torch

    from fednet import __version__

    return {
        "fednet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        **({} if _portable else {"processor": processor()}),
    }


def changed_since(events: Iterable[JsonMapping], here: Mapping[str, str]) -> str | None:
    """Returns a remark on a resumed run whose last server had other versions or another device;
    None if its bits are those of a run that was never stopped. events: the starts of its servers so
    far; here: `versions`, with the `device`.
    """
    starts = [event["versions"] for event in events]
    before = starts[-1] if starts else here
    names = [name for name in here if before.get(name, here[name]) != here[name]]
    what = ", ".join(f"{name} {before[name]}, now {here[name]}" for name in names)
    return f"its bits may differ from here on, since it was resumed with {what}." if what else None


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """Inside, torch computes as in a process that fednet started, also where a user's session has
    autocast, no gradients, or another default type or device. Afterwards the session has its own
    threads and switches again (but for the threads between operations, which torch lets be set
    once).
    """
    import torch

    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as own:
        own.callback(torch.set_num_threads, torch.get_num_threads())
        own.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        own.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        for place, name in (
            (torch.backends.cuda.matmul, "allow_tf32"),
            (torch.backends.cudnn, "allow_tf32"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.cudnn, "benchmark"),
            (torch.utils.deterministic, "fill_uninitialized_memory"),
        ):
            own.callback(setattr, place, name, getattr(place, name))
        own.enter_context(torch.inference_mode(False))
        own.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                own.enter_context(torch.autocast(device, enabled=False))
        if torch.empty(0).device.type != "cpu":
            own.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        own.callback(torch.set_default_dtype, dtype)
        yield
