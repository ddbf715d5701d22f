# SPDX-License-Identifier: Apache-2.0
"""Random programs, which compute the same with support and without it: in eager mode, in graphs, compiled, in threads, in
pipelines and in sessions, with variables that are changed as a whole, in part and by optimizers."""
import contextlib
import functools
import gc
import hashlib
import random

import numpy as np
import tensorflow as tf

import spillway_tf
from training import evicting, run_in_threads

MOST_BYTES = 12 << 20  # of a program's tensors
STEPS = 60
SHAPES = [(1, 64), (256, 64), (2048, 64), (4096, 64), (4096, 128)]

graph_of = functools.partial(tf.function, autograph=False)


def bounded(x):
    return tf.clip_by_value(tf.where(tf.math.is_finite(x), x, 0.), -8., 8.)


# Functions of one tensor of two dimensions, neither of which is 0. They return another one.

def pass_through_list(x):
    rows = tf.raw_ops.TensorListFromTensor(tensor=x[:32], element_shape=tf.shape(x)[1:])
    rows = tf.raw_ops.TensorListSetItem(input_handle=rows, index=0, item=x[-1])
    return tf.raw_ops.TensorListStack(input_handle=rows, element_shape=tf.shape(x)[1:], element_dtype=tf.float32)


def pass_through_array(x):
    array = tf.TensorArray(tf.float32, size=0, dynamic_size=True, clear_after_read=False)
    array = array.write(0, x).write(1, -x)
    return array.read(0) + array.stack()[1]


def loop(x):
    def body(i, y, z):
        return i + 1, bounded(y * 2. - x), tf.concat([z[:1], z[1:] + y[1:]], 0)
    return tf.while_loop(lambda i, y, z: i < 3, body, (0, x, x))[2]


def choose(x):
    branch = tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2., lambda: x - 1.)
    return tf.switch_case(tf.cast(tf.abs(x[0, 0]), tf.int32) % 3, [lambda: branch, lambda: -x, lambda: x[::-1]])


def pass_through_python(x):
    y = tf.numpy_function(lambda array: array[::-1] + 1, [x], tf.float32)
    return tf.ensure_shape(tf.py_function(lambda array: array * 2. + 1., [y], tf.float32), x.shape)


def pass_through_ragged(x):
    x = x[:256]
    lengths = tf.fill(tf.shape(x)[:1], tf.shape(x)[1])
    return (tf.RaggedTensor.from_row_lengths(tf.reshape(x, [-1]), lengths) * 2.).to_tensor()


def pass_through_sparse(x):
    x = x[:, :64]
    sparse = tf.sparse.from_dense(tf.nn.relu(x))
    return tf.sparse.to_dense(sparse) + tf.sparse.sparse_dense_matmul(sparse, tf.eye(tf.shape(x)[1]))


def pass_through_bytes(x):
    return tf.ensure_shape(tf.io.parse_tensor(tf.io.serialize_tensor(x), tf.float32), x.shape)


def partition(x):
    parts = tf.range(tf.shape(x)[0]) % 2
    where = tf.dynamic_partition(tf.range(tf.shape(x)[0]), parts, 2)
    return tf.ensure_shape(tf.dynamic_stitch(where, tf.dynamic_partition(x, parts, 2)), x.shape)


def reduce_in_pipeline(x):
    rows = tf.data.Dataset.from_tensor_slices(x[:32]).map(lambda row: row + 1.).batch(4)
    return rows.reduce(tf.zeros(tf.shape(x)[1:]), lambda a, b: bounded(a + tf.reduce_sum(b, 0)))[tf.newaxis]


def differentiate(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.nn.relu(x) * x)
    return tape.gradient(y, x)


recompute = tf.recompute_grad(lambda x: tf.nn.relu(x) * x)

COMPILABLE = [
    tf.nn.relu, tf.negative, tf.identity, tf.transpose, tf.square, tf.nn.softmax, tf.stop_gradient, recompute, differentiate,
    loop, choose, pass_through_array,
    lambda x: x[::-1], lambda x: x[:1], lambda x: x[::2], lambda x: tf.roll(x, 1, axis=1),
    lambda x: tf.reshape(x, [1, -1]), lambda x: tf.sort(x, axis=0), lambda x: tf.cumsum(x, 0),
    lambda x: tf.reduce_max(x, 0, keepdims=True), lambda x: tf.tile(x[:16], [2, 1]), lambda x: tf.pad(x, [[1, 0], [0, 1]]),
    lambda x: tf.gather(x, [0, 0]), lambda x: tf.cast(tf.cast(x, tf.bfloat16), tf.float32),
    lambda x: tf.matmul(x[:, :256], x[:, :256], transpose_a=True), lambda x: tf.tensor_scatter_nd_add(x, [[0]], x[-1:]),
    lambda x: tf.bitcast(tf.bitcast(x, tf.uint8), tf.float32),
]
UNARY = COMPILABLE + [
    pass_through_list, pass_through_python, pass_through_ragged, pass_through_sparse, pass_through_bytes, partition,
    reduce_in_pipeline, lambda x: tf.scan(lambda a, row: bounded(a - row), x[:8]), lambda x: tf.map_fn(tf.sort, x[:8]),
    lambda x: tf.vectorized_map(lambda row: row[::-1], x[:256]), lambda x: tf.unique(tf.reshape(x, [-1]))[0][tf.newaxis],
]
BINARY = [tf.add, tf.multiply, tf.maximum, lambda x, y: tf.where(x > 0, x, y), lambda x, y: tf.concat([x, y[:16]], 0),
          lambda x, y: tf.add_n([x, y, x])]


