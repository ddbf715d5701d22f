# SPDX-License-Identifier: Apache-2.0
"""Uses of a tensor's bytes in all ways that TensorFlow has, while the tensor is away."""
import copy
import ctypes
import functools
import gc
import pickle
import tempfile
import threading

import numpy as np
import pytest
import tensorflow as tf

import spillway_tf
from conftest import random
from spillway_tf import _shims
from spillway_tf._load import C
from training import run_in_threads, run_while_everything_leaves

v1 = tf.compat.v1


def test_operations_bring_their_operands_in(lms, evicted):
    x, y = random(512, 512, seed=1), random(512, 512, seed=2)
    a, b = evicted(x, y)
    assert np.array_equal((x + y).numpy(), a + b)
    assert np.array_equal((x * x).numpy(), a * a)


def test_numpy_gets_a_copy_and_the_tensor_may_leave_again(lms, evicted):
    x = random(512, 512)
    a, = evicted(x)
    arrays = [x.numpy(), np.array(x), np.asarray(x), x.__array__(), np.asarray(memoryview(x)), np.stack([x])[0]]
    lms.evict()
    assert lms.is_away(x)
    for array in arrays:
        assert np.array_equal(array, a)


def test_buffers_are_read_only_and_live_as_long_as_they_are_used(lms, evicted):
    x = random(512, 512)
    a, = evicted(x)
    array = np.frombuffer(x, np.float32)
    later = [np.full((512, 512), 7, np.float32) for _ in range(5)]  # would get the memory of a buffer that was freed
    lms.evict()
    assert lms.is_away(x)
    assert np.array_equal(array.reshape(512, 512), a) and later
    assert memoryview(x).readonly
    for view in (array, np.asarray(memoryview(x)), np.asarray(x)):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    with pytest.raises(TypeError, match="not writable"):
        ctypes.c_char.from_buffer(x)
    assert np.array_equal(x.numpy(), a)


@pytest.mark.parametrize("part", [slice(256, None), slice(3, 4), 7])
def test_numpy_of_a_part_that_shares_its_memory(lms, evicted, part):
    x = random(512, 512)
    y = x[part]
    a, = evicted(x)
    assert np.array_equal(y.numpy(), a[part])
    lms.evict()
    assert lms.is_away(x)
    assert np.array_equal(np.asarray(memoryview(y)), a[part])
    array = y.numpy()
    lms.evict()
    assert np.array_equal(array, a[part])
    with spillway_tf.hold(y):
        lms.evict()
        assert not lms.is_away(x)


def test_bfloat16_and_other_types_come_back(evicted):
    for dtype in (tf.bfloat16, tf.float16, tf.float64, tf.int8, tf.int64, tf.complex64, tf.bool):
        x = tf.cast(random(256, 256) * 8, dtype)
        a, = evicted(x)
        assert np.array_equal(x.numpy(), a)


def test_copies_and_pickles(evicted):
    x = random(512, 512)
    a, = evicted(x)
    assert np.array_equal(copy.deepcopy(x).numpy(), a)
    evicted(x)
    assert np.array_equal(pickle.loads(pickle.dumps(x)).numpy(), a)
    evicted(x)
    assert repr(x).startswith("<tf.Tensor")


def test_dlpack_keeps_the_tensor(lms, evicted):
    x = random(512, 512)
    a, = evicted(x)
    array = np.from_dlpack(x)
    lms.evict()
    assert not lms.is_away(x)
    assert np.array_equal(array, a)
    y = random(512, 512, seed=3)
    b, = evicted(y)
    z = tf.experimental.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(y))
    lms.evict()
    assert np.array_equal(z.numpy(), b)


def test_dlpack_functions_that_were_imported_before_the_installation_keep_the_tensor(script):
    done = script("""
from tensorflow.experimental.dlpack import to_dlpack, from_dlpack
import tensorflow as tf, spillway_tf
spillway_tf.set_lms_enabled(True)
x = tf.fill((512, 512), 3.0)
spillway_tf.reclaim_inactive()
y = from_dlpack(to_dlpack(x))
spillway_tf.reclaim_inactive()
print(y.numpy().sum() == 3 * 512 * 512, spillway_tf.get_lms_stats()["bytes_fixed"])
""")
    assert done.stdout.split() == ["True", str(1 << 20)], done.stderr[-2000:]


def test_bytes_that_are_written_inside_of_hold_are_kept(lms, evicted):
    x = random(512, 512)
    a, = evicted(x)
    with spillway_tf.hold(x):
        ctypes.c_float.from_address(_shims.address_of(x)).value = 42.0
    lms.evict()
    assert lms.is_away(x)
    a[0, 0] = 42.0
    assert np.array_equal(x.numpy(), a)


