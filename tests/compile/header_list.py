# SPDX-License-Identifier: Apache-2.0
"""Fails when the header list, the tree and the umbrella disagree. Usage: header_list.py <project root>

- Every file under include/ is in exactly one set of cmake/SpillwayHeaders.cmake, and is there.
- A header of SPILLWAY_HEADERS includes nothing but the standard library, POSIX and its own kind.
- spillway.hpp brings in every header of SPILLWAY_HEADERS.
"""
import collections
import pathlib
import re
import sys

from header_table import header_files, includes_of, listed_headers

UMBRELLA = "spillway/spillway.hpp"
POSIX = re.compile(r"^<(sys/\w+|unistd|fcntl|stdlib|linux/\w+|pthread|sched)\.h>$")
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
        if included.startswith("<spillway/"):
            if included[1:-1] not in plain:
                complaints.append(f"{header} is in SPILLWAY_HEADERS but {included} is not")
        elif not STANDARD.match(included) and not POSIX.match(included):
            complaints.append(f"{header} includes {included}: not the standard library or POSIX")

if UMBRELLA in plain & on_disk:
    reached = {UMBRELLA}
    frontier = [UMBRELLA]
    while frontier:
        for included in includes_of(root, frontier.pop()):
            header = included[1:-1]
            if header in plain & on_disk - reached:
                reached.add(header)
                frontier.append(header)
    complaints += [f"{UMBRELLA} does not bring in {header}" for header in sorted(plain - reached)]

print("\n".join(complaints))
sys.exit(bool(complaints))
