# SPDX-License-Identifier: Apache-2.0
"""Tests in processes of their own, which fork, communicate, or change the state of the process."""
import pathlib
import subprocess
import sys

import pytest

BEGIN = """
import os, numpy as np, tensorflow as tf, spillway_tf
spillway_tf.install(limit=64 << 20, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
pile = [tf.fill((1 << 20, 10), tf.constant(i, tf.uint8)) for i in range(12)]
"""


def test_a_forked_child_reads_tensors_that_are_away(script):
    done = script(BEGIN + """
spillway_tf.reclaim_inactive()
pid = os.fork()
if pid == 0:
    good = all(t.numpy()[0, 3] == i and t.numpy()[-1, -1] == i for i, t in enumerate(pile))
    os._exit(0 if good else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert all(int(tf.reduce_max(t)) == i for i, t in enumerate(pile))
print("good")
""")
    assert done.stdout.strip() == "good", done.stderr[-2000:]


def test_children_of_a_program_whose_threads_work_read_tensors(script):
    done = script(BEGIN + """
import faulthandler, threading
pile[0].numpy()  # TensorFlow prepares for arrays once: a child that is forked in the middle of that would wait for it for ever
is_over = threading.Event()
def work():
    while not is_over.is_set():
        for t in pile:
            tf.reduce_max(t)
workers = [threading.Thread(target=work) for _ in range(2)]
for w in workers:
    w.start()
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(200, exit=True)  # a hang says where
        good = all(t.numpy()[-1, -1] == i for i, t in enumerate(pile))
        os._exit(0 if good else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
is_over.set()
for w in workers:
    w.join()
print("good")
""")
    assert done.stdout.strip() == "good", done.stderr[-2000:]


@pytest.mark.parametrize("call", ["reclaim_inactive", "begin_step"])
def test_the_program_ends_while_a_daemon_thread_calls(script, call):
    done = script(BEGIN + f"""
import threading
begun = threading.Event()
def work():
    while True:
        spillway_tf.{call}()
        begun.set()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
print("end")
""")
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr[-2000:]


def test_garbage_that_is_collected_while_a_process_forks(script):
    done = script("""
import gc, os
gc.disable()  # but for what the handlers do
def leave_garbage():
    ring = [tf.fill((1 << 20,), tf.constant(7, tf.uint8))]
    ring.append(ring)
def collect():
    leave_garbage()
    assert gc.collect() > 0
    leave_garbage()
os.register_at_fork(before=collect, after_in_parent=gc.collect, after_in_child=gc.collect)
""" + BEGIN + """
pid = os.fork()
if pid == 0:
    os._exit(0 if all(t.numpy()[-1, -1] == i for i, t in enumerate(pile)) else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
print("good")
""")
    assert done.stdout.strip() == "good", done.stderr[-2000:]


def test_another_task_is_given_tensors_that_are_away(script):
    done = script("""
import os, socket, tensorflow as tf, spillway_tf
spillway_tf.install(limit=64 << 20, least_bytes=512)
spillway_tf.set_lms_enabled(True)
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    port = one.getsockname()[1]
cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}"]})
server = tf.distribute.Server(cluster, "worker", 0)
tf.config.experimental_connect_to_cluster(cluster)
x = tf.ones((512, 512)) + 0.0
spillway_tf.reclaim_inactive()
with tf.device("/job:worker/task:0"):
    y = x + 1.0
print(float(tf.reduce_sum(y)), flush=True)
os._exit(0)  # the server would not end
""")
    assert done.stdout.split() == ["524288.0"], done.stderr[-2000:]


SERVER_OF_ITS_OWN = """
import os, tensorflow as tf, spillway_tf
from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2
from tensorflow.python.eager import context
spillway_tf.install(limit=64 << 20, least_bytes=512)
spillway_tf.set_lms_enabled(True)
server = tf.distribute.Server.create_local_server()
def connect():
    cluster = cluster_pb2.ClusterDef()
    cluster.job.add(name="client").tasks[0] = "127.0.0.1:0"
    cluster.job.add(name="local").tasks[0] = server.target.removeprefix("grpc://")
    context.set_server_def(tensorflow_server_pb2.ServerDef(cluster=cluster, job_name="client", protocol="grpc"))
there = "/job:local/replica:0/task:0/device:CPU:0"
"""