def rows_of(variable, number):
    return tf.IndexedSlices(tf.fill([2, variable.shape[1]], number), [0, variable.shape[0] - 1])


def move(variable, gradient):
    slot = tf.Variable(tf.ones_like(variable))
    tf.raw_ops.ResourceApplyMomentum(var=variable.handle, accum=slot.handle, lr=0.5, grad=gradient, momentum=0.5)


CHANGES = [
    lambda v, x: v.assign(x), lambda v, x: v.assign_add(x), lambda v, x: v.assign_sub(x), move,
    lambda v, x: v[:1].assign(x[-1:]), lambda v, x: v.scatter_update(rows_of(v, 1.)), lambda v, x: v.scatter_add(rows_of(v, 2.)),
    lambda v, x: v.scatter_nd_update([[0]], x[-1:]), lambda v, x: v.scatter_max(rows_of(v, 1.)),
]
READS = [lambda v: v.read_value(), lambda v: v.value(), tf.convert_to_tensor, lambda v: tf.gather(v, [0, 0]),
         lambda v: v.sparse_read([0]), lambda v: v * 1.]
ARRAYS = [np.asarray, lambda x: np.frombuffer(x, np.float32).reshape(x.shape), lambda x: np.array(memoryview(x)),
          lambda x: tf.make_ndarray(tf.make_tensor_proto(x)), lambda x: np.stack([x[0], x[-1]])]