def test_keep_and_hold(lms, evicted):
    x, y = random(512, 512, seed=1), random(512, 512, seed=2)
    evicted(x, y)
    spillway_tf.keep(x)
    with spillway_tf.hold(y):
        lms.evict()
        assert not lms.is_away(x)
        assert not lms.is_away(y)
    lms.evict()
    assert not lms.is_away(x)
    assert lms.is_away(y)


def test_a_hold_may_be_entered_again_before_it_ends(lms):
    x = random(512, 512)
    hold = spillway_tf.hold(x)
    with hold:
        with hold:
            pass
        lms.evict()
        assert not lms.is_away(x)
    lms.evict()
    assert lms.is_away(x)


def test_a_hold_keeps_its_tensors_alive(lms):
    x = random(512, 512)
    address = _shims.address_of(x)
    with spillway_tf.hold([x]):
        del x
        gc.collect()
        assert C.view(address)["in_use"]
    gc.collect()
    assert not C.view(address)["ours"]


def test_a_hold_finds_the_memory_that_a_variable_has_when_it_is_entered(lms):
    v = tf.Variable(random(512, 512, seed=1))
    hold = spillway_tf.hold(v)
    v.assign(random(512, 512, seed=2))
    with hold:
        lms.evict()
        assert not lms.is_away(v)
    lms.evict()
    assert lms.is_away(v)


def test_keep_and_hold_take_collections_and_models(lms, evicted):
    x, v = random(512, 512, seed=1), tf.Variable(random(512, 512, seed=2))
    dense = tf.keras.layers.Dense(512)
    dense.build((512, 512))
    named = [x, v, dense.kernel]
    objects = [x, {"v": v, "none": None}], dense
    evicted(*named)
    with spillway_tf.hold(*objects):
        lms.evict()
        assert not any(map(lms.is_away, named))
    lms.evict()
    assert all(map(lms.is_away, named))

    assert spillway_tf.keep(objects) is objects
    lms.evict()
    assert not any(map(lms.is_away, named))


@pytest.mark.parametrize("call", [spillway_tf.hold, spillway_tf.keep])
def test_keep_and_hold_refuse_what_they_do_not_know(call):
    with pytest.raises(TypeError, match=rf"spillway_tf.{call.__name__}\(\): tensors, variables, .* not a generator"):
        call(x for x in [random(2)])


@pytest.mark.parametrize("call", [spillway_tf.hold, spillway_tf.keep, lambda x: spillway_tf.set_codec("lossless", for_=x)])
def test_what_has_no_memory_is_refused(call):
    @tf.function
    def f(x):
        call(x)
    with pytest.raises(TypeError, match="outside of any tf.function, not a SymbolicTensor"):
        f(random(512, 512))
    with pytest.raises(TypeError, match=r"spillway_tf.*\(\): tensors, variables, .* not a ndarray"):
        call(np.zeros(3))


def test_keep_and_hold_take_tensors_that_consist_of_several(lms, evicted):
    values, indices = random(4096, seed=1), tf.range(4096, dtype=tf.int64) * 2
    ragged = tf.RaggedTensor.from_row_splits(values, tf.range(2049, dtype=tf.int64) * 2, validate=False)
    sparse = tf.SparseTensor(tf.reshape(indices, (-1, 1)), values, (8192,))  # the indices share their memory
    slices = tf.IndexedSlices(values, indices)
    for whole, parts in ((ragged, (values, ragged.row_splits)), (sparse, (values, indices)), (slices, (values, indices))):
        evicted(*parts)
        with spillway_tf.hold(whole):
            lms.evict()
            assert not any(map(lms.is_away, parts))
        lms.evict()
        assert all(map(lms.is_away, parts))
    spillway_tf.keep(slices)
    lms.evict()
    assert not lms.is_away(values) and not lms.is_away(indices)


def test_keep_and_hold_find_the_memory_of_a_variable_after_a_sparse_update(lms):
    v = tf.Variable(random(512, 512))
    v.scatter_update(tf.IndexedSlices(tf.ones((1, 512)), [3]))  # from here on a read is a copy
    fixed = spillway_tf.get_bytes_fixed()
    spillway_tf.keep(v)
    assert spillway_tf.get_bytes_fixed() == fixed + (1 << 20)
    v.scatter_update(tf.IndexedSlices(tf.ones((1, 512)), [4]))
    lms.evict()
    assert spillway_tf.get_bytes_fixed() == fixed + (1 << 20)
    assert not lms.is_away(v)
    assert np.array_equal(v.numpy()[3:5], np.ones((2, 512)))


def test_variables_leave_and_are_changed_in_place(lms, evicted):
    v = tf.Variable(random(512, 512))
    a, = evicted(v)
    v.assign_add(v * 2)
    evicted(v)
    v.assign_sub(tf.ones((512, 512)))
    evicted(v)
    assert np.array_equal(v.numpy(), a + a * 2 - 1)
    w = v.read_value()
    evicted(v)
    v.assign(w + 1)
    assert np.array_equal(w.numpy() + 1, v.numpy())


