# SPDX-License-Identifier: Apache-2.0
"""The example programs run and print what is expected."""
import csv
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "examples" / "pytorch"


@pytest.fixture
def example(tmp_path):
    def run(*command, launcher=()):
        done = subprocess.run([sys.executable, *launcher, *[str(part) for part in command]], capture_output=True,
                              text=True, timeout=300, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
    return run


def test_digits_are_learned_under_a_limit(example):
    out = example(FOLDER / "train_digits.py", "--epochs", 4, "--batch", 128, "--limit-mib", 20)
    accuracy, peak = re.search(r"epoch 4: .*accuracy ([\d.]+).*at most ([\d.]+) MiB", out).groups()
    assert float(accuracy) > 0.8 and float(peak) > 24
    assert not re.search(r"swapped out 0 MiB", out)


def test_a_transformer_is_tuned_to_the_same_loss_with_and_without_a_limit(example):
    def run(limit):
        out = example(FOLDER / "finetune_transformer.py", "--steps", 3, "--layers", 4, "--width", 128, "--batch", 8,
                      "--limit-mib", limit)
        return re.findall(r"loss [\d.]+|it writes: .*", out), int(re.search(r"swapped out (\d+) MiB", out)[1])
    tight, out_of_it = run(24)
    roomy, nothing = run(1000)
    assert tight == roomy and out_of_it > 10 and nothing == 0


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
def test_two_processes_train_one_model(example):
    def run(limit):
        out = example(FOLDER / "train_ddp.py", "--steps", 2, "--limit-mib", limit,
                      launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
        lines = re.findall(r"process (\d): 2 steps, parameters (\w+), loss (\S+),.* swapped out (\d+) MiB", out)
        assert [line[0] for line in lines] == ["0", "1"] and lines[0][1] == lines[1][1]
        return [line[1:3] for line in lines], [int(line[3]) for line in lines]
    tight, swapped = run(64)
    roomy, nothing = run(1000)
    assert tight == roomy and min(swapped) > 50 and nothing == [0, 0]


def test_support_makes_larger_images_train(example, tmp_path):
    out = example(FOLDER / "many_models.py", "residual", "--limit-mib", 24, "--steps", 1, "--most-image", 96,
                  "--most-batch", 1, "--csv", tmp_path / "s.csv")
    off, on = (re.search(rf"residual \| {way} \| (\w+) \|", out)[1] for way in ("off", "on"))
    assert (off, on) == ("64", "96")
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert {row["support"] for row in rows} == {"True", "False"} and any(row["ok"] == "False" for row in rows)


def test_the_benchmark_of_operations_runs(example):
    out = example(FOLDER / "bench_ops.py", "--rounds", 1)
    assert "add_, 2 tensors" in out and "worst case" in out


def test_the_benchmark_of_swapping_separates_what_copies_cost(example):
    row = json.loads(example(FOLDER / "bench_swap.py", "mlp", "--rounds", 1, "--steps", 3, "--layers", 2, "--json"))
    assert row["copied_bytes"] > row["peak_bytes"] // 8 and row["frames"] > 50
    assert 0 < row["copies_ms"] < row["capped_ms"]


def train_for_benchmark(example, *how):
    return json.loads(example(FOLDER / "bench_lms.py", "--worker", "--steps", 3, "--batch", 2, *how))


def test_the_benchmark_of_training_compares_equal_trainings(example):
    stock, capped = train_for_benchmark(example), train_for_benchmark(example, "--limit", 20 << 20)
    assert capped["digest"] == stock["digest"] and capped["losses"] == stock["losses"]
    assert capped["stats"]["swap_out_bytes"] > 20 << 20 and len(capped["seconds"]) == 3


def test_the_benchmark_of_training_times_recomputation_when_it_is_tuned(example):
    net = ("--net", "transformer")
    stock = train_for_benchmark(example, *net)
    run = train_for_benchmark(example, *net, "--kind", "recompute", "--limit", 9 << 20)
    assert run["digest"] == stock["digest"] and run["losses"] == stock["losses"] and len(run["seconds"]) == 3
    assert 0 < run["stats"]["swap_out_bytes"] < 150 << 20, "of three steps, not of all"


def test_paged_inference_reads_less_than_copying_all_layers(example):
    rows = json.loads(example(FOLDER / "bench_page.py", "--rounds", 6, "--width", 512, "--json"))
    assert rows["page"]["out_mib"] < 1 and rows["chunk"]["out_mib"] < 1  # no weights, which have 24 MiB
    assert 0 < rows["page"]["in_mib"] < 0.8 * rows["copy in, use, drop"]["in_mib"], rows
