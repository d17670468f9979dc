"""The functions of the driver, and of NVRTC, in the folder that the command line names."""

import ctypes
import os
import struct
import sys

GPUS = int(os.environ.get("SHIM_GPUS", 1))

cuda = ctypes.CDLL(os.path.join(sys.argv[1], "libcuda.so"))
for count in [cuda.shimLaunches, cuda.shimBlocks, cuda.shimCalls, cuda.shimDownloaded, cuda.shimUploaded]:
    count.restype = ctypes.c_uint64
nvrtc = ctypes.CDLL(os.path.join(sys.argv[1], "libnvrtc.so"))
nccl = ctypes.CDLL(os.path.join(sys.argv[1], "libnccl.so"))

U64, POINTER = ctypes.c_uint64, ctypes.c_void_p


def call(name, *arguments, expected=0):
    result = getattr(cuda, name)(*arguments)
    assert result == expected, f"{name}: {result}, not {expected}"


def got(kind, name, *arguments):
    """Returns what a function stores through its first parameter."""
    value = kind()
    call(name, ctypes.byref(value), *arguments)
    return value


def got_after(kind, name, first):
    """Returns what a function stores through its second parameter."""
    value = kind()
    call(name, first, ctypes.byref(value))
    return value


def memory(data):
    address = got(U64, "cuMemAlloc_v2", ctypes.c_size_t(len(data)))
    call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
    return address


def read(address, size):
    data = ctypes.create_string_buffer(size)
    call("cuMemcpyDtoH_v2", data, address, ctypes.c_size_t(size))
    return data.raw


def words(*values):
    return struct.pack(f"{len(values)}Q", *values)


def word(address):
    return struct.unpack("Q", read(address, 8))[0]


def compiled(text, expected=0):
    """Compiles a program. Returns its image, or its log if an error is expected."""
    program = POINTER()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, None, 0, None, None) == 0
    result = nvrtc.nvrtcCompileProgram(program, 0, None)
    what = "nvrtcGetProgramLog" if result else "nvrtcGetPTX"
    size = ctypes.c_size_t()
    assert getattr(nvrtc, what + "Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, what)(program, text) == 0
    assert nvrtc.nvrtcDestroyProgram(ctypes.byref(program)) == 0
    assert result == expected, f"nvrtcCompileProgram: {result}, not {expected}: {text.value.decode()}"
    return text


# The driver finds its own kernels by name, whatever such a program contains beside this.
OWN = b"#define BONFIRE_PTX_CUH"


def function(name, text=OWN):
    module = got(POINTER, "cuModuleLoadData", compiled(text))
    return got(POINTER, "cuModuleGetFunction", module, name)


def launch(of, grid, threads, stream, *parameters, shared=0, expected=0):
    """Launches a kernel. The parameters are bytes; they are overwritten afterwards, so the launch must copy them. Sizes
    after the given ones are 1."""
    buffers = [ctypes.create_string_buffer(one, len(one)) for one in parameters]
    array = (POINTER * (len(buffers) + 1))(*[ctypes.addressof(one) for one in buffers])
    block = threads if isinstance(threads, tuple) else (threads,)
    grid, block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
    call("cuLaunchKernel", of, *grid, *block, shared, stream, array, None, expected=expected)
    for one in buffers:
        ctypes.memset(one, 0xFF, len(one))
