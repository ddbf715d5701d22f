# SPDX-License-Identifier: Apache-2.0
"""Fails when the header list, the tree and the entry headers disagree. Usage: header_list.py <project root>

- Every file under include/ is in exactly one set of cmake/SpillwayHeaders.cmake, and every listed file exists.
- A header of SPILLWAY_HEADERS includes only the standard library, POSIX, vector instructions and other headers of that set,
  and the headers that OPTIONAL allows, which a program asks for with a macro.
- spillway.hpp includes every public header of SPILLWAY_HEADERS, directly or not, except for testing/ and the device for
  planning. A header is public if it declares something in namespace spillway itself.
- An entry header (a "door", such as cuda.hpp) includes no header of the devices and frameworks that it excludes, so that no
  user compiles one that was not asked for.
"""
import collections
import pathlib
import re
import sys

from header_table import header_files, includes_of, listed_headers

UMBRELLA = "spillway/spillway.hpp"
FRAMEWORKS = tuple(f"spillway/interop/{name}" for name in ("framework/", "torch", "tensorflow"))
NOT_IN_UMBRELLA = ("spillway/testing/", "spillway/device/sim/model_api.hpp") + FRAMEWORKS
DOORS = {
    UMBRELLA: ("spillway/cuda.hpp", "spillway/device/cuda/") + NOT_IN_UMBRELLA,
    "spillway/sim.hpp": ("spillway/cuda.hpp", "spillway/device/cuda/", "spillway/device/host/") + NOT_IN_UMBRELLA,
    "spillway/cuda.hpp": ("spillway/sim.hpp", "spillway/device/sim/", "spillway/device/host/") + NOT_IN_UMBRELLA,
}
OPTIONAL = {
    ("spillway/host/file_checksums.hpp", "<xxhash.h>"),
    ("spillway/host/system_file_io.hpp", "<spillway/host/cufile_io.hpp>"),
    ("spillway/host/system_file_io.hpp", "<spillway/host/io_uring_file_io.hpp>"),
    ("spillway/policy/codec/byte_planes.hpp", "<lz4.h>"),
    ("spillway/policy/codec/byte_planes.hpp", "<zstd.h>"),
}
POSIX = re.compile(r"^<(sys/\w+|unistd|fcntl|stdlib|linux/\w+|pthread|sched)\.h>$")
PROCESSOR = re.compile(r"^<[et]mmintrin.h>$")  # vector instructions, if the processor has them
STANDARD = re.compile(r"^<[a-z_0-9]+>$")

root = pathlib.Path(sys.argv[1])
sets = listed_headers(root)
plain = set(sets["SPILLWAY_HEADERS"])
complaints = []

times_listed = collections.Counter(header for headers in sets.values() for header in headers)
on_disk = set(header_files(root))
complaints += [f"{h} is in include/ but in no set of cmake/SpillwayHeaders.cmake"
               for h in sorted(on_disk - times_listed.keys())]
complaints += [f"{h} is listed but is not in include/" for h in sorted(times_listed.keys() - on_disk)]
complaints += [f"{h} is listed {n} times" for h, n in sorted(times_listed.items()) if n > 1]

for header in sorted(plain & on_disk):
    for included in includes_of(root, header):
        if (header, included) in OPTIONAL:
            continue
        if included.startswith("<spillway/"):
            if included[1:-1] not in plain:
                complaints.append(f"{header} is in SPILLWAY_HEADERS but {included} is not")
        elif not any(known.match(included) for known in (STANDARD, POSIX, PROCESSOR)):
            complaints.append(f"{header} includes {included}: not the standard library or POSIX")



def reached_from(door: str) -> set[str]:
    """Returns all headers that `door` includes, directly or not."""
    reached = {door}
    frontier = [door]
    while frontier:
        for included in includes_of(root, frontier.pop()):
            if included[1:-1] in on_disk - reached:
                reached.add(included[1:-1])
                frontier.append(included[1:-1])
    return reached


def is_public(header: str) -> bool:
    text = (root / "include" / header).read_text()
    return not header.startswith(NOT_IN_UMBRELLA) and re.search(r"^namespace spillway \{", text, re.MULTILINE)


complaints += [f"{UMBRELLA} does not bring in {header}"
               for header in sorted(plain & on_disk - reached_from(UMBRELLA)) if is_public(header)]
for door, kept_out in DOORS.items():
    complaints += [f"{door} brings in {header}"
                   for header in sorted(reached_from(door)) if header.startswith(kept_out)]

print("\n".join(complaints))
sys.exit(bool(complaints))
