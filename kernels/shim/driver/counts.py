"""Tests of what the driver counts."""

import ctypes

from api import U64, call, cuda, memory, read


def calls_are_counted(gpu):
    """The driver counts the calls of each function, whatever they return."""

    def counted():
        text = ctypes.create_string_buffer(1 << 16)
        assert cuda.shimCalls(text, U64(len(text))) == len(text.value)
        return {name: int(calls) for name, calls in (line.split() for line in text.value.decode().splitlines())}

    gpu.enter()
    before = counted()
    for _ in range(3):
        call("cuStreamSynchronize", gpu.tensors)
    call("cuDeviceGet", ctypes.byref(ctypes.c_int()), 99, expected=101)
    after = counted()
    found = {name: calls - before[name] for name, calls in after.items() if calls != before[name]}
    assert found == {"cuStreamSynchronize": 3, "cuDeviceGet": 1}, found
    assert cuda.shimCalls(None, U64(0)) > 0, "the length of the text that there is no room for"


def copies_are_counted(gpu):
    gpu.enter()
    both = cuda.shimDownloaded, cuda.shimUploaded
    before = [count() for count in both]
    data = memory(bytes(24))
    call("cuMemcpyDtoDAsync_v2", data, memory(bytes(8)), ctypes.c_size_t(8), gpu.tensors)
    read(data, 20)
    assert [count() - number for count, number in zip(both, before)] == [20, 32]
