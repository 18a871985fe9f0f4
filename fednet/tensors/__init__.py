"""Named tensors over one contiguous buffer.

A model's tensors are three flat vectors: its trainable parameters (float32), its float buffers
(BatchNorm's running statistics) and its integer counters (`num_batches_tracked`). Update algebra (+
- * /, dot, norm) touches the parameters only: buffers are carried along from the left operand, and
averaged where a sum of states says so (`Sum`). A copy, a hash or a message is then one pass over
one buffer, whatever the number of layers.
"""

from fednet.tensors.layout import Inputs as Inputs
from fednet.tensors.layout import Layout as Layout
from fednet.tensors.layout import Slot as Slot
from fednet.tensors.layout import by_name as by_name
from fednet.tensors.layout import map_inputs as map_inputs
from fednet.tensors.sums import Sum as Sum
from fednet.tensors.sums import TwoSums as TwoSums
from fednet.tensors.sums import mean as mean
from fednet.tensors.values import CHUNK as CHUNK
from fednet.tensors.values import PerClient as PerClient
from fednet.tensors.values import Rows as Rows
from fednet.tensors.values import Tensors as Tensors
from fednet.tensors.values import blockwise as blockwise
from fednet.tensors.values import combine as combine
from fednet.tensors.values import dot as dot
from fednet.tensors.values import to_device as to_device