def test_another_task_that_cannot_reach_this_one_is_given_tensors(script):
    done = script(SERVER_OF_ITS_OWN + """
connect()
ones = tf.ones((512, 512))
x, y, variable = ones + 0.0, ones + 1.0, tf.Variable(ones * 2)
spillway_tf.reclaim_inactive()
with tf.device(there):
    remote = tf.Variable(x + 1.0)
    sums = [tf.reduce_sum(z) for z in (remote, variable + 1.0, tf.function(lambda: x + 3.0)())]
remote.assign_add(y)
print([float(z) / 512**2 for z in sums + [tf.reduce_sum(remote)]], flush=True)
os._exit(0)  # the server would not end
""")
    assert done.stdout.strip() == "[2.0, 3.0, 4.0, 4.0]", done.stderr[-2000:]


def test_another_task_is_given_tensors_from_before_the_program_was_connected(script):
    done = script(SERVER_OF_ITS_OWN + """
x = tf.ones((512, 512)) + 0.0
connect()
spillway_tf.reclaim_inactive()
with tf.device(there):
    print(float(tf.reduce_sum(x + 1.0)) / 512**2, flush=True)
os._exit(0)  # the server would not end
""")
    assert done.stdout.strip() == "2.0", done.stderr[-2000:]


def test_a_tensor_that_is_away_is_copied_to_another_task(script):
    done = script(SERVER_OF_ITS_OWN + """
connect()
x = tf.ones((512, 512)) + 0.0
spillway_tf.reclaim_inactive()
print(float(tf.reduce_sum(x._copy_to_device(there))) / 512**2, flush=True)
os._exit(0)  # the server would not end
""")
    assert done.stdout.strip() == "1.0", done.stderr[-2000:]


def test_another_task_is_given_a_packed_tensor(script):
    done = script(SERVER_OF_ITS_OWN + """
from tensorflow.python.framework import ops
connect()
with tf.device(there):
    packed = ops.pack_eager_tensors([tf.ones((512, 512))])
    print(float(tf.function(lambda x: tf.reduce_sum(x + 1.0))(packed)) / 512**2, flush=True)
os._exit(0)  # the server would not end
""")
    assert done.stdout.strip() == "2.0", done.stderr[-2000:]


def test_batches_of_calls(script):
    done = script("""
import functools, tensorflow as tf, spillway_tf
from training import run_while_everything_leaves
spillway_tf.install(limit=64 << 20, least_bytes=512)
spillway_tf.set_lms_enabled(True)

@tf.nondifferentiable_batch_function(2, 4, 10000, autograph=False)
def double(x):
    return x @ tf.eye(256) * 2
call, results = tf.function(double), {}

def run(i):
    x = tf.fill((1, 256), float(i))
    results[i] = {float(tf.reduce_sum(call(x))) for _ in range(20)}
run_while_everything_leaves(*(functools.partial(run, i) for i in range(4)))
assert results == {i: {512.0 * i} for i in range(4)}, results
print("good")
""", PYTHONPATH=str(pathlib.Path(__file__).parent))
    assert done.stdout.strip() == "good", done.stderr[-2000:]


def test_a_batch_of_eager_calls_does_not_wait_for_itself(script):
    done = script("""
import tensorflow as tf, spillway_tf
spillway_tf.install(limit=64 << 20, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
ones = tf.ones((256, 256)) + 0.0
v = tf.Variable(ones)
spillway_tf.reclaim_inactive()  # from now on room is scarce: operations run one by one

@tf.nondifferentiable_batch_function(1, 256, 1000, autograph=False)
def multiply(x):
    with tf.control_dependencies([v.assign_add(ones)]):
        return x @ v
print(float(tf.reduce_sum(multiply(ones))))
""")
    assert done.stdout.split() == [str(256.0**3 * 2)], done.stderr[-2000:]


