#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/rooms.svg: the folders of include/spillway/, each above what it may include.

usage: draw-rooms.py [--check]

The picture is compared with the table of layers in tests/compile/layering.py. It is an error if a layer has no room, a room
has no layer, or a room is not above all that it may include. With --check nothing is written: it is an error if the
picture in the tree is not up to date.
"""
import pathlib
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/compile"))
import picture  # noqa: E402
from layering import LAYERS  # noqa: E402

WIDTH, MARGIN, GAP, HEAD = 960, picture.MARGIN, 10, 64

DOOR, PART, GROUND = "door", "part", "ground"
# The floors from top to bottom. A room has a kind that says what it is to a user, a name, a share of the floor's width, a
# text, and the layers that it contains. A header directly in include/spillway/ is in the room of the folder it belongs to.
FLOORS = [
    [(DOOR, "spillway.hpp", 1, "the door: all that is public and needs nothing beside the standard library and POSIX",
      ["spillway.hpp"])],
    [(DOOR, "interop", 1, "torch and tensorflow, and framework, which both share; DLPack, Thrust, cuda::mr, mdspan",
      ["interop"])],
    [(DOOR, "sim.hpp, cuda.hpp", 2, "a door for each kind of device", ["sim.hpp", "cuda.hpp", "cuda_codecs.hpp", "cuda_kernels.cuh", "nvcomp_codecs.cuh"]),
     (DOOR, "observe", 3, "timeline, memory snapshot, summary, statistics as JSON", ["observe"]),
     (DOOR, "testing", 4, "contracts, faults, stepped streams: for those who write devices and policies", ["testing"])],
    [(DOOR, "device_allocator.hpp", 1, "owns one of each part below, as a bundle of policies chooses them; gives out leases",
      ["device_allocator.hpp"])],
    [(PART, "pager", 5, "where each block is, who leases it, how room is made, how blocks come and go", ["pager"]),
     (DOOR, "device_share.hpp", 3, "what of a device is this program's; share: what is fair", ["device_share.hpp", "share"]),
     (DOOR, "policies.hpp", 3, "the default bundle of a device", ["policies.hpp"])],
    [(PART, "arena", 4, "free ranges, search for room; defrag_arena.hpp moves blocks, page_arena.hpp maps pages",
      ["arena", "defrag_arena.hpp", "page_arena.hpp"]),
     (PART, "host", 4, "host_swap_pool.hpp: pinned slabs, pageable memory, a file; one way in, one way out",
      ["host", "host_swap_pool.hpp"]),
     (PART, "stream_prefetcher.hpp", 3, "what will be needed next", ["stream_prefetcher.hpp"])],
    [(DOOR, "leases and tensors", 4, "lease.hpp, stream.hpp, swappable_buffer.hpp, swappable_tensor.hpp",
      ["swappable_tensor.hpp", "swappable_buffer.hpp", "lease.hpp", "stream.hpp"]),
     (PART, "policy", 3, "fit, eviction, compaction, prefetch", ["policy"]),
     (PART, "stream", 3, "tickets, fences, events: order of streams", ["stream"]),
     (PART, "device", 3, "cuda, host, sim: the only way to a device", ["device"])],
    [(GROUND, "concepts", 1, "what a device, an arena, a pager and a policy must be able to do", ["concepts"])],
    [(GROUND, "schedule", 1, "the recorded step of a program that repeats, and how far the program is in it", ["schedule"])],
    [(GROUND, "core", 1, "types, errors, statistics, ranges, fences, small containers", ["core"])],
]

LIGHT = """
  .name { font-size: 15px; font-weight: 600; font-family: ui-monospace, 'DejaVu Sans Mono', monospace }
  .what { font-size: 12.5px }
  .door, .part, .ground { stroke-width: 1.2; rx: 8px }
  .door { fill: #dbeafe; stroke: #2563eb }
  .part { fill: #f3f4f6; stroke: #6b7280 }
  .ground { fill: #ecfdf5; stroke: #059669 }"""
DARK = """
    .door { fill: #1e3a5f; stroke: #60a5fa }
    .part { fill: #2b303b; stroke: #9ca3af }
    .ground { fill: #064e3b; stroke: #34d399 }"""


def complaints():
    floor_of = {}
    for height, floor in enumerate(reversed(FLOORS)):
        for _, name, _, _, layers in floor:
            for layer in layers:
                if layer not in LAYERS:
                    yield f"the picture shows {layer}, which is no layer"
                floor_of[layer] = (height, name)
    for layer, below in LAYERS.items():
        if layer not in floor_of:
            yield f"{layer} is in no room of the picture"
            continue
        height, room = floor_of[layer]
        for other in below:
            if other in floor_of and floor_of[other][0] >= height and floor_of[other][1] != room:
                yield f"{layer} may include {other}, but does not stand above it"


def lines_of(text, width):
    """Breaks a text into lines of about `width` pixels. A letter of this font is 6.3 pixels wide on average."""
    lines = [""]
    for word in text.split():
        if lines[-1] and 6.3 * len(f"{lines[-1]} {word}") > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def draw():
    body, y = [], HEAD
    for floor in FLOORS:
        shares = sum(room[2] for room in floor)
        width_of = {room[1]: (WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)) * room[2] / shares for room in floor}
        text_of = {room[1]: lines_of(room[3], width_of[room[1]] - 24) for room in floor}
        height = 36 + 16 * max(map(len, text_of.values()))
        x = MARGIN
        for kind, name, _, _, _ in floor:
            width = width_of[name]
            body.append(f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}"/>')
            body.append(f'<text class="name" x="{x + 12:.0f}" y="{y + 22}">{escape(name)}</text>')
            body += [f'<text class="what" x="{x + 12:.0f}" y="{y + 42 + 16 * line}">{escape(text)}</text>'
                     for line, text in enumerate(text_of[name])]
            x += width + GAP
        y += height + GAP
    note = "Each room stands above all that it may include. Blue: what a user includes. Green: the ground that all others stand on."
    return picture.svg(WIDTH, y + MARGIN - GAP, "The rooms of spillway: each stands above all that it may include",
                       [*picture.heading("The rooms of include/spillway", note), *body], LIGHT, DARK)


def main():
    arguments = picture.parser(__doc__).parse_args()
    if wrong := list(complaints()):
        sys.exit("\n".join(wrong))
    picture.put({"rooms.svg": draw()}, arguments.check)


if __name__ == "__main__":
    main()
