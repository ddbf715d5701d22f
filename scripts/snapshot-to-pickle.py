#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts a memory snapshot from JSON to the pickle format that PyTorch's viewers open.

Usage: snapshot-to-pickle.py IN.json OUT.pickle

View the result at https://pytorch.org/memory_viz, or with `python -m torch.cuda._memory_viz`.
"""
import json
import pickle
import sys

NAME = "snapshot-to-pickle.py"

if len(sys.argv) != 3:
    sys.exit(__doc__)
source, target = sys.argv[1:]
try:
    with open(source, encoding="utf-8") as file:
        snapshot = json.load(file)
    for segment in snapshot["segments"]:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
    with open(target, "wb") as file:
        pickle.dump(snapshot, file, protocol=4)
except OSError as error:
    sys.exit(f"{NAME}: {error.filename or target}: {error.strerror}")
except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
    sys.exit(f"{NAME}: {source} is no JSON: {error}")
except (KeyError, TypeError):
    sys.exit(f"{NAME}: {source} is no snapshot: it has no segments with a segment_pool_id; write one with "
             "spillway::write_json(file, spillway::snapshot(memory))")
