"""A fingerprint of the bits that this machine computes.

Two machines whose fingerprints agree compute the same bits for the operations that training is made
of; where they differ, runs placed across them cannot be bit-identical.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fednet.seeds import rng

if TYPE_CHECKING:
    import torch


def fingerprint(device: str = "cpu") -> str:
    """SHA-256 over the bytes of a fixed matrix product, convolution, normalisation, five SGD
    steps and the square roots that adaptive optimizers take, in float32.
    """
    import torch
    from torch.nn import functional as F

    draw = rng(0, "doctor")

    def made(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape).astype("float32")).to(device)

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    threads = torch.get_num_threads()
    flags = cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32, cudnn.allow_tf32
    torch.set_num_threads(1)
    cudnn.deterministic, cudnn.benchmark = True, False
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        whole = hashlib.sha256()

        def take(x: torch.Tensor) -> None:
            whole.update(x.detach().to("cpu").contiguous().view(-1).numpy().tobytes())

        take(made(173, 259) @ made(259, 131))
        images, target = made(16, 3, 20, 20), torch.arange(16, device=device) % 10
        kernel, bias, head = made(8, 3, 5, 5) * 0.1, made(8), made(8 * 8 * 8, 10) * 0.05
        weights = [w.requires_grad_() for w in (kernel, bias, head)]
        step = torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-4)
        for _ in range(5):
            step.zero_grad()
            hidden = F.max_pool2d(torch.relu(F.conv2d(images, kernel, bias)), 2)
            hidden = F.group_norm(hidden, 2)
            loss = F.cross_entropy(hidden.flatten(1) @ head, target)
            loss.backward()
            step.step()
            take(loss.reshape(1))
        for w in weights:
            take(w)
        take(images.abs().sqrt())
        return whole.hexdigest()
    finally:
        torch.set_num_threads(threads)
        cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32, cudnn.allow_tf32 = flags
