# SPDX-License-Identifier: Apache-2.0
from . import _chosen as _C
from ._bytes import summary, text_of


def memory_stats(device=None):
    """Returns the allocator's statistics as a dictionary, under the names of `torch.cuda.memory_stats` and of Large
    Model Support; empty before `install`. `allocated_bytes` counts tensors that are on the device, `pinned_bytes`
    those of them that cannot be swapped out now, and `reserved_bytes` what was taken from the device. `tensor_bytes`
    counts tensors wherever they are.

    device  ignored; for programs that pass one
    """
    return dict(sorted(_C.raw_stats().items())) if _C.is_installed() else {}


def reset_peak_memory_stats(device=None):
    """Sets the peaks to the current values. `device` is ignored."""
    if _C.is_installed():
        _C.reset_peaks()


def memory_summary(device=None, holders=10):
    """Returns a table, as text, of what takes up memory.

    device   ignored; for programs that pass one
    holders  how many of the largest tensors, and of the operations that were run again, to list
    """
    if not _C.is_installed():
        return "spillway_torch is not installed"
    holders = max(holders, 0)
    now = _C.raw_stats()
    rows = [
        ("limit", _C.limit()),
        ("taken from the device", now["reserved_bytes.all.current"]),
        ("tensors", now["tensor_bytes.all.current"]),
        ("  peak", now["tensor_bytes.all.peak"]),
        ("on the device", now["allocated_bytes.all.current"]),
        ("  peak", now["allocated_bytes.all.peak"]),
        ("  held: in use, or its address is known", now["pinned_bytes.all.current"]),
        ("    workspaces of cuBLAS", now.get("cublas_workspace_bytes", 0)),
        ("  may leave", now["allocated_bytes.all.current"] - now["pinned_bytes.all.current"]),
        ("on the host: memory", now["host.pinned_bytes"] + now["host.pageable_bytes"]),
        ("on the host: file", now["host.file_bytes"]),
        ("written by a codec so far", now["host.encoded_raw_bytes"]),
        ("  as", now["host.encoded_stored_bytes"]),
        ("free", now["free_bytes"]),
        ("  in one piece", now["largest_free_bytes"]),
        ("swapped out so far", now["swap_out_bytes"]),
        ("swapped in so far", now["swap_in_bytes"]),
        ("moved so far", now["moved_bytes"]),
        ("recomputed so far", now["recomputed_bytes"]),
        ("  copies out spared by that", now["spared_bytes"]),
    ]
    lines = summary(rows, now["num_ooms"], *(now[f"prefetch.{outcome}"] for outcome in ("hits", "late", "wasted")))
    recomputed = sorted(_C.recomputed().items(), key=lambda item: -item[1]["bytes"])
    if recomputed:
        lines.append("recomputed")
    for name, what in recomputed[:holders]:
        lines.append(f"  {text_of(what['bytes']):>12}  {name:<32}  {what['count']} times, {what['ns'] / 1e6:.1f} ms")
    lines.append("largest")
    for holder in _C.holders()[:holders]:
        where = ("kept" if holder["kept"] or holder["lent"] else "in use" if holder["in_use"] else
                 "on the device" if holder["resident"] else "on the host")
        lines.append(f"  {text_of(holder['bytes']):>12}  {holder['tensor']:<32}  {where}")
    return "\n".join(lines)
