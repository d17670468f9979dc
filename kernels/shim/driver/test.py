#!/usr/bin/env python3
"""Tests the software driver in a folder, and NCCL on its streams, with the settings of the environment: test.py FOLDER

The tests call the driver's functions as a program does, and compare results with sums computed here. They support 1 or
2 GPUs, 1 queue or more than 3, and a strict driver with one GPU only: a single thread could not submit the second GPU's
kernel while the first one's context waits for it.
"""

import ctypes
import os
import random
import struct
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
from api import (  # noqa: E402
    GPUS, OWN, POINTER, U64, call, compiled, cuda, function, got, got_after, launch, memory, nccl, read, word, words,
)  # fmt: skip
from counts import calls_are_counted, copies_are_counted  # noqa: E402
from kernels import TREE, compiles_kernels  # noqa: E402

MAX_RANKS = 8
CONTROL = 1122432  # sizeof(Control), see signal.cuh
SECONDS = 1_000_000_000


class Gpu:
    """A GPU, the words of its ranks, and the streams of tensors and of collectives, which have the highest priority."""

    def __init__(self, ordinal):
        self.device = got(ctypes.c_int, "cuDeviceGet", ordinal)
        self.context = got(POINTER, "cuDevicePrimaryCtxRetain", self.device)
        self.enter()
        self.tensors = got(POINTER, "cuStreamCreate", 1)
        least, greatest = ctypes.c_int(), ctypes.c_int()
        call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self.collectives = got(POINTER, "cuStreamCreateWithPriority", 1, greatest.value - 1)
        for stream, priority in [(self.tensors, least), (self.collectives, greatest)]:
            assert got_after(ctypes.c_int, "cuStreamGetPriority", stream).value == priority.value
        self.ready, self.done = memory(bytes(8)), memory(bytes(8))
        self.host = got(POINTER, "cuMemHostAlloc", ctypes.c_size_t(16), 0)
        ctypes.memset(self.host, 0, 16)
        # One for all ranks.
        self.control = memory(bytes(CONTROL))
        names = b"two_shot_sum_f32", b"tensors_ready", b"await_done"
        self.two_shot, self.tensors_ready, self.await_done = map(function, names)

    def enter(self):
        call("cuCtxSetCurrent", self.context)

    def order(self, address, value):
        return words(address.value, value, 20 * SECONDS, self.host.value)


def all_reduces(gpus, ranks, calls):
    """Sums all ranks' tensors `calls` times, with varying lengths, submitted at once. Rank r is on GPU r % GPUs."""
    controls = []
    for rank in range(ranks):
        gpus[rank % len(gpus)].enter()
        controls.append(memory(bytes(CONTROL)).value)
    results = []
    made = random.Random(1)
    for number in range(1, calls + 1):
        count = made.randrange(1, 3000)
        values = [[made.randrange(-1000, 1000) for _ in range(count)] for _ in range(ranks)]
        sums = struct.pack(f"{count}f", *map(sum, zip(*values)))
        for index, gpu in enumerate(gpus):
            gpu.enter()
            members = []
            for rank in range(index, ranks, len(gpus)):
                data = struct.pack(f"{count}f", *values[rank])
                size = ctypes.c_size_t(len(data))
                source = got(U64, "cuMemAllocAsync", size, gpu.tensors)
                target = got(U64, "cuMemAllocAsync", size, gpu.tensors)
                call("cuMemcpyHtoDAsync_v2", source, data, size, gpu.tensors)
                members.append((source.value, target.value, rank, gpu.host.value))
                copy = got(POINTER, "cuMemHostAlloc", size, 0)
                results.append((copy, sums, gpu, target, size, number))
            gpu_call = words(
                *controls, *[0] * (MAX_RANKS - ranks),
                *[word for member in members for word in member], *[0] * (4 * (MAX_RANKS - len(members))),
                20 * SECONDS, ranks, 0, count, 0,
            )  # fmt: skip
            launch(gpu.tensors_ready, (1, 1), 1, gpu.tensors, *[words(0)] * 3, gpu.order(gpu.ready, number))
            call("cuStreamWaitValue64_v2", gpu.collectives, gpu.ready, U64(number), 0)
            launch(gpu.two_shot, (len(members), 2), 64, gpu.collectives, gpu_call)
            call("cuStreamWriteValue64_v2", gpu.collectives, gpu.done, U64(number), 0)
            launch(gpu.await_done, (1, 1), 1, gpu.tensors, words(0), gpu.order(gpu.done, number))
            for copy, _, on, target, size, of in results:
                if on is gpu and of == number:
                    call("cuMemcpyDtoHAsync_v2", copy, target, size, gpu.tensors)
                    call("cuMemFreeAsync", target, gpu.tensors)
    for gpu in gpus:
        gpu.enter()
        call("cuStreamSynchronize", gpu.tensors)
    for copy, sums, gpu, _, size, number in results:
        assert ctypes.string_at(copy, size.value) == sums, f"call {number} on GPU {gpu.device.value}"
        assert ctypes.string_at(gpu.host, 16) == bytes(16), "a failure"


