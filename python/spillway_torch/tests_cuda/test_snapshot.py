# SPDX-License-Identifier: Apache-2.0
"""Memory snapshots that PyTorch's own allocator writes: `python -m spillway_torch.plan snapshot.pickle`."""
import subprocess
import sys

RECORD = """
import ctypes, threading, torch
before = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # history begins later
torch.cuda.memory._record_memory_history()
first = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
second = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
side = torch.cuda.Stream()
finish = threading.Event()
wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: finish.wait())
launch = ctypes.CDLL(None).cudaLaunchHostFunc  # PyTorch loads the runtime for all
assert launch(ctypes.c_void_p(side.cuda_stream), wait, None) == 0
first.record_stream(side)
del first  # its memory is taken until the side stream is done
third = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")  # 16 MiB at once
finish.set()
del second, before
torch.cuda.synchronize()
torch.cuda.empty_cache()  # which asks whether the side stream is done
fourth = torch.empty(1000, dtype=torch.uint8, device="cuda")
torch.cuda.memory._dump_snapshot("snapshot.pickle")
"""


def test_a_snapshot_that_pytorch_wrote_is_read(script, tmp_path):
    script(RECORD)
    done = subprocess.run([sys.executable, "-m", "spillway_torch.plan", tmp_path / "snapshot.pickle"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Snapshot of device 0: 5 buffers, at most 16.0 MiB alive at once" in done.stdout, done.stdout
    assert "Fits with compaction at 16.0 MiB, 1.000 of that peak" in done.stdout, done.stdout
