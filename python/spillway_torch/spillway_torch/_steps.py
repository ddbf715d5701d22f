# SPDX-License-Identifier: Apache-2.0
"""Finds where one step of a program ends and the next begins, so that each step can be predicted from the last."""
import weakref

from torch.optim import optimizer as _optimizer

from . import _chosen as _C

_leader = None      # the optimizer whose steps mark the boundary
_others = 0         # steps of other optimizers since the leader's last one
_is_watching = False


def begin_step():
    """Marks the start of a step. Only needed in loops without an optimizer of PyTorch. Does nothing before `install`.
    """
    if _C.is_installed():
        _C.begin_step()


def _after_step(optimizer, args, kwargs):
    """Begins a step after a step of the leading optimizer. The first optimizer leads, until it is gone or other
    optimizers have made more than 16 steps since its last; then the one that makes a step leads.
    """
    global _leader, _others
    leader = _leader() if _leader is not None else None
    if leader is None or _others > 16:
        _leader, leader = weakref.ref(optimizer), optimizer
    if leader is optimizer:
        _others = 0
        _C.begin_step()
    else:
        _others += 1


def watch_optimizers():
    """Makes every step of an optimizer call `_after_step`."""
    global _is_watching
    if not _is_watching:
        _optimizer.register_optimizer_step_post_hook(_after_step)
        _is_watching = True
