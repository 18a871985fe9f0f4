"""Named tensors over one contiguous buffer.

A model's tensors are three flat vectors: its trainable parameters (float32), its float buffers
(BatchNorm's running statistics) and its integer counters (`num_batches_tracked`). Update algebra (+
- * /, dot, norm) touches the parameters only: buffers are carried along from the left operand, and
averaged where a sum of states says so (`Sum`). A copy, a hash or a message is then one pass over
one buffer, whatever the number of layers.
"""

from fednet.tensors.layout import Inputs, Layout, Slot, mapped
from fednet.tensors.sums import Sum, TwoSums, mean
from fednet.tensors.values import (
    CHUNK,
    PerClient,
    Rows,
    Tensors,
    blockwise,
    combine,
    dot,
    to_device,
)

__all__ = [
    "CHUNK",
    "Inputs",
    "Layout",
    "PerClient",
    "Rows",
    "Slot",
    "Sum",
    "Tensors",
    "TwoSums",
    "blockwise",
    "combine",
    "dot",
    "mapped",
    "mean",
    "to_device",
]