def test_a_variable_that_others_read_is_not_changed_under_them(evicted):
    v = tf.Variable(random(512, 512))
    old = v.read_value()
    a, = evicted(v)
    v.assign_add(tf.ones((512, 512)))
    evicted(v)
    assert np.array_equal(old.numpy(), a)
    assert np.array_equal(v.numpy(), a + 1)


def test_what_was_only_read_leaves_without_being_copied(lms, evicted):
    v = tf.Variable(random(512, 512))
    evicted(v)
    _ = v + 1
    before = lms.stats()
    lms.evict()
    after = lms.stats()
    assert lms.is_away(v)
    assert after["dropped_bytes"] - before["dropped_bytes"] >= 1 << 20


def test_what_is_changed_in_place_leaves_with_what_was_changed(lms):
    @tf.function
    def f(seed):
        xs = [tf.random.stateless_normal((512, 512), (seed, i)) for i in range(6)]
        for function in (tf.sin, tf.cos, tf.tanh, tf.abs, tf.sqrt):  # in place: nothing else uses the operand
            with tf.control_dependencies(xs):
                xs = [function(x) for x in xs]
        return [tf.reduce_sum(x, axis=0) for x in xs]
    seed = tf.constant(1)
    expected = [x.numpy() for x in f(seed)]
    spillway_tf.set_lms_limit(4 << 20)
    before = lms.stats()
    for _ in range(3):
        for a, b in zip(f(seed), expected):
            assert np.array_equal(a.numpy(), b)
    after = lms.stats()
    assert after["swap_in_bytes"] > before["swap_in_bytes"]


def test_sparse_updates_and_lookups(lms, evicted):
    v = tf.Variable(random(4096, 64))
    a, = evicted(v)
    picked = tf.gather(v, [1, 5, 4095])
    assert np.array_equal(picked.numpy(), a[[1, 5, 4095]])
    lms.evict()
    v.scatter_update(tf.IndexedSlices(tf.zeros((2, 64)), tf.constant([0, 7])))  # later reads copy the variable
    a[[0, 7]] = 0
    lms.evict()
    assert np.array_equal(v.read_value().numpy(), a)
    lms.evict()
    v.assign(v * 2)
    lms.evict()
    assert np.array_equal(v.numpy(), a * 2)
    lms.evict()
    v[3:5].assign(tf.ones((2, 64)))
    assert np.array_equal(v.numpy()[3:5], np.ones((2, 64)))


def test_embeddings_train(lms):
    def train(evicts):
        tf.keras.utils.set_random_seed(3)
        table = tf.Variable(random(2048, 64))
        optimizer = tf.keras.optimizers.Adam(0.1)
        for i in range(4):
            if evicts:
                lms.evict()
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [i, 3, 3]) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return table.numpy()
    assert np.array_equal(train(False), train(True))


