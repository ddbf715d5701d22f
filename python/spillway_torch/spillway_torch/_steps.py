# SPDX-License-Identifier: Apache-2.0
"""Where one step of a program ends and the next begins, so that the next is predicted from the last."""
import weakref

from torch.optim import optimizer as _optimizer

from . import _chosen as _C

_leader = None      # the optimizer whose steps mark the boundary
_others = 0         # steps of others since the leader's last
_is_watching = False


def begin_step():
    """Marks a boundary by hand, for loops without an optimizer."""
    if _C.is_installed():
        _C.begin_step()


def _after_step(optimizer, args, kwargs):
    """With several optimizers, one of them marks the boundary: the first, as long as it is used."""
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
    global _is_watching
    if not _is_watching:
        _optimizer.register_optimizer_step_post_hook(_after_step)
        _is_watching = True
