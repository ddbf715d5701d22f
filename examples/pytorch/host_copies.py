# SPDX-License-Identifier: Apache-2.0
"""Makes copies in the host's memory. On the CPU device, PyTorch's own allocator stands for that."""
import torch

ALL_SIZES = 1 << 62  # allocations below this size are left to PyTorch


def host_copy(tensor, lms):
    """Returns a copy of a tensor of the CPU device that does not count against the device's limit. `lms` is the
    extension module, or None without support.
    """
    usual = None if lms is None else lms.least_bytes()
    if lms is not None:
        lms.set_least_bytes(ALL_SIZES)
    try:
        return torch.empty_like(tensor).copy_(tensor)
    finally:
        if lms is not None:
            lms.set_least_bytes(usual)