def test_loops_with_lists_of_tensors_and_their_gradients(lms):
    x = random(128, 128)

    @tf.function
    def f(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            states = tf.TensorArray(tf.float32, 0, dynamic_size=True)
            y = x
            for i in tf.range(32):
                y = tf.tanh(tf.matmul(y, x) * 0.1)
                if i % 8 == 0:
                    states = states.write(i // 8, y)
            loss = tf.reduce_sum(states.stack()) + tf.reduce_sum(y)
        return loss, tape.gradient(loss, x)

    def run():
        return [t.numpy() for t in f(x)]
    spillway_tf.reset_peak_stats()
    loss, gradient = run()
    assert spillway_tf.get_bytes_fixed() == 0
    peak = spillway_tf.get_peak_bytes_in_use()
    assert peak > 2 << 20
    spillway_tf.set_lms_limit(peak // 2)
    before = lms.stats()["swap_outs"]
    loss2, gradient2 = run()
    assert loss == loss2
    assert np.array_equal(gradient, gradient2)
    assert lms.stats()["swap_outs"] > before


def list_of_one():
    """Returns a list with one element, whose shape it does not know, and which is made when it is read."""
    return tf.raw_ops.TensorListReserve(element_shape=tf.constant(-1), num_elements=1, element_dtype=tf.int32)


@pytest.mark.parametrize("use", [
    lambda shape: tf.reshape(tf.range(128), shape),
    lambda shape: tf.raw_ops.TensorListPushBack(
        input_handle=tf.raw_ops.EmptyTensorList(element_shape=shape, max_num_elements=1, element_dtype=tf.int32),
        tensor=tf.zeros([128] + [1] * 15, tf.int32)),
    lambda shape: tf.raw_ops.TensorListReserve(element_shape=shape, num_elements=3, element_dtype=tf.int32),
    lambda shape: tf.raw_ops.TensorListGetItem(input_handle=list_of_one(), index=0, element_shape=shape,
                                               element_dtype=tf.int32),
    lambda shape: tf.raw_ops.TensorListPopBack(input_handle=list_of_one(), element_shape=shape, element_dtype=tf.int32),
], ids=["reshape", "list", "reserve", "get", "pop"])
def test_a_shape_that_lies_in_the_memory_of_a_table_is_brought_in(lms, use):
    table = tf.ones((256, 16), tf.int32) * tf.constant([128] + [1] * 15)
    row = table[5]
    assert lms.is_ours(row)
    lms.evict()
    use(row)
    lms.evict()
    assert lms.is_away(table)


def test_map_fn_vectorized_map_cond_and_nested_functions(evicted):
    x = random(64, 64, 64)
    a, = evicted(x)
    assert np.array_equal(tf.map_fn(lambda t: t + 1, x).numpy(), a + 1)
    evicted(x)
    assert np.array_equal(tf.vectorized_map(lambda t: t * 2, x).numpy(), a * 2)

    @tf.function
    def inner(t, flag):
        return tf.cond(flag, lambda: t * 3, lambda: t)

    @tf.function
    def outer(t):
        return inner(t, tf.constant(True)) - inner(t, tf.constant(False))
    evicted(x)
    assert np.array_equal(outer(x).numpy(), a * 3 - a)


def test_recomputed_gradients():
    x = tf.Variable(random(256, 256))

    @tf.recompute_grad
    def block(t):
        return tf.tanh(tf.matmul(t, t) * 0.1)

    def run():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(block(block(x)))
        return tape.gradient(loss, x).numpy()
    gradient = run()
    spillway_tf.set_lms_limit(2 << 20)
    assert np.array_equal(gradient, run())


def test_input_pipelines_use_tensors_outside_of_operations(lms, evicted):
    table = random(64, 8192)
    a, = evicted(table)
    whole = tf.data.Dataset.from_tensor_slices(table).batch(16)
    assert not lms.view(table)["may_leave"]
    lms.evict()  # the data set has the tensor's address, so the tensor must stay
    assert np.array_equal(np.concatenate([b.numpy() for b in whole]), a)

    made = tf.data.Dataset.range(8).map(lambda i: tf.fill((64, 64), tf.cast(i, tf.float32)),
                                        num_parallel_calls=2).cache()
    batches = made.batch(4).prefetch(2)
    for _ in range(2):
        for i, batch in enumerate(batches):
            _ = batch * 2  # used by an operation, so it may be evicted
            lms.evict()
            assert np.array_equal(batch.numpy()[:, 0, 0], np.arange(4 * i, 4 * i + 4))
        for i, one in enumerate(made):
            _ = one + 1
            lms.evict()
    other = random(64, 4096)
    b, = evicted(other)
    captured = tf.data.Dataset.range(4).map(lambda i: other).batch(2)
    lms.evict()
    for batch in captured:
        lms.evict()
        assert np.array_equal(batch.numpy()[1], b)
    allocs = lms.stats()["num_allocs"]
    assert len(list(made.map(lambda t: tf.sin(t + 1)).batch(4))) == 2
    assert lms.stats()["num_allocs"] == allocs  # tensors of a pipeline are in host memory


def test_what_a_pipeline_keeps_while_it_runs_inside_of_an_operation_does_not_count():
    spillway_tf.set_lms_limit(8 << 20)
    data = tf.data.Dataset.range(64).map(lambda i: tf.fill((64, 1024), tf.cast(i, tf.float32))).batch(4).cache()
    options = tf.data.Options()
    options.autotune.enabled = False  # else a prefetch is added at the end, which runs the pipeline in other threads
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.apply_default_optimizations = False  # else the batches are made by other threads
    data = data.with_options(options)  # its cache needs 16 MiB
    for _ in range(2):
        assert [float(tf.reduce_mean(x)) for x in data] == [4 * i + 1.5 for i in range(16)]
    whole = data.take(1).get_single_element()
    assert np.array_equal(whole.numpy()[:, 0, 0], range(4))
    total = data.reduce(tf.zeros((64, 1024)), lambda total, x: total + tf.reduce_sum(x, axis=0))
    assert float(total[0, 0]) == sum(range(64))
    assert spillway_tf.get_bytes_fixed() == 0


def test_a_data_set_keeps_what_it_is_given_beside_lists_and_optional_values(lms):
    optional = tf.experimental.Optional.from_value(tf.ones((64, 64)))
    a_list = tf.TensorArray(tf.float32, 4, element_shape=[10]).unstack(tf.ones((4, 10)))
    for seed, other in enumerate((optional, a_list)):
        x = random(64, 64, seed=seed)
        expected = x.numpy()
        rows = tf.data.Dataset.from_tensors((other, x)).map(lambda _, t: t)
        assert not lms.view(x)["may_leave"]
        lms.evict()
        assert np.array_equal(rows.batch(1).get_single_element()[0].numpy(), expected)


def test_a_reduction_of_a_data_set_assigns_to_a_variable(script):
    done = script("""
import tensorflow as tf, spillway_tf
spillway_tf.install(limit=64 << 20, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
v = tf.Variable(tf.zeros((256, 256)))

def add(total, i):
    v.assign_add(tf.ones((256, 256)))
    return total + i
data = tf.data.Dataset.range(5)
for reduce in data.reduce, tf.function(data.reduce):
    spillway_tf.reclaim_inactive()
    print(int(reduce(tf.constant(0, tf.int64), add)), float(tf.reduce_sum(v)) / 256**2)
""")
    assert done.stdout.split() == ["10", "5.0", "10", "10.0"], done.stderr[-2000:]


def test_a_function_that_shards_a_saved_data_set_uses_variables(script):
    done = script("""
import tensorflow as tf, spillway_tf
spillway_tf.install(limit=64 << 20, least_bytes=512)
spillway_tf.set_lms_enabled(True)
v, table = tf.Variable(tf.zeros((256, 256))), tf.Variable(tf.range(256, dtype=tf.int64) % 2)

def count(i):
    v.assign_add(tf.ones((256, 256)))
    return tf.gather(table, i)
data = tf.data.Dataset.range(5)
data.save("eager", shard_func=count)
tf.function(lambda: data.save("graph", shard_func=count) and None)()
for name in "eager", "graph":
    print(sorted(tf.data.Dataset.load(name).as_numpy_iterator()) == list(range(5)))
print(float(tf.reduce_sum(v)) / 256**2)
""")
    assert done.stdout.split() == ["True", "True", "10.0"], done.stderr[-2000:]


def test_what_a_saved_data_set_caches_does_not_count():
    data = tf.data.Dataset.range(16).map(lambda i: tf.fill((64, 1024), tf.cast(i, tf.float32))).batch(4).cache()
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # else the batches are made by other threads
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    before = spillway_tf.get_num_allocs()
    with tempfile.TemporaryDirectory() as folder:
        data.with_options(options).save(folder)
    assert spillway_tf.get_num_allocs() == before


def test_what_operations_without_a_frame_make_inside_of_a_python_function_is_not_fixed(lms):
    made, kind = [], {"element_shape": [512, 512], "element_dtype": tf.float32}

    def make(x):
        rows = tf.raw_ops.TensorListReserve(num_elements=1, **kind)
        made.append(tf.raw_ops.TensorListGetItem(input_handle=rows, index=0, **kind))
        return x
    before = spillway_tf.get_bytes_fixed()
    tf.py_function(make, [0.], tf.float32)
    assert spillway_tf.get_bytes_fixed() == before
    assert not lms.is_ours(made[0])  # as when it is made outside of any function


def test_arrays_that_python_functions_keep(lms, evicted):
    seen = []
    x = random(512, 512)
    a, = evicted(x)
    y = tf.numpy_function(lambda array: (seen.append(array), array * 2)[1], [x], tf.float32)
    lms.evict()
    assert lms.is_away(x)
    assert np.array_equal(seen[0], a)
    assert np.array_equal(y.numpy(), a * 2)
    in_graph = tf.function(lambda t: tf.numpy_function(lambda array: (seen.append(array), array)[1], [t], tf.float32))
    evicted(x)
    y = in_graph(x)
    lms.evict()
    assert lms.is_away(x)
    assert np.array_equal(seen.pop(), a)
    assert np.array_equal(y.numpy(), a)
    z = random(512, 512, seed=4)
    b, = evicted(z)

    @tf.function
    def f(t):
        return tf.py_function(lambda u: (seen.append(u), u + 1)[1], [t], tf.float32)
    out = f(z)
    lms.evict()
    assert np.array_equal(seen[1].numpy(), b)
    assert np.array_equal(out.numpy(), b + 1)


@pytest.mark.parametrize("is_of_tensors", (True, False))
def test_arguments_of_python_functions_may_leave_while_these_run(lms, is_of_tensors):
    x, z = random(1024, 1024), random(1024, 1024, seed=2)
    total = tf.function(lambda t: tf.reduce_sum(tf.sqrt(tf.abs(t))))
    expected = total(z) + x[0, 0]

    def with_tensors(t):
        return total(z) + t[0, 0]

    def with_arrays(array):
        return total(z).numpy() + array[0, 0]
    call = tf.py_function if is_of_tensors else tf.numpy_function
    function = with_tensors if is_of_tensors else with_arrays
    spillway_tf.set_lms_limit(9 << 20)  # `total` needs 8 MiB
    in_graph = tf.function(lambda t: call(function, [t * 1], tf.float32))
    assert in_graph(x) == call(function, [x], tf.float32) == expected


def test_sessions_give_out_arrays(lms):
    with tf.Graph().as_default(), v1.Session() as session:
        w = v1.get_variable("w", initializer=tf.random.stateless_normal((512, 512), (1, 2)), use_resource=False)
        r = v1.get_variable("r", initializer=tf.random.stateless_normal((512, 512), (3, 2)), use_resource=True)
        y = w * 2 + r
        step = v1.assign_add(w, tf.ones((512, 512)))
        session.run(v1.global_variables_initializer())
        lms.evict()
        first = session.run(y)
        lms.evict()
        copied = first.copy()
        session.run(step)
        lms.evict()
        second = session.run(y)
        lms.evict()
        assert np.array_equal(first, copied)
        assert np.allclose(second, first + 2, atol=1e-5)


def test_traces_of_sessions_name_the_allocator_as_tensorflow_does():
    data = v1.RunMetadata()
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32)
        session.run(tf.sin(x) + 1, {x: np.ones((512, 512))}, v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), data)
    names = {memory.allocator_name for device in data.step_stats.dev_stats for node in device.node_stats
             for memory in node.memory}
    assert names and names <= {"cpu", "mklcpu"}


def test_queues_hold_tensors(lms, evicted):
    x = random(512, 512)
    a, = evicted(x)
    queue = tf.queue.FIFOQueue(4, [tf.float32], [(512, 512)])
    queue.enqueue(x)
    queue.enqueue(x * 2)
    lms.evict()
    both = queue.dequeue_many(2)
    assert np.array_equal(both.numpy(), np.stack([a, a * 2]))


def test_strings_and_ragged_tensors(lms):
    words = tf.strings.as_string(random(64, 512))
    lms.evict()
    assert words.shape == (64, 512) and len(words.numpy()[0, 0]) > 2
    ragged = tf.RaggedTensor.from_row_splits(random(65536), [0, 5, 65536])
    total = float(tf.reduce_sum(ragged.values))
    lms.evict()
    assert float(tf.reduce_sum(tf.reduce_sum(ragged, axis=1))) == pytest.approx(total, rel=1e-3, abs=1e-1)


def test_strings_are_copied_once_to_become_an_array(monkeypatch):
    words, copies = tf.strings.as_string(random(64, 512)), []
    to_numpy = _shims._numpy_of
    monkeypatch.setattr(_shims, "_numpy_of", lambda tensor: (copies.append(tensor), to_numpy(tensor))[1])
    assert words.numpy().shape == (64, 512)
    assert len(copies) == 1


def test_compiled_functions_are_one_operation(evicted):
    x, v = random(256, 256), tf.Variable(random(256, 256, seed=5))

    @tf.function(jit_compile=True)
    def f(t):
        v.assign_add(t)
        return tf.reduce_sum(tf.tanh(t) * v)
    expected = float(tf.reduce_sum(tf.tanh(x) * (v + x)))
    evicted(x, v)
    assert float(f(x)) == pytest.approx(expected, rel=1e-4, abs=1e-2)


def test_checkpoints(tmp_path, evicted):
    v = tf.Variable(random(512, 512))
    a, = evicted(v)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    v.assign(tf.zeros((512, 512)))
    evicted(v)
    tf.train.Checkpoint(v=v).restore(path)
    assert np.array_equal(v.numpy(), a)
    model = tf.keras.Sequential([tf.keras.Input((256,)), tf.keras.layers.Dense(256)])
    evicted(model.weights[0])
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    assert np.array_equal(loaded.weights[0].numpy(), model.weights[0].numpy())


def test_variables_of_a_checkpoint_need_not_fit_together(tmp_path, lms):
    def make(offset):
        return [tf.Variable(tf.fill([128, 1024], float(i + offset))) for i in range(48)]
    spillway_tf.set_lms_limit(14 << 20)  # the variables take 24 MiB together
    saved, read = tf.train.Checkpoint(weights=make(0)), tf.train.Checkpoint(weights=make(100))
    path = saved.save(str(tmp_path / "checkpoint"))
    read.restore(path).assert_consumed()
    for i, variable in enumerate(read.weights):
        assert lms.is_ours(variable)
        assert np.array_equal(variable.numpy(), np.full((128, 1024), float(i)))
    lms.evict()
    assert all(map(lms.is_away, read.weights))

    @tf.function
    def save_in_graph():
        saved = tf.raw_ops.SaveV2(prefix=str(tmp_path / "graph"), tensor_names=[str(i) for i in range(48)],
                                  shape_and_slices=[""] * 48, tensors=[v.read_value() for v in read.weights])
        with tf.control_dependencies([saved]):
            return tf.constant(True)
    assert save_in_graph()
    in_file = tf.train.load_checkpoint(str(tmp_path / "graph"))
    assert all(np.all(in_file.get_tensor(str(i)) == i) for i in range(48))


def test_a_checkpoint_with_an_iterator_lets_its_variables_leave_and_may_exceed_the_limit(tmp_path, lms):
    iterator = iter(tf.data.Dataset.range(100).batch(3))
    next(iterator)
    checkpoint = tf.train.Checkpoint(weights=[tf.Variable(tf.fill((512, 512), float(i))) for i in range(16)], iterator=iterator)
    for limit, last in (None, 5), (8 << 20, 8):
        if limit:
            spillway_tf.set_lms_limit(limit)
        path = checkpoint.save(str(tmp_path / "checkpoint"))
        next(iterator)
        for weight in checkpoint.weights:
            weight.assign(tf.zeros((512, 512)))
        checkpoint.restore(path)
        assert spillway_tf.get_bytes_fixed() == 0
        lms.evict()
        assert all(map(lms.is_away, checkpoint.weights))
        assert [float(weight[7, 7]) for weight in checkpoint.weights] == list(range(16))
        assert next(iterator)[-1] == last


def test_the_weights_of_a_model_that_exceeds_the_limit_are_saved_and_loaded(tmp_path):
    spillway_tf.set_lms_limit(12 << 20)
    models = [tf.keras.Sequential([tf.keras.Input((512,)), *(tf.keras.layers.Dense(512) for _ in range(20))]) for _ in "ab"]
    models[0].save_weights(tmp_path / "model.weights.h5")
    models[1].load_weights(tmp_path / "model.weights.h5")
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(*(model.weights for model in models)))


