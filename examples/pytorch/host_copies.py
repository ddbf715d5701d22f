# SPDX-License-Identifier: Apache-2.0
"""Copies in the host's memory, which on the CPU device is what PyTorch's own allocator gives."""
import torch

ALL_SIZES = 1 << 62  # allocations below this size are left to PyTorch


def host_copy(tensor, lms):
    """A copy of a tensor of the CPU device that does not count as the device's. `lms` is the extension module, or None
    without support."""
    usual = None if lms is None else lms.least_bytes()
    if lms is not None:
        lms.set_least_bytes(ALL_SIZES)
    try:
        return torch.empty_like(tensor).copy_(tensor)
    finally:
        if lms is not None:
            lms.set_least_bytes(usual)
