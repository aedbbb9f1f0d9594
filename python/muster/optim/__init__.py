"""Optimizers for links too slow to send gradients with every step: ranks train on their own and meet now and then.

LocalSGD   averages the parameters every so many steps.
DiLoCo     takes how far the ranks have come, on average, as the gradient of an outer optimizer.
"""

from muster.optim._diloco import DiLoCo
from muster.optim._local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
