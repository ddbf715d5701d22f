# SPDX-License-Identifier: Apache-2.0
"""Fails when a header includes something its layer may not. Usage: layering.py <project root>

The table is in order from the bottom to the top: a layer is a folder or one header, and may include
itself and what its row names. Rows name only layers above them in this file, so there are no cycles.
"""
import pathlib
import sys

from header_table import header_files, includes_of

BASE = {"core", "concepts"}
PARTS = BASE | {"stream_order.hpp", "block"}
PAGED = {"defrag_arena.hpp", "page_arena.hpp", "host_swap_pool.hpp", "stream_prefetcher.hpp"}
LAYERS = {
    "core": set(),
    "concepts": {"core"},
    "policy": BASE,
    "block": BASE | {"policy"},
    "device": BASE,
    "kernel": BASE | {"device"},
    "stream_order.hpp": BASE | {"block"},
    "defrag_arena.hpp": PARTS | {"policy"},
    "staging_lane.hpp": PARTS,
    "page_arena.hpp": PARTS | {"policy"},
    "host_carrier.hpp": PARTS | {"staging_lane.hpp"},
    "host_swap_pool.hpp": PARTS | {"host_carrier.hpp"},
    "stream_prefetcher.hpp": PARTS | {"host_swap_pool.hpp"},
    "lease.hpp": BASE,
    "pager": PARTS | PAGED | {"lease.hpp"},
    "pager.hpp": PARTS | PAGED | {"lease.hpp", "pager"},
    "swappable_buffer.hpp": BASE | {"lease.hpp"},
    "host_staging.hpp": BASE,
    "swappable_tensor.hpp": BASE | {"lease.hpp", "swappable_buffer.hpp"},
    "default_policies.hpp": BASE | {"policy", "block", "device"},
    "cuda_policies.hpp": BASE | {"default_policies.hpp", "device"},
}
LAYERS["device_allocator.hpp"] = set(LAYERS)
LAYERS["observe"] = set(LAYERS)
LAYERS["interop"] = set(LAYERS)
LAYERS["spillway.hpp"] = set(LAYERS)


def layer_of(header: str) -> str:
    return header.split("/")[1]


root = pathlib.Path(sys.argv[1])
complaints = []
known = set()
for layer, below in LAYERS.items():
    complaints += [f"layering.py: {layer} names {other}, which is not below it" for other in below - known]
    known.add(layer)

for header in header_files(root):
    layer = layer_of(header)
    if layer not in LAYERS:
        complaints.append(f"{header} belongs to no layer: give it a row in layering.py")
        continue
    for included in includes_of(root, header):
        if included.startswith('"'):
            complaints.append(f"{header} includes {included}: write <spillway/...>")
        elif included.startswith("<spillway/"):
            target = layer_of(included[1:-1])
            if target != layer and target not in LAYERS[layer]:
                complaints.append(f"{header} may not include {included}")

print("\n".join(complaints))
sys.exit(bool(complaints))
