"""Every switch that decides whether the same program gives the same bits, set in one place and
recorded.
"""

from __future__ import annotations

import contextlib
import os

from fednet.plain import JsonDict

# cuBLAS needs this before its first call; it is harmless without a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def settle(threads: int = 1, precision: str = "fp32") -> JsonDict:
    """Sets thread counts and determinism switches of this process; returns what was set, for the
    record.
    """
    import torch

    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        # Work has started already: then the number is fixed, and recorded below.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
    # The same as use_deterministic_algorithms(True, warn_only=True), which also imports the whole
    # of torch._inductor: 3 s.
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    tf32 = precision == "tf32"
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
        "cublas_workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }


def versions() -> dict[str, str]:
    """The versions of what the bits of a run may depend on, beside its configuration."""
    import platform

    import torch

    from fednet import __version__

    return {
        "fednet": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
