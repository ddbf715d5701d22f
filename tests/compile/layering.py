# SPDX-License-Identifier: Apache-2.0
"""Fails when a header includes another one that its layer may not include. Usage: layering.py <project root>

A layer is a folder or one header. It may include itself and the layers that its row of the table names. The
table begins with the lowest layer. A row names only layers of earlier rows, so there are no cycles.
"""
import pathlib
import sys

from header_table import header_files, includes_of

BASE = {"core", "schedule", "concepts"}
LAYERS = {
    "core": set(),
    "schedule": {"core"},
    "concepts": {"core", "schedule"},
    "policy": BASE,
    "device": BASE,
    "stream": BASE,
    "lease.hpp": BASE,
    "stream.hpp": BASE,
    "swappable_buffer.hpp": BASE | {"lease.hpp"},
    "swappable_tensor.hpp": BASE | {"lease.hpp", "swappable_buffer.hpp"},
    "arena": BASE | {"stream"},
    "defrag_arena.hpp": BASE | {"arena", "policy"},
    "page_arena.hpp": BASE | {"arena", "stream"},
    "host": BASE | {"stream"},
    "host_swap_pool.hpp": BASE | {"stream", "host"},
    "stream_prefetcher.hpp": BASE,
    "share": {"core"},
    "device_share.hpp": {"core", "share"},
    "pager": BASE | {"stream", "arena", "host", "host_swap_pool.hpp", "stream_prefetcher.hpp", "lease.hpp"},
    "policies.hpp": BASE | {"policy", "defrag_arena.hpp", "host"},
    "device_allocator.hpp": BASE | {"host", "pager", "policies.hpp", "lease.hpp", "stream.hpp", "swappable_tensor.hpp"},
}
DOOR = BASE | {"device_allocator.hpp", "policies.hpp", "swappable_buffer.hpp", "swappable_tensor.hpp"}
LAYERS |= {
    "sim.hpp": DOOR | {"device"},
    "cuda.hpp": DOOR | {"device"},
    "cuda_codecs.hpp": BASE | {"device", "policy"},
    "cuda_kernels.cuh": BASE | {"device", "policy", "cuda_codecs.hpp"},
    "nvcomp_codecs.cuh": BASE | {"device", "policy", "cuda_kernels.cuh"},
    "testing": BASE | {"device", "host", "stream"},
    "observe": BASE | {"host", "pager"},
    "interop": DOOR | {"cuda.hpp", "cuda_codecs.hpp", "device", "device_share.hpp", "share", "host", "observe", "policy", "stream.hpp"},
}
LAYERS["spillway.hpp"] = set(LAYERS) - {"cuda.hpp"}


def layer_of(header: str) -> str:
    return header.split("/")[1]


def main() -> int:
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
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