def is_asynchronous(gpus):
    """Submitted work waits, the host does not. Once the host has waited, it sees the results."""
    gpu = gpus[0]
    gpu.enter()
    gate, passed, seen = (memory(words(0)) for _ in range(3))
    # Host memory that the driver did not allocate is read at once, even if the stream waits.
    data = ctypes.create_string_buffer(words(5), 8)
    call("cuStreamWaitValue64_v2", gpu.tensors, gate, U64(3), 0)
    call("cuMemcpyHtoDAsync_v2", gpu.ready, data, ctypes.c_size_t(8), gpu.tensors)
    ctypes.memset(data, 0, 8)
    call("cuStreamWriteValue64_v2", gpu.tensors, passed, U64(7), 0)
    call("cuStreamQuery", gpu.tensors, expected=600)
    # The event covers earlier work. An event that was never recorded covers nothing.
    event, never = (got(POINTER, "cuEventCreate", 2) for _ in range(2))
    call("cuEventRecord", event, gpu.tensors)
    call("cuEventQuery", event, expected=600)
    call("cuEventQuery", never)
    # Another stream, of another GPU if there is one, continues after the event.
    last = gpus[-1]
    last.enter()
    call("cuStreamWaitEvent", last.collectives, event, 0)
    call("cuMemcpyDtoDAsync_v2", seen, passed, ctypes.c_size_t(8), last.collectives)
    # Accessed directly, not through a stream, which may be in the same queue.
    assert ctypes.c_uint64.from_address(passed.value).value == 0
    ctypes.c_uint64.from_address(gate.value).value = 3
    call("cuStreamSynchronize", last.collectives)
    assert word(seen) == 7 and word(gpu.ready) == 5
    gpu.enter()
    call("cuEventDestroy_v2", event)
    call("cuEventQuery", event, expected=400)


def shares_queues(gpu):
    """With one queue, a waiting stream blocks all others."""
    gpu.enter()
    other = got(POINTER, "cuStreamCreate", 1)
    gate, passed = memory(words(0)), memory(words(0))
    call("cuStreamWaitValue64_v2", gpu.tensors, gate, U64(1), 0)
    call("cuStreamWriteValue64_v2", other, passed, U64(1), 0)
    one_queue = os.environ.get("SHIM_QUEUES") == "1"
    if one_queue:
        # Time in which the stream must not continue.
        time.sleep(0.05)
        call("cuStreamQuery", other, expected=600)
    else:
        call("cuStreamSynchronize", other)
    ctypes.c_uint64.from_address(gate.value).value = 1
    call("cuCtxSynchronize")
    assert word(passed) == 1


def loads_wait(gpu):
    """A strict driver loads a module once the context is idle, a lenient one at once."""
    gpu.enter()
    gate = memory(words(0))
    call("cuStreamWaitValue64_v2", gpu.tensors, gate, U64(1), 0)
    loaded = threading.Event()

    def load():
        gpu.enter()
        function(b"copy")
        loaded.set()

    thread = threading.Thread(target=load)
    thread.start()
    strict = os.environ.get("SHIM_STRICT") == "1"
    assert loaded.wait(0.05 if strict else 20) != strict
    ctypes.c_uint64.from_address(gate.value).value = 1
    thread.join()