def test_large_tensors_of_a_checkpoint_leave_and_need_not_fit_together(tmp_path, lms):
    size = 17 << 20  # tensors with more than 16 Mi elements are read by threads of the operation
    checkpoint = tf.train.Checkpoint(weights=[tf.Variable(tf.fill([size], tf.constant(i, tf.uint8))) for i in range(8)])
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    for variable in checkpoint.weights:
        variable.assign(tf.zeros([size], tf.uint8))
    spillway_tf.set_lms_limit(3 * size)
    checkpoint.read(path)
    for i, variable in enumerate(checkpoint.weights):
        assert lms.is_ours(variable)
        assert (int(tf.reduce_min(variable)), int(tf.reduce_max(variable))) == (i, i)
    lms.evict()
    assert all(map(lms.is_away, checkpoint.weights))


def test_strategies_reduce_over_replicas(evicted):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        v = tf.Variable(random(256, 256))

    @tf.function
    def step():
        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v ** 2)
            gradient = tape.gradient(loss, v)
            v.assign_sub(0.1 * gradient)
            return loss
        return strategy.reduce("SUM", strategy.run(replica), axis=None)
    before = float(step())
    spillway_tf.reclaim_inactive()
    assert float(step()) < before


def test_threads_share_a_limit():
    spillway_tf.set_lms_limit(16 << 20)
    wrong = []

    def run(seed):
        x = random(512, 512, seed=seed)
        expected = x.numpy()
        kept = []
        for i in range(12):
            kept.append(x + float(i))
        for i, k in enumerate(kept):
            if not np.array_equal(k.numpy(), expected + np.float32(i)):
                wrong.append((seed, i))
    run_in_threads(*(functools.partial(run, seed) for seed in range(3)))
    assert not wrong


