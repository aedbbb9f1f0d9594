"""Optimizers for links that are too slow to send gradients in each step. Ranks train locally and average periodically.

LocalSGD   averages the parameters every sync_every steps.
DiLoCo     uses the average change of the parameters as the gradient of an outer optimizer.
"""

from muster.optim._diloco import DiLoCo
from muster.optim._local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
