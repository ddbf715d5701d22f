# SPDX-License-Identifier: Apache-2.0
"""Training with half of the memory that it needs gives bitwise the same results."""
import copy
import csv
import types

import pytest
import tensorflow as tf

import spillway_tf
from conftest import CAPACITY
from training import Training, check_half_of_the_memory

TRAINING = Training(size=48, blocks=4, filters=16, batch=8)


@pytest.mark.parametrize("way", Training.WAYS)
def test_half_of_the_memory_gives_the_same_bits(way):
    limit, before, after = check_half_of_the_memory(lambda: TRAINING.by(way), CAPACITY, "OOM when allocating tensor")
    assert spillway_tf.get_peak_bytes_in_use() <= spillway_tf.get_lms_limit() < limit + (1 << 20)
    assert after["steps"] > before["steps"]


def test_running_out_of_memory_in_onednn_is_an_error_and_not_a_crash():
    x, kernel = tf.random.stateless_normal((2, 160, 160, 16), (1, 2)), tf.random.stateless_normal((3, 3, 16, 16), (3, 4))
    spillway_tf.set_lms_limit(5 << 20)
    for function in (lambda: tf.nn.conv2d(x, kernel, 1, "SAME"), tf.function(lambda: tf.nn.conv2d(x, kernel, 1, "SAME"))):
        with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor.*out of device memory"):
            function()


def test_statistics_of_each_step_go_to_a_file(tmp_path):
    spillway_tf.set_lms_limit(16 << 20)
    path = tmp_path / "lms.csv"
    losses, _ = TRAINING.by_fit([spillway_tf.LMSStatsLogger(path)])
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 8
    assert [int(row["step"]) for row in rows] == list(range(8))
    assert [int(row["epoch"]) for row in rows] == [0] * 4 + [1] * 4
    assert float(rows[3]["loss"]) == pytest.approx(losses[0])
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert all(0 < int(row["peak_bytes_in_use"]) <= 16 << 20 for row in rows)
    assert int(rows[-1]["swap_out_bytes"]) > int(rows[0]["swap_out_bytes"]) > 0
    allocs = [int(row["num_allocs"]) for row in rows]
    assert all(before < after for before, after in zip(allocs, allocs[1:]))  # the count includes all steps so far
    assert int(rows[0]["bytes_limit"]) == 16 << 20
    some = tmp_path / "some.csv"
    TRAINING.by_fit([spillway_tf.LMSStatsLogger(some, start=2, stop=4)])
    assert [row["step"] for row in csv.DictReader(some.open())] == ["2", "3"]


def test_statistics_of_several_steps_that_run_at_once_are_one_line(tmp_path):
    for steps_at_once, options, numbers in [(2, {}, [1, 3, 5, 7]), (3, {}, [2, 3, 6, 7]), (2, {"start": 3, "stop": 6}, [3, 5])]:
        path = tmp_path / "lms.csv"
        TRAINING.by_fit([spillway_tf.LMSStatsLogger(path, **options)], steps_at_once)
        rows = list(csv.DictReader(path.open()))
        assert [int(row["step"]) for row in rows] == numbers
        assert [int(row["epoch"]) for row in rows] == [number // 4 for number in numbers]


def test_a_training_step_that_is_one_operation_is_warned_of(tmp_path):
    logger = spillway_tf.LMSStatsLogger(tmp_path / "x.csv")
    logger.set_model(types.SimpleNamespace(jit_compile=True, run_eagerly=False))  # a real one conflicts with op determinism
    with pytest.warns(UserWarning, match="jit_compile=False"):
        logger.on_train_begin()
    logger.on_train_end()


def test_a_logger_keeps_no_file_after_a_training(tmp_path):
    """It can be copied then, as tuners do, and leaves none open if a training ended in an error."""
    logger = spillway_tf.LMSStatsLogger(tmp_path / "x.csv")
    logger.set_model(types.SimpleNamespace(jit_compile=False))
    logger.on_train_begin()
    file = logger._file
    logger.on_train_begin()  # of the next training
    assert file.closed
    logger.on_train_end()
    assert copy.deepcopy(logger) is not logger