@pytest.mark.parametrize("compiled", [False, True])
def test_threads_update_one_variable(compiled):
    v, one = tf.Variable(tf.zeros((256, 256))), random(256, 256) * 0 + 1
    update = tf.function(lambda: v.assign_add(one), jit_compile=True) if compiled else lambda: v.assign_add(one)

    def run():
        for _ in range(50):
            update()
    run_while_everything_leaves(*[run] * 4)
    assert np.all(v.numpy() == 200)


def test_a_variable_is_read_while_its_first_sparse_use_ends():
    """From that use on a read copies the variable's memory, so it has to lease it."""
    for _ in range(20):
        v, has_changed = tf.Variable(tf.zeros((4096, 1024))), threading.Event()

        def read():
            while not has_changed.is_set():
                v.read_value()
            v.read_value()

        def change():
            v.scatter_update(tf.IndexedSlices(tf.ones((1, 1024)), [3]))
            has_changed.set()
        run_while_everything_leaves(read, read, change)
        assert spillway_tf.get_bytes_fixed() == 0  # a use without a lease would keep the memory resident


def test_the_first_lookup_of_a_variable_gives_it_other_memory_while_others_wait():
    """It does so if there are other references to the memory. The lookups that wait then have to lease the new memory."""
    rows = tf.constant(np.arange(2048))
    for _ in range(6):
        v = tf.Variable(tf.zeros((8192, 1024)))
        value = v.value()

        def look_up():
            tf.raw_ops.ResourceGather(resource=v.handle, indices=rows, dtype=tf.float32)
        run_while_everything_leaves(*[look_up] * 6)
        assert spillway_tf.get_bytes_fixed() == 0  # a use without a lease would keep the memory resident
        del value


