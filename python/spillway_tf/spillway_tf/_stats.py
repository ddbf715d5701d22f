# SPDX-License-Identifier: Apache-2.0
"""Statistics, under the names of IBM's TensorFlow Large Model Support. Bytes are of what counts: tensors of
`least_bytes` and more that operations made, and on a GPU what was copied there, too. The argument is there for programs
written for several devices; there is one here."""
from ._load import C


def _reader(name, text):
    def get(device=0):
        return C.raw_stats()[name] if C.is_installed() else 0
    get.__name__ = get.__qualname__ = f"get_{name}"
    get.__doc__ = text
    return get


get_bytes_in_use = _reader("bytes_in_use", "Bytes on the device.")
get_peak_bytes_in_use = _reader("peak_bytes_in_use", "The most bytes that were on the device at once.")
get_bytes_active = _reader("bytes_active", "Bytes that running operations use.")
get_peak_bytes_active = _reader("peak_bytes_active", "The most bytes that running operations used at once.")
get_bytes_inactive = _reader("bytes_inactive", "Bytes on the device that no operation uses.")
get_bytes_fixed = _reader("bytes_fixed", "Bytes that cannot leave: their addresses are known outside of operations.")
get_bytes_reclaimed = _reader("bytes_reclaimed", "Bytes that left the device so far.")
get_current_bytes_reclaimed = _reader("current_bytes_reclaimed", "Bytes that are away now.")
get_peak_bytes_reclaimed = _reader("peak_bytes_reclaimed", "The most bytes that were away at once.")
get_num_single_reclaims = _reader("num_single_reclaims", "Tensors that left because room was needed.")
get_num_full_reclaims = _reader(
    "num_full_reclaims", "Times that everything inactive was made to leave: by `reclaim_inactive` alone. The original "
    "does so, too, when leaving one by one has made room, but not in one piece; any room will do here.")
get_num_defragmentations = _reader("num_defragmentations", "0: memory is mapped where it is needed.")
get_bytes_defragged = _reader("bytes_defragged", "0: no byte moves.")
get_num_allocs = _reader("num_allocs", "Allocations so far.")
get_largest_alloc_size = _reader("largest_alloc_size", "The largest allocation so far.")
get_bytes_limit = _reader("bytes_limit", "The limit.")
get_bytes_reserved = _reader("bytes_reserved", "Bytes taken from the device: those in use, and those that are free.")
get_peak_bytes_reserved = _reader("peak_bytes_reserved", "The most bytes that were taken from the device at once.")
get_bytes_pinned = _reader("bytes_pinned", "Bytes on the device that cannot leave now: all of them while support is off.")
get_host_bytes = _reader("host_bytes", "Bytes of host memory that swapped-out tensors take up.")

NAMES = [name for name in globals() if name.startswith("get_")]


def get_lms_stats(device=0):
    """All of it, and more, as a dictionary."""
    return dict(sorted(C.raw_stats().items())) if C.is_installed() else {}


def reset_peak_stats(device=0):
    """Peaks begin anew, and so do the counts of allocations."""
    if C.is_installed():
        C.reset_peaks()


def _text(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.1f} {unit}" if unit != "B" else f"{n} B"
        n /= 1024


def memory_summary(device=0):
    """What takes memory, as a table."""
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
        ("swapped out so far", now["swap_out_bytes"]),
        ("swapped in so far", now["swap_in_bytes"]),
        ("left without a copy so far", now["dropped_bytes"]),
    ]
    width = max(len(name) for name, _ in rows)
    lines = ["spillway_tf memory"] + [f"  {name:<{width}}  {_text(n):>12}" for name, n in rows]
    lines.append(f"  out of memory: {now['num_ooms']}, prefetched in time: {now['prefetch_hits']}, "
                 f"late: {now['prefetch_late']}, for nothing: {now['prefetch_wasted']}")
    return "\n".join(lines)
