# SPDX-License-Identifier: Apache-2.0
"""Records one step of a program: its operations, what they use, how long they take, and when memory is made and
freed.

A dispatch mode sees each operation after autograd and composites have been taken apart, at the level at which the
hook leases operands. Memory is followed by storage; a weak reference tells when a storage ends. PyTorch's allocator
reports what a kernel allocates for itself.
"""
import collections
import gc
import logging
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from . import _plan_module as _native

#: Roles of buffers, in the order in which tables list them.
ROLES = ("weights", "gradients", "optimizer state", "others before the step", "activations", "made in backward",
         "inside operations")
LAUNCH_NS = 5000  # time to launch an operation, where times are estimated


class Buffer:
    """A storage: memory that tensors share."""
    __slots__ = ("id", "bytes", "device", "born", "died", "role", "maker", "text", "watch", "uses", "weight")

    def __init__(self, number, storage, tensor, born, role, maker):
        self.id, self.bytes, self.device = number, storage.nbytes(), tensor.device.type
        self.born, self.died = born, None    # numbers of operations; born -1: existed before; died: first without it
        self.role, self.maker = role, maker
        self.text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        self.watch = None
        self.uses = []                       # numbers of operations that need its bytes
        self.weight = False                  # whether it lives across steps

    @property
    def rounded(self):
        granule = _native.granule_bytes
        return -(-self.bytes // granule) * granule


def _plainly():
    """Returns a context in which tensors are asked without their classes, which may refuse questions (parameters of
    lazy modules) or answer them otherwise.
    """
    return torch._C.DisableTorchFunctionSubclass()


class Operation:
    __slots__ = ("name", "ns", "buffers", "scratch")

    def __init__(self, name):
        self.name = name
        self.ns = 0
        self.buffers = ()
        self.scratch = 0     # bytes allocated for itself, beside the results


class Estimate:
    """Estimates times of operations on a device that is not present: the time of their floating-point operations or
    of their bytes, whichever is longer.
    """

    def __init__(self, tflops, memory_gbps):
        self.per_flop, self.per_byte = 1e-3 / tflops, 1 / memory_gbps  # ns

    def ns(self, function, args, kwargs, out, nbytes):
        logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # else it warns that Triton is missing
        from torch.utils.flop_counter import flop_registry
        count = flop_registry.get(getattr(function, "overloadpacket", None))
        flops = count(*args, **kwargs, out_val=out) if count else 0
        return LAUNCH_NS + int(max(flops * self.per_flop, nbytes * self.per_byte))

    def __str__(self):
        return f"estimated for {1e-3 / self.per_flop:g} TFLOP/s and {1 / self.per_byte:g} GB/s of device memory"


class Recorder(TorchDispatchMode):
    """Records while its context is entered. Afterwards `operations` and `buffers` have the result."""
    supports_higher_order_operators = True

    def __init__(self, least_bytes, estimate=None):
        super().__init__()
        self.least_bytes, self.estimate = least_bytes, estimate
        self.operations, self.buffers = [], []
        self.is_fake, self.clock = False, time.perf_counter_ns
        self._alive = {}                     # by the storage's identity
        self._kinds, self._parameters = {}, []
        self._allocations = _native.AllocationWatch(least_bytes)

    # Buffers that exist, and new ones.

    def __enter__(self):
        with _plainly():
            self._find_what_is_there()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        with _plainly():
            self._name_gradients()
        for buffer in self.buffers:
            buffer.watch = None
        self._alive.clear()

    def _find_what_is_there(self):
        gc.collect()
        tensors, modules, optimizers = [], [], []
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, torch.Tensor):
                tensors.append(thing)
            # Objects whose constructor has failed may be alive, too, such as in the traceback of the error.
            elif issubclass(kind, torch.nn.Module) and hasattr(thing, "_modules"):
                modules.append(thing)
            elif issubclass(kind, torch.optim.Optimizer) and hasattr(thing, "state"):
                optimizers.append(thing)
        children = {id(child) for module in modules for child in module.children()}
        names = {id(tensor): name for module in modules if id(module) not in children
                 for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        state = {id(value) for optimizer in optimizers for values in optimizer.state.values()
                 if isinstance(values, dict) for value in values.values()}
        for tensor in tensors:
            name = names.get(id(tensor))
            if isinstance(tensor, torch.nn.Parameter) or name is not None:
                self._add(tensor, -1, "weights", name or "a parameter")
        self._parameters = [weakref.ref(t) for t in tensors if t.requires_grad and t.is_leaf]
        for tensor in tensors:
            if tensor.is_leaf and tensor.grad is not None:
                self._add(tensor.grad, -1, "gradients", f"of {names.get(id(tensor), 'a tensor')}")
        for tensor in tensors:
            is_state = id(tensor) in state
            self._add(tensor, -1, "optimizer state" if is_state else "others before the step",
                      "an optimizer" if is_state else "earlier steps")

    def _name_gradients(self):
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                for buffer in self._of(parameter.grad):
                    if buffer.role in ("made in backward", "activations"):
                        buffer.role = "gradients"

    def _add(self, tensor, born, role, maker):
        """Returns the buffers of a tensor. New ones exist from the operation with number `born` on."""
        with _plainly():
            return [self._buffer_of(part, born, role, maker) for part in parts_of(tensor)]

    def _of(self, tensor):
        with _plainly():
            return [self._alive[part.untyped_storage()._cdata] for part in parts_of(tensor)
                    if part.untyped_storage()._cdata in self._alive]

    def _buffer_of(self, tensor, born, role, maker):
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is not None and known.bytes == storage.nbytes():
            return known
        if known is not None:  # it was resized
            known.died = max(born, 0)
            known.watch = None
        key = storage._cdata
        buffer = Buffer(len(self.buffers), storage, tensor, born, role, maker)
        buffer.watch = weakref.ref(storage, lambda _: self._end(key, buffer))
        self.is_fake = self.is_fake or is_fake(tensor)
        self._alive[key] = buffer
        self.buffers.append(buffer)
        return buffer

    def _end(self, key, buffer):
        if self._alive.get(key) is buffer:
            del self._alive[key]
            buffer.died = len(self.operations)

    # Operations.

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind, name = self._kind_of(function)
        now, backward = len(self.operations), torch._C._current_graph_task_id() != -1
        role = "made in backward" if backward else "activations"
        operands = [self._add(tensor, now, role, "outside of operations") for tensor in tensors_in((args, kwargs))]
        number = number_of_fake(function, args)
        if number is not None:
            return number
        self._allocations.begin()
        try:
            start = self.clock()
            out = function(*args, **kwargs)
            if any(b.device == "cuda" for buffers in operands for b in buffers) and not self.is_fake:
                torch.cuda.synchronize()
            ns = self.clock() - start
        finally:
            most, left = self._allocations.end()
        results = [self._add(tensor, now, role, name) for tensor in tensors_in(out)]
        if kind in ("view", "factory"):
            return out
        used = list(dict.fromkeys(b for buffers in (*operands, *results) for b in buffers if self._counts(b)))
        if self.estimate:
            ns = self.estimate.ns(function, args, kwargs, out, sum(b.bytes for b in used))
        if kind == "per_tensor":
            self._add_pieces(name, ns, args, kwargs, out)
            return out
        self._finish(name, ns, used, max(most - left, 0))
        return out

    def _counts(self, buffer):
        return buffer.bytes >= max(self.least_bytes, 1)

    def _finish(self, name, ns, used, scratch):
        operation = Operation(name)
        operation.ns, operation.buffers, operation.scratch = ns, used, scratch
        for buffer in used:
            buffer.uses.append(len(self.operations))
        self.operations.append(operation)

    def _add_pieces(self, name, ns, args, kwargs, out):
        """Records an operation that does the same to each element of its lists, which the hook cuts into parts."""
        lists = [x for x in (*args, *kwargs.values(), out)
                 if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
        pieces = []
        for elements in zip(*lists):
            used = list(dict.fromkeys(b for t in elements for b in self._of(t) if self._counts(b)))
            pieces.append((used, sum(b.bytes for b in used)))
        total = sum(nbytes for _, nbytes in pieces) or 1
        for used, nbytes in pieces:
            if used:
                self._finish(name, ns * nbytes // total, used, 0)

    def _kind_of(self, function):
        known = self._kinds.get(function)
        if known is None:
            schema = getattr(function, "_schema", None)
            kind = _native.kind_of(schema.name, schema.overload_name) if schema else "kernel"
            known = self._kinds[function] = kind, schema.name.removeprefix("aten::") if schema else str(function)
        return known


def is_fake(tensor):
    from torch._subclasses.fake_tensor import FakeTensor
    return isinstance(tensor, FakeTensor)


def number_of_fake(function, args):
    """Returns a number for a program that reads one from a fake tensor, which has no values."""
    if function is torch.ops.aten._local_scalar_dense.default and is_fake(args[0]):
        kind = args[0].dtype
        return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
    return None


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def parts_of(tensor):
    """Returns the tensors with storages that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        try:
            if tensor.untyped_storage().nbytes() > 0:
                yield tensor
        except (NotImplementedError, RuntimeError):  # it has no storage
            return
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        csr = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield from (tensor.crow_indices(), tensor.col_indices()) if csr else (tensor.ccol_indices(), tensor.row_indices())
        yield tensor.values()


class Recording:
    """A recorded step, for one kind of device."""

    def __init__(self, recorder):
        kinds = collections.Counter()
        for buffer in recorder.buffers:
            kinds[buffer.device] += buffer.bytes
        self.device = max(kinds, key=kinds.get, default="cpu")
        self.is_fake, self.estimate = recorder.is_fake, recorder.estimate
        self.operations = recorder.operations
        self.buffers = [b for b in recorder.buffers
                        if b.device == self.device and b.bytes >= max(recorder.least_bytes, 1)]
        end = len(self.operations)
        for buffer in self.buffers:
            buffer.died = end + 1 if buffer.died is None else buffer.died
        self.compute_ns = sum(operation.ns for operation in self.operations)
        self._find_peak()
        self._find_weights(end)

    def _find_peak(self):
        """Finds the operation at which most bytes exist, including those that operations allocate for themselves."""
        changes = collections.Counter()
        for buffer in self.buffers:
            changes[max(buffer.born, 0)] += buffer.rounded
            changes[max(buffer.died, buffer.born + 1)] -= buffer.rounded
        live, self.peak_bytes, self.peak_at = 0, 0, 0
        for at in range(len(self.operations) + 1):
            live += changes[at]
            scratch = self.operations[at].scratch if at < len(self.operations) else 0
            if live + scratch > self.peak_bytes:
                self.peak_bytes, self.peak_at = live + scratch, at

    def at_peak(self):
        """Returns the buffers that exist at the peak, largest first."""
        at = self.peak_at
        return sorted((b for b in self.buffers if b.born <= at < max(b.died, b.born + 1)), key=lambda b: (-b.bytes, b.id))

    @property
    def peak_scratch(self):
        return self.operations[self.peak_at].scratch if self.peak_at < len(self.operations) else 0

    @property
    def peak_operation(self):
        return self.operations[self.peak_at].name if self.peak_at < len(self.operations) else "the end"

    def _find_weights(self, end):
        """Decides which buffers live across steps.

        A buffer that existed before the step and still exists after it does. If one existed before and ends in the
        step, then in a program that repeats, the step makes its successor later and leaves it behind: gradients, for
        example. Such a pair is taken as one buffer that is made anew.
        """
        old = collections.defaultdict(list)
        for buffer in self.buffers:
            buffer.weight = buffer.born < 0 and bool(buffer.uses)
            if buffer.born < 0 and buffer.died <= end:
                old[buffer.bytes].append(buffer)
        for buffer in self.buffers:
            if buffer.born < 0 or buffer.died <= end:
                continue
            pair = next((b for b in old[buffer.bytes] if b.died <= buffer.born), None)
            if pair is None:
                buffer.weight = bool(buffer.uses)
                continue
            old[buffer.bytes].remove(pair)
            if pair.uses:  # it is used before its successor is made
                buffer.weight, buffer.uses = True, sorted({*pair.uses, *buffer.uses})
                pair.uses, pair.weight = [], False

    def write(self, file):
        """Writes the step as a trace of accesses for spillway-replay. What an operation allocates for itself becomes
        a buffer. Memory that no operation uses is left out, since it would leave once and not come back.
        """
        used = collections.defaultdict(list)
        for buffer in self.buffers:
            for at in buffer.uses:
                used[at].append(buffer)
        file.write("step,id,size,weight,kernel_ns\n")
        number = len(self.buffers) and max(b.id for b in self.buffers) + 1
        begin, places = 0, sorted(used)
        for at in places:
            end = len(self.operations) if at == places[-1] else at + 1
            ns = sum(operation.ns for operation in self.operations[begin:end])  # also of operations that use nothing of this device
            begin = end
            for buffer in used[at]:
                file.write(f"{at},{buffer.id},{buffer.bytes},{int(buffer.weight)},{ns}\n")
            if self.operations[at].scratch:
                file.write(f"{at},{number},{self.operations[at].scratch},0,{ns}\n")
                number += 1