def test_operands_that_are_written_in_place_though_they_are_shared(lms):
    x = random(512, 512)
    expected = x.numpy()
    expected[3] = 1
    lms.evict()
    y = tf.raw_ops.InplaceUpdate(x=x, i=[3], v=tf.ones((1, 512)))
    lms.evict()
    assert np.array_equal(y.numpy(), expected)
    parts = tf.function(lambda: tf.parallel_stack([x[0] + float(i) for i in range(8)]))()
    lms.evict()
    assert np.array_equal(parts.numpy(), np.stack([expected[0] + np.float32(i) for i in range(8)]))


def test_tables_copy_what_they_are_given(lms, evicted):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    keys = tf.range(4096, dtype=tf.int64) * 2
    values = random(4096)
    table.insert(keys, values)
    found = table.lookup(keys)
    evicted(keys, values, found)
    assert np.array_equal(table.lookup(keys).numpy(), values.numpy())


def test_summaries_copy_what_they_are_given(tmp_path, lms):
    tensors = [random(64, 64, seed=1), random(64, 64, seed=2), random(1, 64, 64, 1, seed=3), random(1, 4096, 1, seed=4)]
    with tf.summary.create_file_writer(str(tmp_path)).as_default() as writer:
        tf.summary.write("tensor", tensors[0], step=1)
        common = {"writer": writer._resource, "step": 1}
        tf.raw_ops.WriteHistogramSummary(**common, tag="histogram", values=tensors[1])
        tf.raw_ops.WriteImageSummary(**common, tag="image", tensor=tensors[2], bad_color=tf.constant([255], tf.uint8))
        tf.raw_ops.WriteAudioSummary(**common, tag="audio", tensor=tensors[3], sample_rate=44100.0)
        lms.evict()
        assert all(map(lms.is_away, tensors))
        writer.flush()
    file, = tmp_path.iterdir()
    values = [value for event in tf.compat.v1.train.summary_iterator(str(file)) for value in event.summary.value]
    assert [value.tag for value in values] == ["tensor", "histogram", "image/image/0", "audio/audio/0"]
    assert np.array_equal(tf.make_ndarray(values[0].tensor), tensors[0].numpy())


