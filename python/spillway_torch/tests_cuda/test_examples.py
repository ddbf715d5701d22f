# SPDX-License-Identifier: Apache-2.0
"""The example programs on a CUDA device."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "examples" / "pytorch"
RUN = "import runpy, sys, kernels; kernels.install(waits=True); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture
def example(tmp_path):
    def run(program, *options, launcher=()):
        command = launcher or ("-c", RUN)
        path = os.pathsep.join([str(HERE), str(FOLDER), *sys.path])
        done = subprocess.run([sys.executable, *command, str(FOLDER / program), *map(str, options), "--device", "cuda"],
                              capture_output=True, text=True, timeout=300, cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
    return run


def test_digits_are_learned_under_a_limit(example):
    out = example("train_digits.py", "--epochs", 2, "--batch", 128, "--limit-mib", 20)
    loss, out_of_it = re.search(r"epoch 2: loss ([\d.]+).* swapped out (\d+) MiB", out).groups()
    assert float(loss) < 1.5 and int(out_of_it) > 20


def test_a_model_trains_that_does_not_fit(example):
    out = example("many_models.py", "residual", "--worker", "--support", "--limit-mib", 24, "--image", 96, "--batch", 4)
    steps = [json.loads(line) for line in out.splitlines()]
    assert len(steps) == 2 and steps[-1]["peak_mib"] > 24 and steps[-1]["swapped_out_mib"] > 0


def test_paged_inference_reads_less_than_copying_all_layers(example):
    rows = json.loads(example("bench_page.py", "--rounds", 6, "--width", 512, "--json"))
    assert rows["page"]["out_mib"] < 1 and rows["chunk"]["out_mib"] < 1
    assert 0 < rows["page"]["in_mib"] < 0.8 * rows["copy in, use, drop"]["in_mib"], rows


def test_a_transformer_is_tuned_under_a_limit(example):
    out = example("finetune_transformer.py", "--steps", 3, "--layers", 4, "--width", 256, "--limit-mib", 64, "--bf16")
    assert int(re.search(r"swapped out (\d+) MiB", out)[1]) > 0


@pytest.mark.gpu
def test_processes_train_one_model_with_nccl(example):
    count = min(2, torch.cuda.device_count())
    out = example("train_ddp.py", "--steps", 3, "--limit-mib", 64,
                  launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)))
    lines = re.findall(r"process \d: 3 steps, parameters (\w+),.* swapped out (\d+) MiB", out)
    assert len(lines) == count and len({digest for digest, _ in lines}) == 1 and all(int(n) > 0 for _, n in lines)