class Program:
    """A program that depends only on the seed; with `evicts` it sometimes evicts all tensors."""

    def __init__(self, seed, evicts=False):
        self.choices, self.numbers, self.evicts = random.Random(seed), np.random.default_rng(seed), evicts
        self.tensors, self.variables, self.results = [], [], []

    def run(self):
        steps = {self.make: 5, self.make_variable: 2, self.apply_unary: 10, self.apply_binary: 5, self.run_graph: 5,
                 self.run_compiled: 1, self.change: 10, self.change_in_graph: 3, self.train: 3, self.read: 5, self.drop: 3,
                 self.compute_in_threads: 2, self.compute_later: 1, self.run_session: 1, self.iterate: 2, self.convert: 3}
        for step in self.choices.choices(list(steps), list(steps.values()), k=STEPS):
            self.may_evict()
            step()
        for tensor in self.tensors + self.variables:
            self.note(tensor)
        return self.results

    def may_evict(self):
        if self.choices.random() < 0.3 and self.evicts:
            spillway_tf.reclaim_inactive()

    def keep(self, *tensors):
        self.tensors += map(bounded, tensors)
        while sum(tensor.shape.num_elements() for tensor in self.tensors) * 4 > MOST_BYTES:
            self.drop()

    def pick(self, *like):
        fitting = [t for t in self.tensors if all(t.shape == one.shape for one in like)]
        return self.choices.choice(fitting) if fitting else bounded(like[0] * 2.) if like else self.make()

    def pick_variable(self):
        return self.choices.choice(self.variables) if self.variables else self.make_variable()

    def function(self, functions=UNARY):
        """Returns a function that applies a few others."""
        parts = self.choices.choices(functions, k=self.choices.randint(1, 4))

        def apply(x):
            for part in parts:
                x = bounded(part(x))
            return x
        return apply

    def note(self, tensor):
        values = np.ascontiguousarray(tensor.numpy())
        self.results.append((values.shape, hashlib.sha256(values.tobytes()).hexdigest()[:12]))

    # Steps. Each takes the same random numbers whether the program evicts or not.

    def make(self):
        self.keep(tf.constant(self.numbers.integers(-8, 9, self.choices.choice(SHAPES)).astype(np.float32)))
        return self.tensors[-1]

    def make_variable(self):
        self.variables.append(tf.Variable(self.pick()))
        if len(self.variables) > 4:
            self.variables.pop(0)
        return self.variables[-1]

    def apply_unary(self):
        self.keep(self.choices.choice(UNARY)(self.pick()))

    def apply_binary(self):
        x = self.pick()
        self.keep(self.choices.choice(BINARY)(x, self.pick(x)))

    def run_graph(self):
        inner, outer, x = graph_of(self.function()), self.function(), self.pick()
        graph = graph_of(lambda y: outer(inner(y)))
        for _ in range(2):
            self.keep(graph(x))
            self.may_evict()

    def run_compiled(self):
        compiled = graph_of(self.function(COMPILABLE), jit_compile=True)
        self.keep(graph_of(lambda x: compiled(x) + 1.)(self.pick()[:64]))

    def change(self):
        v, change = self.pick_variable(), self.choices.choice(CHANGES)
        before = self.choices.choice(READS)(v)
        change(v, self.pick(v))
        v.assign(bounded(v))
        self.keep(before, self.choices.choice(READS)(v))

    def change_in_graph(self):
        v, w, change = self.pick_variable(), self.pick_variable(), self.choices.choice([c for c in CHANGES if c is not move])
        x = self.pick(v)

        @graph_of
        def graph(x):
            for _ in range(3):
                change(v, x)
                w.assign(bounded(w * 2. - 1.))
            return v * 1., w.read_value()
        self.keep(*graph(x))
        v.assign(bounded(v))

    def train(self):
        v, loss_of, optimizer = self.pick_variable(), self.function(COMPILABLE), tf.keras.optimizers.Adam(0.5)
        optimizer.build([v])

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(v)) + tf.reduce_sum(v * v)
                self.may_evict()
            gradient = bounded(tape.gradient(loss, v))
            optimizer.apply_gradients([(gradient, v)])
            return gradient
        if self.choices.random() < 0.5:
            step = graph_of(step)
        self.keep(*[step() for _ in range(2)])
        v.assign(bounded(v))

    def read(self):
        self.note(self.pick() if self.choices.random() < 0.7 else self.pick_variable())

    def drop(self):
        if self.tensors:
            self.tensors.pop(self.choices.randrange(len(self.tensors)))

    def compute_in_threads(self):
        works = [(self.function(), self.pick()) for _ in range(3)]
        made = [None] * len(works)

        def compute(i):
            function, x = works[i]
            made[i] = function(x)
        run_in_threads(*[functools.partial(compute, i) for i in range(len(works))])
        self.keep(*made)

    def compute_later(self):
        function, x = self.function(COMPILABLE), self.pick()
        tf.config.experimental.set_synchronous_execution(False)
        try:
            made = function(x)
            self.may_evict()
        finally:
            tf.config.experimental.set_synchronous_execution(True)
        self.keep(made)

    def run_session(self):
        function, x = self.function(), self.pick().numpy()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            given = tf.compat.v1.placeholder(tf.float32, x.shape)
            variable = tf.compat.v1.Variable(given, use_resource=self.choices.random() < 0.5)
            made, added = function(variable), tf.compat.v1.assign_add(variable, given)
            session.run(variable.initializer, {given: x})
            arrays = [session.run(made)]
            self.may_evict()
            session.run(added, {given: x})
            arrays += session.run([made, variable])
        self.keep(*map(tf.constant, arrays))

    def iterate(self):
        rows, v = tf.data.Dataset.from_tensor_slices(self.pick()[:256]), self.pick_variable()
        rows = self.choices.choice([
            lambda: rows.map(lambda row: row * 2., num_parallel_calls=2).batch(8).prefetch(2),
            lambda: rows.cache().repeat(2).batch(16),
            lambda: rows.map(lambda row: row + tf.reduce_max(v)).batch(8).shuffle(4, seed=1),
        ])()
        for batch in rows.take(3):
            self.keep(batch)
            self.may_evict()

    def convert(self):
        array = self.choices.choice(ARRAYS)(self.pick())
        self.may_evict()
        self.keep(tf.constant(array) + 1.)


#: Ways to make tensors leave.
WAYS = ["evicted between steps", "evicted by a thread", "under a limit"]


@functools.cache
def expected(seed):
    """What the program computes without support."""
    spillway_tf.set_lms_enabled(False)
    try:
        return Program(seed).run()
    finally:
        gc.collect()
        spillway_tf.set_lms_enabled(True)


def check_programs(way, seeds, limit):
    """Runs programs with support. Asserts that they compute the same as without, and returns how many bytes were swapped out."""
    for seed in seeds:
        expected(seed)  # before the limit is set, below which the program would not fit
    limit_before, before = spillway_tf.get_lms_limit(), spillway_tf.get_lms_stats()["swap_out_bytes"]
    if way == "under a limit":
        spillway_tf.set_lms_limit(limit)
    try:
        for seed in seeds:
            with evicting() if way == "evicted by a thread" else contextlib.nullcontext():
                results = Program(seed, evicts=way == "evicted between steps").run()
            assert results == expected(seed), f"the program of seed {seed}"
            gc.collect()
    finally:
        spillway_tf.set_lms_limit(limit_before)
    return spillway_tf.get_lms_stats()["swap_out_bytes"] - before
