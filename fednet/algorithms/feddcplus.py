"""FedDC+: Kim and Choi, JCSE 2022 (doi:10.5626/JCSE.2022.16.1.52): FedDC with momentum and weight
decay in the optimizer that makes the condensed images, and nowhere else. See `feddc`.

Weight decay is added after the clipping, as torch's SGD does. The momentum starts at 0 with each
condensation.
"""

from fednet.algorithms.base import *
from fednet.algorithms.feddc import FedDC


@algorithm("feddcplus")
class FedDCPlus(FedDC):
    """FedDC whose condensation has momentum and weight decay."""

    paper = "Kim & Choi, JCSE 2022 (doi:10.5626/JCSE.2022.16.1.52)"

    class Config(FedDC.Config):
        cond_momentum: Fraction = 0.9
        cond_weight_decay: NonNegative = 4e-5
