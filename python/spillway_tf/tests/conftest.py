# SPDX-License-Identifier: Apache-2.0
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tensors on a GPU are tested in ../tests_gpu

import numpy as np
import pytest
import tensorflow as tf

import spillway_tf
from spillway_tf import _shims
from spillway_tf._load import C

pytest.register_assert_rewrite("training")  # so that its failed assertions show values
import training
from program_server import ProgramServer

CAPACITY = 512 << 20
spillway_tf.install(limit=CAPACITY, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
tf.config.experimental.enable_op_determinism()


@pytest.fixture(autouse=True)
def clean():
    yield from training.clean_slate(CAPACITY)


class Lms:
    """Short names of functions that tests call often."""

    evict = staticmethod(spillway_tf.reclaim_inactive)
    stats = staticmethod(spillway_tf.get_lms_stats)

    @staticmethod
    def view(tensor):
        values = _shims.values_of(tensor)
        return C.view(_shims.address_of(values[0]))

    @staticmethod
    def is_away(tensor):
        seen = Lms.view(tensor)
        return seen["ours"] and not seen["resident"]

    @staticmethod
    def is_ours(tensor):
        return Lms.view(tensor)["ours"]


@pytest.fixture
def lms():
    return Lms


@pytest.fixture
def evicted():
    """A function that evicts tensors and returns copies of their values."""
    def make(*tensors):
        copies = [np.array(t.numpy()) for t in tensors]
        spillway_tf.reclaim_inactive()
        for t in tensors:
            assert Lms.is_away(t)
        return copies
    return make


@pytest.fixture(scope="session")
def program_server():
    server = ProgramServer("tensorflow")
    yield server
    server.close()


@pytest.fixture
def script(program_server, tmp_path):
    """A function that runs Python code in a new process and returns its result and output. It fails if the code uses a tensor
    outside of operations while the tensor is away, or with `is_used_outside`, if it does not."""
    def run(code, is_used_outside=False, **environment):
        done = program_server.run(code, tmp_path, **environment)
        assert ("of a tensor was used outside of any operation" in done.stderr) == is_used_outside, done.stderr[-2000:]
        return done
    return run


def random(*shape, seed=1):
    """Returns a tensor that is the result of an operation."""
    return tf.random.stateless_normal(shape, (seed, 2))
