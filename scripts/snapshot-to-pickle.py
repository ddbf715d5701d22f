#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts a memory snapshot from JSON to the pickle format that PyTorch's viewers open.

Usage: snapshot-to-pickle.py IN.json OUT.pickle

View the result at https://pytorch.org/memory_viz, or with `python -m torch.cuda._memory_viz`.
"""
import json
import pickle
import sys

if len(sys.argv) != 3:
    sys.exit(__doc__)
with open(sys.argv[1], encoding="utf-8") as file:
    snapshot = json.load(file)
for segment in snapshot["segments"]:
    segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
with open(sys.argv[2], "wb") as file:
    pickle.dump(snapshot, file, protocol=4)