def test_tables_keep_the_keys_that_they_are_made_with(lms):
    def key(number):
        return tf.fill((1024,), tf.constant(number, tf.int64))
    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, key(3), empty_key=key(1), deleted_key=key(2),
                                                  initial_num_buckets=64)
    lms.evict()
    table.insert(key(5)[None], key(7)[None])
    lms.evict()
    assert np.array_equal(table.lookup(tf.stack([key(5), key(6)]))[:, 0].numpy(), [7, 3])


def test_sparse_tensors_that_another_operation_finds_by_a_handle(lms):
    def add(start):
        return tf.raw_ops.AddSparseToTensorsMap(
            sparse_indices=tf.reshape(tf.range(4096, dtype=tf.int64), (4096, 1)) + 0, sparse_shape=tf.constant([4096], tf.int64),
            sparse_values=tf.range(start, start + 4096), container="tests", shared_name="sparse")
    handles = tf.stack([tf.function(add)(tf.constant(start)) for start in (0, 8192)])
    lms.evict()
    out = tf.raw_ops.TakeManySparseFromTensorsMap(sparse_handles=handles, dtype=tf.int32, container="tests", shared_name="sparse")
    assert np.array_equal(out.sparse_values.numpy().reshape(2, -1), np.arange(4096) + [[0], [8192]])


def test_gradients_of_batches_wait_for_each_other(lms):
    def grad(rows, index, whole, number):
        return tf.raw_ops.UnbatchGrad(original_input=whole, batch_index=index, grad=tf.fill((rows, 4096), float(number)),
                                      id=tf.constant(number, tf.int64), container="tests", shared_name="unbatch")
    nothing = grad(1, tf.zeros((0, 3), tf.int64), tf.zeros((0, 4096)), 1)
    lms.evict()
    both = grad(1, tf.constant([[0, 0, 1], [1, 1, 2]], tf.int64), tf.zeros((2, 4096)), 0)
    assert nothing.shape == (0, 4096)
    assert np.array_equal(both[:, 9].numpy(), [0, 1])


def test_generators_and_random_states(evicted):
    generator = tf.random.Generator.from_seed(1)
    x = generator.normal((512, 512))
    a, = evicted(x)
    y = tf.random.Generator.from_seed(1).normal((512, 512))
    assert np.array_equal(y.numpy(), a)


def test_asynchronous_execution(evicted):
    x = random(512, 512)
    a, = evicted(x)
    with tf.device("CPU:0"):
        tf.config.experimental.set_synchronous_execution(False)
        try:
            y = x
            for _ in range(5):
                y = y + 1
            assert np.allclose(y.numpy(), a + 5, atol=1e-5)
        finally:
            tf.config.experimental.set_synchronous_execution(True)