class Id(ctypes.Structure):
    """The id by which the ranks of a communicator find each other."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class Rank:
    """A rank of an NCCL communicator, with two streams."""

    def __init__(self, gpu, id, ranks, rank):
        gpu.enter()
        self.gpu, self.streams = gpu, [got(POINTER, "cuStreamCreate", 1) for _ in range(2)]
        self.communicator, blocking = POINTER(), 0
        config = (ctypes.c_int * 12)(0, 0, 0, 0, blocking)
        self.begin("ncclCommInitRankConfig", ctypes.byref(self.communicator), ranks, id, rank, config)

    def begin(self, name, *arguments):
        result = getattr(nccl, name)(*arguments)
        assert result == 7, f"{name}: {result}, not in progress"

    def settle(self, expected=0):
        state = ctypes.c_int(7)
        while state.value == 7:
            assert nccl.ncclCommGetAsyncError(self.communicator, ctypes.byref(state)) == 0
        assert state.value == expected, state.value

    def all_reduce(self, source, target, count, stream):
        """Starts a sum of floats."""
        size, f32, sum = ctypes.c_size_t(count), 7, 0
        addresses = POINTER(source.value), POINTER(target.value)
        self.begin("ncclAllReduce", *addresses, size, f32, sum, self.communicator, stream)

    def passes(self, stream):
        """Records an event after the work on the stream."""
        event = got(POINTER, "cuEventCreate", 2)
        call("cuEventRecord", event, stream)
        return event


def communicator(gpus):
    """Creates a communicator with one rank per entry of `gpus`."""
    id = Id()
    assert nccl.ncclGetUniqueId(ctypes.byref(id)) == 0
    ranks = [Rank(gpu, id, len(gpus), rank) for rank, gpu in enumerate(gpus)]
    for rank in ranks:
        rank.settle()
    return ranks


def collectives_are_in_order(gpus):
    """NCCL's collectives begin after earlier work on their stream, and later work begins after they have ended."""
    # Streams that share a queue would block each other.
    ranks = communicator(gpus if os.environ.get("SHIM_QUEUES") == "1" else 2 * gpus)
    count = 1 << 20
    gates, events, results = [], [], []
    for number, rank in enumerate(ranks):
        rank.gpu.enter()
        data = memory(struct.pack("4f", 1, 2, number, -4) * (count // 4))
        size = ctypes.c_size_t(4 * count)
        first, second, third, last = (got(U64, "cuMemAlloc_v2", size) for _ in range(4))
        gates.append(memory(words(0)))
        call("cuStreamWaitValue64_v2", rank.streams[0], gates[-1], U64(1), 0)
        call("cuMemcpyDtoDAsync_v2", first, data, size, rank.streams[0])
        rank.all_reduce(first, second, count, rank.streams[0])
        results.append((second, third, last, size))
    for rank, (second, third, last, size) in zip(ranks, results):
        rank.gpu.enter()
        rank.settle()
        events.append(rank.passes(rank.streams[0]))
        # A communicator's operations run in call order, on whatever streams.
        rank.all_reduce(second, third, count, rank.streams[1])
        rank.settle()
        call("cuMemcpyDtoDAsync_v2", last, third, size, rank.streams[1])
        events.append(rank.passes(rank.streams[1]))
    for gate in gates:
        # Time in which no event must complete: all wait for the rank whose stream is blocked.
        time.sleep(0.05)
        for event in events:
            call("cuEventQuery", event, expected=600)
        ctypes.c_uint64.from_address(gate.value).value = 1
    n = len(ranks)
    sums = struct.pack("4f", *(n * one for one in (n, 2 * n, n * (n - 1) // 2, -4 * n))) * (count // 4)
    for rank, (_, _, last, size) in zip(ranks, results):
        rank.gpu.enter()
        call("cuStreamSynchronize", rank.streams[1])
        assert read(last, size.value) == sums
    for rank in ranks:
        rank.begin("ncclCommFinalize", rank.communicator)
    for rank in ranks:
        rank.settle()
    for rank in ranks:
        assert nccl.ncclCommDestroy(rank.communicator) == 0


def streams_outlive_collectives(gpus):
    """A collective that waits for an absent rank ends when it is aborted, and later ones do nothing."""
    late, other = communicator([gpus[0], gpus[-1]])
    late.gpu.enter()
    data = memory(bytes(8))
    for _ in range(2):
        late.all_reduce(data, data, 2, late.streams[0])
        late.settle()
    event = late.passes(late.streams[0])
    time.sleep(0.05)
    call("cuEventQuery", event, expected=600)
    if len(gpus) > 1:
        other.all_reduce(data, data, 2, late.streams[0])
        other.settle(expected=1)
    for rank in [late, other]:
        assert nccl.ncclCommAbort(rank.communicator) == 0
    call("cuStreamSynchronize", late.streams[0])
    assert read(data, 8) == bytes(8)


def faults(gpus):
    """A fault of SHIM_FAULT ends all work on its GPU, and every later call there fails. Other GPUs stay usable."""
    broken, sound = gpus
    broken.enter()
    # The first launch waits for a word that nothing writes. The second one, on another stream, faults.
    launch(broken.await_done, (1, 1), 1, broken.tensors, words(0), broken.order(broken.done, 1))
    call("cuStreamQuery", broken.tensors, expected=600)
    launch(broken.await_done, (1, 1), 1, broken.collectives, words(0), broken.order(broken.done, 1))
    call("cuStreamSynchronize", broken.tensors, expected=700)
    call("cuStreamQuery", broken.collectives, expected=700)
    call("cuCtxSynchronize", expected=700)
    call("cuMemAlloc_v2", ctypes.byref(U64()), ctypes.c_size_t(8), expected=700)
    call("cuMemFree_v2", broken.done, expected=700)
    call("cuMemcpyHtoD_v2", broken.done, words(1), ctypes.c_size_t(8), expected=700)
    ready = broken.order(broken.ready, 1)
    launch(broken.tensors_ready, (1, 1), 1, broken.tensors, *[words(0)] * 3, ready, expected=700)
    all_reduces([sound], 3, 3)


def refuses(gpus):
    gpu = gpus[0]
    gpu.enter()
    for text in [OWN, TREE]:
        module = got(POINTER, "cuModuleLoadData", compiled(text))
        call("cuModuleGetFunction", ctypes.byref(POINTER()), module, b"of_another_library", expected=500)
    launch(gpu.await_done, (0, 1), 1, gpu.tensors, words(0), gpu.order(gpu.done, 0), expected=1)
    launch(gpu.await_done, (1, 1), 513, gpu.tensors, words(0), gpu.order(gpu.done, 0), expected=701)
    call("cuMemFree_v2", U64(12345), expected=1)
    assert read(got(U64, "cuMemAlloc_v2", ctypes.c_size_t(8)), 8) != bytes(8), "new memory is zero"
    pool = got(U64, "cuMemAllocAsync", ctypes.c_size_t(8), gpu.tensors)
    for nowhere in [U64(4096), pool]:
        call("cuStreamWriteValue64_v2", gpu.tensors, nowhere, U64(1), 0, expected=1)
        call("cuStreamWaitValue64_v2", gpu.tensors, nowhere, U64(0), 0, expected=1)
    call("cuStreamSynchronize", POINTER(12345), expected=400)
    call("cuDeviceGet", ctypes.byref(ctypes.c_int()), GPUS, expected=101)
    peers = GPUS > 1 and os.environ.get("SHIM_PEERS") != "0"
    assert got(ctypes.c_int, "cuDeviceCanAccessPeer", 0, GPUS - 1).value == peers
    atomics = got(ctypes.c_int, "cuDeviceGetP2PAttribute", 3, 0, GPUS - 1).value
    assert atomics == (peers and os.environ.get("SHIM_NVLINK") != "0")
    if GPUS > 1:
        call("cuCtxEnablePeerAccess", gpus[1].context, 0, expected=0 if peers else 217)
        launch(gpus[1].await_done, (1, 1), 1, gpu.tensors, words(0), gpu.order(gpu.done, 0), expected=400)
    name = ctypes.c_char_p()
    call("cuGetErrorName", 801, ctypes.byref(name))
    assert name.value == b"CUDA_ERROR_NOT_SUPPORTED"
    call("cuCtxSetCurrent", None)
    call("cuMemAlloc_v2", ctypes.byref(U64()), ctypes.c_size_t(8), expected=201)
    launch(gpu.await_done, (1, 1), 1, gpu.tensors, words(0), gpu.order(gpu.done, 0), expected=201)


# Memory of other processes


class IpcHandle(ctypes.Structure):
    """What names some memory to another process."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def open_handle(handle, expected=0):
    address = U64()
    lazy_enable_peer_access = 1
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, lazy_enable_peer_access, expected=expected)
    return address


def opens_memory_of_another_process(hexadecimal):
    """A process that opens a handle, which it is given as hexadecimal digits."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", got(POINTER, "cuDevicePrimaryCtxRetain", 0))
    handle = IpcHandle.from_buffer_copy(bytes.fromhex(hexadecimal))
    if os.environ.get("SHIM_IPC") == "0":
        open_handle(handle, expected=201)
        return
    if GPUS > 1 and os.environ.get("SHIM_PEERS") == "0":
        open_handle(handle, expected=217)
        return
    address = open_handle(handle)
    assert open_handle(handle).value == address.value, "opened once more, it has another address"
    assert word(address) == 5
    call("cuMemFree_v2", address, expected=1)
    call("cuMemcpyHtoD_v2", address, words(6), ctypes.c_size_t(8))
    print("written", flush=True)
    # By now the owner has freed it.
    assert input() == "freed"
    assert word(address) == 7
    open_handle(IpcHandle(), expected=1)
    call("cuIpcCloseMemHandle", address)
    assert word(address) == 7
    call("cuIpcCloseMemHandle", address)
    call("cuIpcCloseMemHandle", address, expected=1)
    open_handle(handle, expected=1)


def shares_memory_between_processes(gpu):
    """Memory of cuMemAlloc is the same memory in a process that opens its handle; a pool's memory has no handle."""
    gpu.enter()
    shared = memory(words(5) + bytes(8))
    handle = got(IpcHandle, "cuIpcGetMemHandle", shared)
    open_handle(handle, expected=201)
    pool = got(U64, "cuMemAllocAsync", ctypes.c_size_t(8), gpu.tensors)
    call("cuIpcGetMemHandle", ctypes.byref(IpcHandle()), pool, expected=1)
    command = [sys.executable, __file__, sys.argv[1], bytes(handle.bytes).hex()]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if child.stdout.readline() == "written\n":
        assert word(shared) == 6
        call("cuMemcpyHtoD_v2", shared, words(7), ctypes.c_size_t(8))
        call("cuMemFree_v2", shared)
        child.stdin.write("freed\n")
        child.stdin.flush()
    assert child.wait() == 0


if len(sys.argv) > 2:
    opens_memory_of_another_process(sys.argv[2])
    sys.exit()

call("cuInit", 0)
all_gpus = [Gpu(ordinal) for ordinal in range(got(ctypes.c_int, "cuDeviceGetCount").value)]
assert len(all_gpus) == GPUS
if "SHIM_FAULT" in os.environ:
    faults(all_gpus)
    sys.exit()
assert cuda.shimLaunches(b"two_shot_sum_f32") == 0
for ranks_of_all in [2, 5]:
    all_reduces(all_gpus, ranks_of_all, 6)
    assert [cuda.shimLeastPriority(name) for name in [b"two_shot_sum_f32", b"await_done"]] == [-5, 0]
    # The next round's words count from 1 again.
    for one in all_gpus:
        one.enter()
        one.ready, one.done = memory(bytes(8)), memory(bytes(8))
assert cuda.shimLaunches(b"two_shot_sum_f32") == 12 * GPUS
# Two for each of the ranks on a GPU.
assert cuda.shimBlocks(b"two_shot_sum_f32") == 2 * (5 // GPUS)
calls_are_counted(all_gpus[0])
is_asynchronous(all_gpus)
shares_queues(all_gpus[0])
loads_wait(all_gpus[0])
compiles_kernels(all_gpus[-1])
copies_are_counted(all_gpus[0])
collectives_are_in_order(all_gpus)
streams_outlive_collectives(all_gpus)
shares_memory_between_processes(all_gpus[-1])
refuses(all_gpus)