def test_collectives_whose_operands_are_made_side_by_side(script):
    done = script("""
import tensorflow as tf, spillway_tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.ops import collective_ops
from training import run_while_everything_leaves
spillway_tf.install(limit=64 << 20, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
config.experimental.collective_group_leader = "/job:localhost/replica:0/task:0"
rewrites = config.graph_options.rewrite_options
rewrites.scoped_allocator_optimization = rewriter_config_pb2.RewriterConfig.ON
rewrites.scoped_allocator_opts.enable_op.append("CollectiveReduce")
options = tf.compat.v1.RunOptions(output_partition_graphs=True)
options.experimental.collective_graph_key = 1

def run():
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        one, sums = tf.compat.v1.placeholder(tf.float32, []), []
        for device in range(2):
            with tf.device(f"CPU:{device}"):
                for k in range(3):
                    x = tf.nn.relu(tf.fill((256, 256), one * (device + k)))
                    sums.append(tf.reduce_sum(collective_ops.all_reduce(x, 2, 1, k, "Add", "Id")))
        for _ in range(50):
            data = config_pb2.RunMetadata()
            seen.append(session.run(sums, {one: 1}, options=options, run_metadata=data))
    operations.update(node.op for graph in data.partition_graphs for node in graph.node)
seen, operations = [], set()
run_while_everything_leaves(run)
assert seen == [[65536.0 * (1 + 2 * (k % 3)) for k in range(6)]] * 50, seen
assert "_ScopedAllocator" in operations, operations
print("good")
""", PYTHONPATH=str(pathlib.Path(__file__).parent))
    assert done.stdout.strip() == "good", done.stderr[-2000:]


SHARING = """
import pathlib, sys, tensorflow as tf, spillway_tf
spillway_tf.install(limit=64 << 20, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
spillway_tf.share(sys.argv[1], least="12MiB", idle_after=0.2, patience=600)
pile = [tf.fill((1 << 20, 8), tf.constant(i, tf.uint8)) for i in range(7)]
own, other = (pathlib.Path(sys.argv[1] + name) for name in sys.argv[2])
def work_until(is_enough):
    while not is_enough():
        assert all(int(tf.reduce_max(t)) == i == int(tf.reduce_min(t)) for i, t in enumerate(pile))
def limit():
    return spillway_tf.get_lms_limit() >> 20
def have_both_had_half():
    if limit() in (31, 32):
        own.touch()
    return own.exists() and other.exists()
work_until(have_both_had_half)
assert len(spillway_tf.share_members()) in (1, 2)
if sys.argv[2] == "12":
    work_until(lambda: limit() == 64)  # the other one has ended
    try:
        spillway_tf.set_lms_limit("32MiB")
    except RuntimeError as error:
        print(error)
"""


def test_processes_share_a_device(tmp_path):
    programs = [subprocess.Popen([sys.executable, "-c", SHARING, str(tmp_path / "device"), names],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for names in ("12", "21")]
    done = [program.communicate(timeout=300) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], [error[-2000:] for _, error in done]
    assert "the limit is this program's share" in done[0][0]


TURNS = """
import pathlib, sys, tensorflow as tf, spillway_tf
tf.config.threading.set_inter_op_parallelism_threads(1)
spillway_tf.install(limit=64 << 20, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
spillway_tf.share(sys.argv[1], least="4MiB", idle_after=0.2, patience=600)
own, other = (pathlib.Path(sys.argv[1] + name) for name in sys.argv[2])
x = tf.fill((6 << 20,), tf.constant(float(sys.argv[2])))  # 24 MiB
for turn in range(6):
    own.write_text(str(turn))
    while True:
        y = x * 2.0  # while one has its operand, there is no room for both that the other one needs
        assert float(tf.reduce_max(y)) == float(tf.reduce_min(y)) == 2 * float(sys.argv[2])
        del y
        if other.exists() and int(other.read_text() or 0) >= turn:
            break
"""


def test_operations_of_processes_that_do_not_fit_beside_each_other_take_turns(tmp_path):
    programs = [subprocess.Popen([sys.executable, "-c", TURNS, str(tmp_path / "device"), names],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for names in ("12", "21")]
    done = [program.communicate(timeout=300) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], [error[-2000:] for _, error in done]
