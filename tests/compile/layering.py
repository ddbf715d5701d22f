# SPDX-License-Identifier: Apache-2.0
"""Fails when a header includes something its layer may not. Usage: layering.py <project root>

The table is in order from the bottom to the top: a layer is a folder or one header, and may include
itself and what its row names. Rows name only layers above them in this file, so there are no cycles.
"""
import pathlib
import sys

from header_table import header_files, includes_of

BASE = {"core", "schedule", "concepts"}
PARTS = BASE | {"stream", "arena", "host"}
LAYERS = {
    "core": set(),
    "schedule": {"core"},
    "concepts": {"core", "schedule"},
    "policy": BASE,
    "device": BASE,
    "stream": BASE,
    "arena": BASE | {"stream"},
    "host": BASE | {"stream"},
    "defrag_arena.hpp": BASE | {"stream", "arena", "policy"},
    "page_arena.hpp": BASE | {"stream", "arena"},
    "host_swap_pool.hpp": BASE | {"stream", "host"},
    "stream_prefetcher.hpp": BASE,
    "lease.hpp": BASE,
    "pager": PARTS | {"host_swap_pool.hpp", "stream_prefetcher.hpp", "lease.hpp"},
    "stream.hpp": BASE,
    "swappable_buffer.hpp": BASE | {"lease.hpp"},
    "swappable_tensor.hpp": BASE | {"lease.hpp", "swappable_buffer.hpp"},
    "policies.hpp": BASE | {"policy", "defrag_arena.hpp"},
}
LAYERS["device_allocator.hpp"] = set(LAYERS) - {"device"}
LAYERS["sim.hpp"] = LAYERS["cuda.hpp"] = set(LAYERS)
LAYERS["testing"] = BASE | {"device", "host"}
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
