# SPDX-License-Identifier: Apache-2.0
"""Runs train_beyond_memory and checks its output. Usage: check_training.py <program> <sim|cuda>

Without a GPU, `cuda` exits with 77, or fails if SPILLWAY_REQUIRE_GPU is set in the environment.
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

PROGRAM, DEVICE = sys.argv[1:]
RUN_KEYS = {"capacity_factor", "capacity_bytes", "swapping", "completed", "bitwise_equal", "final_loss",
            "test_accuracy", "step_ms", "swapped_out_bytes", "swapped_in_bytes", "dropped_bytes",
            "recomputed_bytes", "moved_bytes", "host_waits"}


def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([PROGRAM, "--device", DEVICE, *arguments], capture_output=True, text=True)
    assert done.returncode == status, (arguments, done.returncode, done.stdout, done.stderr)
    return done


def check_short_training() -> None:
    report = json.loads(run("--epochs", "1", "--capacity", "0.5", "--capacity", "0.25", "--json").stdout)
    assert report["device"] == DEVICE and report["peak_bytes"] > 10e6, report
    assert [(r["capacity_factor"], r["swapping"]) for r in report["runs"]] == [
        (0.5, False), (0.5, True), (0.25, False), (0.25, True)]
    for r in report["runs"]:
        assert RUN_KEYS <= r.keys(), r
        assert 0 < r["capacity_bytes"] <= r["capacity_factor"] * report["peak_bytes"], r
        assert r["completed"] == r["bitwise_equal"] == r["swapping"], r
        if r["swapping"]:
            assert 0 < r["final_loss"] < 3 and 0 < r["test_accuracy"] <= 1 and r["step_ms"] > 0, r
            assert r["swapped_out_bytes"] > report["peak_bytes"] - r["capacity_bytes"], r
            assert r["swapped_in_bytes"] > 0, r
        else:
            assert "out of device memory" in r["error"] and r["swapped_out_bytes"] == 0, r


def check_mnist_folder() -> None:
    """Trains on a folder in MNIST's format. In a picture of 4 x 4 pixels the column `label` is bright."""
    with tempfile.TemporaryDirectory() as folder:
        for part, count in (("train", 64), ("t10k", 20)):
            labels = bytes(i % 4 for i in range(count))
            pixels = bytes(250 if x == label else 5 for label in labels for _ in range(4) for x in range(4))
            path = pathlib.Path(folder, f"{part}-images-idx3-ubyte")
            path.write_bytes(struct.pack(">4I", 0x803, count, 4, 4) + pixels)
            path = pathlib.Path(folder, f"{part}-labels-idx1-ubyte")
            path.write_bytes(struct.pack(">2I", 0x801, count) + labels)
        report = json.loads(run("--data", folder, "--batch", "16", "--blocks", "4", "--width", "32",
                                "--capacity", "0.5", "--json").stdout)
    assert report["steps"] >= 75, report
    assert report["runs"][1]["test_accuracy"] == 1.0, report


def check_table() -> None:
    done = run("--epochs", "1", "--blocks", "4", "--capacity", "0.4")
    assert "out of memory" in done.stdout and "completed" in done.stdout, done.stdout
    assert "0.40x without swapping: spillway: out of device memory" in done.stdout, done.stdout


def check_recordings() -> None:
    """The last run with swapping is recorded, from its first step to its last."""
    with tempfile.TemporaryDirectory() as folder:
        timeline, snapshot = pathlib.Path(folder, "timeline.json"), pathlib.Path(folder, "snapshot.json")
        report = json.loads(run("--epochs", "1", "--blocks", "4", "--capacity", "0.6", "--capacity", "0.4",
                                "--timeline", str(timeline), "--snapshot", str(snapshot), "--json").stdout)
        last = report["runs"][-1]
        events = json.loads(timeline.read_text())["traceEvents"]
        swapped_out = sum(e["args"]["bytes"] for e in events if e["name"] in ("swap_out", "copy_out"))
        assert swapped_out == last["swapped_out_bytes"] > 0, (swapped_out, last)
        assert sum(e["name"] == "step" for e in events) == report["steps"], report
        if DEVICE == "sim":  # which records when copies and kernels ran
            for name in ("kernel", "copy_to_host", "copy_to_device"):
                assert any(e["name"] == name and e["ph"] == "X" and e["dur"] > 0 for e in events), name
        segments = json.loads(snapshot.read_text())["segments"]
        assert sum(s["total_size"] for s in segments) == last["capacity_bytes"], segments
    assert "cannot be opened" in run("--timeline", "/nonexistent/timeline.json", status=2).stderr
    with tempfile.TemporaryDirectory() as folder:
        pictures, recording = pathlib.Path(folder, "pictures.csv"), pathlib.Path(folder, "recording.json")
        pictures.write_text("1,2\n3,4\n5,5\n")
        for option in ("--timeline", "--snapshot"):
            done = run("--data", str(pictures), option, f"{folder}/./pictures.csv", status=2)
            assert "overwritten" in done.stderr and pictures.read_text().startswith("1,2"), done
        done = run("--timeline", str(recording), "--snapshot", f"{folder}/./recording.json", status=2)
        assert "a file for each" in done.stderr and not recording.exists(), done


def check_recomputation() -> None:
    """If the link is slower than the layers, activations are recomputed instead of copied, with the same bits."""
    arguments = ["--epochs", "1", "--blocks", "8", "--width", "16", "--batch", "64", "--capacity", "0.4",
                 "--link-gbps", "0.002", "--json"]  # a copy of 4 KiB takes 2 ms
    copied, made = (json.loads(run(*arguments, "--recompute", "--recompute-us", time).stdout)["runs"][1]
                    for time in ("10000", "10"))  # given, not measured, so that the machine's load does not matter
    assert copied["bitwise_equal"] and copied["recomputed_bytes"] == 0, copied
    assert made["bitwise_equal"] and made["recomputed_bytes"] > 0, made
    for time in ("-1", "nan"):
        assert "--recompute-us: expected a number from 0" in run("--recompute-us", time, status=2).stderr
    for link in ("0", "1e-12", "1e300"):
        assert "--link-gbps: expected GB/s from 1e-9" in run("--link-gbps", link, status=2).stderr


def check_failures() -> None:
    assert "there is no such file" in run("--data", "/nonexistent", status=2).stderr
    assert "above 0" in run("--capacity", "0", status=2).stderr
    assert "--capacity" in run("--capacity", "1e300", status=2).stderr
    assert "--batch" in run("--batch", "100000", status=2).stderr
    for seed in ("-1", "18446744073709551616"):
        assert "--seed: expected a whole number" in run("--seed", seed, status=2).stderr
    assert "--frobnicate" in run("--frobnicate", status=2).stderr
    assert run("--version").stdout.startswith("train_beyond_memory 0.")
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "--device", DEVICE, "--epochs", "1", "--blocks", "2", "--capacity", "0.5"],
                              stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "incomplete" in done.stderr, done
    done = run("--epochs", "1", "--blocks", "4", "--capacity", "0.02", "--json", status=3)
    assert not json.loads(done.stdout)["runs"][1]["completed"], done.stdout


if DEVICE == "cuda" and not os.environ.get("SPILLWAY_REQUIRE_GPU"):
    probe = subprocess.run([PROGRAM, "--device", "cuda", "--epochs", "1", "--capacity", "1"],
                           capture_output=True, text=True)
    if "no CUDA device" in probe.stderr:
        sys.exit(77)
check_short_training()
check_mnist_folder()
check_table()
check_recordings()
check_recomputation()
check_failures()
