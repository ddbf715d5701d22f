# SPDX-License-Identifier: Apache-2.0
"""Statistics, under the names of IBM's TensorFlow Large Model Support. Bytes count tensors of at least `least_bytes`
that operations made; on a GPU also those that were copied there. The argument `device` is ignored: it is there for
programs that were written for several devices, and here there is one.
"""
from ._bytes import summary as _summary
from ._load import C

_READERS = {
    "bytes_in_use": "Bytes on the device.",
    "peak_bytes_in_use": "The most bytes that were on the device at once.",
    "bytes_active": "Bytes that running operations use.",
    "peak_bytes_active": "The most bytes that running operations used at once.",
    "bytes_inactive": "Bytes on the device that no operation uses.",
    "bytes_fixed": "Bytes that cannot leave: their addresses are known outside of operations.",
    "bytes_reclaimed": "Bytes that left the device so far.",
    "current_bytes_reclaimed": "Bytes that are away now.",
    "peak_bytes_reclaimed": "The most bytes that were away at once.",
    "num_single_reclaims": "Tensors that left because room was needed.",
    "num_full_reclaims": "Times that everything inactive was made to leave: by `reclaim_inactive` alone. The original "
                         "does so, too, when leaving one by one has made room, but not in one piece; any room will do here.",
    "num_defragmentations": "0: memory is mapped where it is needed.",
    "bytes_defragged": "0: no byte moves.",
    "num_allocs": "Allocations so far, or since `reset_peak_stats`.",
    "largest_alloc_size": "The largest allocation since peaks began.",
    "bytes_limit": "The limit.",
    "bytes_reserved": "Bytes taken from the device: those in use, and those that are free.",
    "peak_bytes_reserved": "The most bytes that were taken from the device at once.",
    "bytes_pinned": "Bytes on the device that cannot leave now: all of them while support is off.",
    "host_bytes": "Bytes of host memory that swapped-out tensors take up.",
}


def _reader(name, text):
    def get(device=0):
        return C.raw_stats()[name] if C.is_installed() else 0
    get.__name__ = get.__qualname__ = f"get_{name}"
    get.__doc__ = text
    return get


globals().update({f"get_{name}": _reader(name, text) for name, text in _READERS.items()})
NAMES = [f"get_{name}" for name in _READERS]


def get_lms_stats(device=0):
    """Returns all these statistics, and some more, as a dictionary; empty before `install`."""
    return dict(sorted(C.raw_stats().items())) if C.is_installed() else {}


def reset_peak_stats(device=0):
    """Sets the peaks to the current values, and the counts of allocations to 0."""
    if C.is_installed():
        C.reset_stats()


def memory_summary(device=0):
    """Returns a table, as text, of what takes up memory."""
    if not C.is_installed():
        return "spillway_tf is not installed"
    now = C.raw_stats()
    rows = [
        ("limit", now["bytes_limit"]),
        ("tensors", now["bytes_allocated"]),
        ("  peak", now["peak_bytes_allocated"]),
        ("taken from the device", now["bytes_reserved"]),
        ("on the device", now["bytes_in_use"]),
        ("  used by operations", now["bytes_active"]),
        ("  never leave", now["bytes_fixed"]),
        ("away", now["current_bytes_reclaimed"]),
        ("  peak", now["peak_bytes_reclaimed"]),
        ("on the host: memory", now["host_bytes"]),
        ("on the host: file", now["file_bytes"]),
        ("written by a codec so far", now["encoded_raw_bytes"]),
        ("  as", now["encoded_stored_bytes"]),
        ("swapped out so far", now["swap_out_bytes"]),
        ("swapped in so far", now["swap_in_bytes"]),
        ("left without a copy so far", now["dropped_bytes"]),
    ]
    return "\n".join(
        _summary(rows, now["num_ooms"], *(now[f"prefetch_{outcome}"] for outcome in ("hits", "late", "wasted"))))
