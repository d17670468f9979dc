"""Kernels that are compiled at run time: a part of test.py."""

import os
import random
import struct

from api import call, compiled, cuda, function, launch, memory, read, words

# A kernel of the driver's that another program also contains is the program's.
NUMBERS = b"""
struct Sizes { unsigned row, plane; };
extern "C" __global__ void __launch_bounds__(24) copy(unsigned *to, const Sizes sizes, float scale) {
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned y = blockIdx.y * blockDim.y + threadIdx.y;
    unsigned z = blockIdx.z * blockDim.z + threadIdx.z;
    to[x + y * sizes.row + z * sizes.plane] = (unsigned)(fma(scale, (float)x, 0.5f)) + 100 * y + 10000 * z;
}
"""

# Sums all threads' numbers by halves, once per element, and counts threads in the static memory of each block.
TREE = b"""
extern "C" __global__ void __launch_bounds__(1024) tree(const int *from, int *to, int rounds) {
    extern __shared__ __align__(16) int sums[];
    __shared__ int count;
    unsigned self = threadIdx.x;
    if (self == 0) count = 0;
    for (int round = 0; round < rounds; ++round) {
        sums[self] = from[blockIdx.x * blockDim.x + self] + round;
        for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
            __syncthreads();
            if (self < half) sums[self] += sums[self + half];
        }
        __syncthreads();
        atomicAdd(&count, 1);
        __syncthreads();
        if (self == 0) to[blockIdx.x * rounds + round] = sums[0] + 1000000 * count;
        __syncthreads();
    }
}
"""

# Half of the last warp has no threads, and in each warp lane 7 ends early.
LANES = b"""
extern "C" __global__ void lanes(unsigned *to) {
    unsigned self = threadIdx.x, *own = to + 6 * self;
    own[0] = __shfl_xor_sync(-1, self, 3);
    own[1] = __shfl_up_sync(-1, self, 2);
    own[2] = __shfl_down_sync(-1, self, 5);
    if (self % warpSize == 7) return;
    own[3] = __ballot_sync(-1, self % 3 == 0);
    own[4] = __shfl_sync(-1, self, 4) + 1000 * __any_sync(-1, self == 33) + 2000 * __all_sync(-1, self < 40);
    own[5] = atomicAdd(to + 6 * blockDim.x, 1u);
}
"""


def lanes_of(self, threads):
    """What LANES writes for one thread, but for the last number, which only has to be another one for each."""
    first = self // 32 * 32
    there = [other for other in range(first, first + 32) if other < threads]

    def value(other):
        return other if other in there else self

    there_later = [other for other in there if other % 32 != 7]
    ballot = sum(1 << other % 32 for other in there_later if other % 3 == 0)
    any_all = 1000 * (33 in there_later) + 2000 * (first == 0)
    up, down = value(self - 2), value(self + 5)
    return value(first + (self % 32 ^ 3)), up, down, ballot, first + 4 + any_all


def unsigned(address, count):
    return list(struct.unpack(f"{count}I", read(address, 4 * count)))


def compiles_kernels(gpu):
    gpu.enter()
    size = 6 * 4 * 8
    target = memory(bytes(4 * size))
    sizes = struct.pack("2I", 6, 24)
    launch(function(b"copy", NUMBERS), (2, 2, 2), (3, 2, 4), gpu.tensors, words(target.value), sizes, b"\0\0\0@")
    call("cuStreamSynchronize", gpu.tensors)
    assert unsigned(target, size) == [
        2 * x + 100 * y + 10000 * z for z in range(8) for y in range(4) for x in range(6)
    ]

    blocks, rounds = 3, 4
    for threads in [64, 1024]:
        numbers = [random.Random(threads).randrange(1000) for _ in range(blocks * threads)]
        source, target = memory(struct.pack(f"{len(numbers)}i", *numbers)), memory(bytes(4 * blocks * rounds))
        parameters = words(source.value), words(target.value), struct.pack("i", rounds)
        launch(function(b"tree", TREE), (blocks,), threads, gpu.tensors, *parameters, shared=4 * threads)
        call("cuStreamSynchronize", gpu.tensors)
        sums = [sum(numbers[block * threads : (block + 1) * threads]) for block in range(blocks)]
        assert unsigned(target, blocks * rounds) == [
            one + threads * number + 1000000 * threads * (number + 1) for one in sums for number in range(rounds)
        ]

    threads = 48
    target = memory(bytes(4 * (6 * threads + 1)))
    launch(function(b"lanes", LANES), (1,), threads, gpu.tensors, words(target.value))
    call("cuStreamSynchronize", gpu.tensors)
    results, order = unsigned(target, 6 * threads), []
    for self in range(threads):
        own = results[6 * self : 6 * self + 6]
        expected = lanes_of(self, threads)
        if self % 32 == 7:
            assert own[:3] == list(expected[:3]), f"thread {self}: {own}"
        else:
            assert own[:5] == list(expected), f"thread {self}: {own}, not {expected}"
            order.append(own[5])
    assert sorted(order) == list(range(threads - 2))

    # Launches are recorded, and limited, as those of the driver's own kernels.
    assert cuda.shimLaunches(b"tree") > 0
    launch(function(b"tree", TREE), (1,), 1025, gpu.tensors, *[words(0)] * 3, expected=701)
    log = compiled(b"extern \"C\" __global__ void wrong() {\n    missing = 1;\n}", expected=6).value
    assert b"missing" in log and b":2:" in log, log
    path, os.environ["PATH"] = os.environ["PATH"], "/nonexistent"
    log = compiled(b'extern "C" __global__ void without_compiler() {}', expected=6).value
    assert b"g++, which could not run" in log, log
    os.environ["PATH"] = path
    # Temporary variables have other numbers in each process, and types another order.
    types = b"struct __align__(4) A { int a; };", b"struct __align__(4) B { int b; };"
    kernel = b'extern "C" __global__ void numbered() { int _tmp_%d = 1; A _tmp_%d{_tmp_%d}; }'
    forms = [b"\n".join([*types[::order], kernel % (n, n + 9, n)]) for n, order in [(4, 1), (99, -1)]]
    one, other = (compiled(form).value for form in forms)
    assert one == other, f"{one}, {other}"
    assert compiled(forms[0].replace(b"= 1", b"= 2")).value != one
