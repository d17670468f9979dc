"""The programs of gpu-check: what each runs, what it needs, and the files whose changes bring it back."""

# Files whose effect only a GPU shows: patterns, and modules, which are a file `NAME.rs` and a folder. What runs without
# a GPU is tested without one, so a change there does not bring a program back.
CUDA = ["crates/cuda/src", "kernels/*.cuh", "kernels/order.cu"]
SERVER = ["src/server"]
ALL_REDUCE = ["kernels/all_reduce_*.cu"]
SHARDS = ["kernels/all_gather.cu", "kernels/reduce_scatter.cu"]
KERNELS = ["kernels/*.cu"]


class Program:
    """A program of a step. `command` begins with a file of programs/, and OUT in it is the report's folder. `needs`
    names keys of NEEDS in gpu-check. `covers` are files of the repository, besides CUDA and, where tensors are burn's,
    SERVER."""

    def __init__(self, name, about, command, covers, environment=None, needs=(), server=SERVER):
        self.name, self.about, self.command = name, about, command.split()
        self.covers, self.environment, self.needs = [*CUDA, *server, *covers], environment or {}, needs

    @property
    def between_gpus(self):
        return any(need in self.needs for need in ("two gpus", "four gpus", "eight gpus"))

    def selected_by(self, name):
        """Whether a name on the command line is that of this program, of its step, or of all between GPUs."""
        return self.name == name or self.name.startswith(name + "/") or name == "several" and self.between_gpus


def programs(gpus, soak="100000"):
    """Returns all programs, in the order in which they run. Some use all GPUs."""

    def test(name, about, file, covers, **options):
        # Tests of this module are of the software driver.
        target = file.split()[0]
        own = {"digits": "examples/", "operations": "crates/cuda/"}.get(target, "") + f"tests/{target}"
        return Program(name, about, f"test-{file} --nocapture --ignored --skip software::", [own, *covers], **options)

    def bench(part, about, covers, needs=()):
        command = f"example-gpu_bench --out OUT/{part} {part}"
        return Program(f"bench/gpu_bench/{part}", about, command, ["examples/gpu_bench", *covers], shared, needs)

    everywhere = {"BONFIRE_TEST_GPUS": str(gpus)}
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    digits = "example-digits --backend cuda --epochs 3 --ranks"
    burn_train = "example-burn_train --backend cuda --epochs 3 --devices"
    return [
        test("tests/cuda", "collectives between devices on one GPU", "cuda --skip soak --test-threads 4", ALL_REDUCE),
        test("tests/cuda_groups", "operations of a group on one GPU", "cuda_groups --test-threads 2", KERNELS),
        test("tests/cuda_compute", "collectives beside kernels of burn's", "cuda_compute --test-threads 1", ALL_REDUCE),
        test(
            "tests/cuda_training",
            "trainings, compared with the host",
            "cuda_training --test-threads 1",
            [*ALL_REDUCE, *SHARDS],
        ),
        test("tests/digits", "first steps of a training, compared with the host", "digits gpu", ALL_REDUCE),
        test(
            "tests/operations",
            "operations of a group, without burn",
            "operations --test-threads 1",
            KERNELS,
            server=[],
        ),
        test("tests/nccl", "communicators of NCCL", "nccl", [], needs=["nccl"]),
        test(
            "tests/nccl_groups",
            "operations of a group on NCCL",
            "cuda_groups --test-threads 1",
            [],
            environment={**everywhere, **shared, "BONFIRE_CUDA": "nccl"},
            needs=["nccl", "gpus for nccl"],
        ),
        # The tests of failures support only one GPU.
        test(
            "tests/gpus",
            "collectives between devices on all GPUs",
            "cuda --test-threads 1 --skip failure:: --skip soak --skip large_buffers",
            ALL_REDUCE,
            environment=everywhere,
            needs=["two gpus"],
        ),
        test(
            "tests/gpus_groups",
            "operations of a group on all GPUs",
            "cuda_groups --test-threads 1",
            KERNELS,
            environment=everywhere,
            needs=["two gpus"],
        ),
        # By default processes that share a GPU use host memory, because the GPU runs one of them at a time.
        test(
            "tests/processes",
            "ranks in two processes that share one GPU, by kernels",
            "cuda_groups --test-threads 1 processes::every processes::a_killed",
            KERNELS,
            environment={"BONFIRE_CUDA": "kernels"},
        ),
        test(
            "tests/gpus_processes",
            "ranks in two processes with a GPU each, by kernels",
            "cuda_groups --test-threads 1 processes::every processes::a_killed",
            KERNELS,
            environment={**everywhere, "BONFIRE_CUDA": "kernels"},
            needs=["two gpus"],
        ),
        # Figures for docs/measurements/gpu.md.
        bench("overlap", "computation and collectives at once", ["kernels/all_reduce_two_shot.cu"]),
        bench("large", "kernels on large buffers, beside copies", KERNELS),
        bench("small", "kernels on 8 KiB", KERNELS),
        bench("clients", "8 KiB through cubecl's clients", ALL_REDUCE),
        bench("nccl", "NCCL's time over ours", ALL_REDUCE, ["nccl", "gpus for nccl"]),
        bench("predicted", "the sizes with a predicted time", KERNELS),
        bench("sizes", "each form of all_reduce at every size", ALL_REDUCE),
        bench("messages", "messages between two devices", ["kernels/copy.cu"]),
        bench("unequal", "parts of which one is longer", ["kernels/all_to_all.cu", "kernels/all_gather.cu"]),
        bench("steps", "training steps of 150 tensors", [*ALL_REDUCE, *SHARDS]),
        bench("order", "what the order of launches costs two processes", ALL_REDUCE),
        bench("containers", "kernels of processes in two containers", ALL_REDUCE),
        # Two ranks share the GPU if there is only one.
        *(
            Program(
                f"bench/paths/{ranks}",
                f"the fastest path of an all_reduce by size, ranks: {ranks}",
                f"cli-bonfire perf all_reduce --transport cuda --ranks {ranks} --paths",
                [*ALL_REDUCE, "crates/cli/src/perf/paths", "crates/cli/src/perf/devices"],
                shared,
                needs,
            )
            for ranks, needs in [(2, []), (4, ["four gpus"]), (8, ["eight gpus"])]
        ),
        *(
            test(
                f"forms/{form}",
                f"all_reduces by {form} only",
                "cuda all_reduce --skip failure --skip soak",
                [f"kernels/all_reduce_{form.replace('-', '_')}.cu"],
                environment={"BONFIRE_CUDA": form},
            )
            for form in ["push", "one-shot", "two-shot"]
        ),
        # Through host memory data must be aligned to 4 bytes: these tests do that.
        test(
            "forms/host",
            "collectives through host memory",
            "cuda fifty different_lists that_have_used transfers copies",
            [],
            environment={"BONFIRE_CUDA": "host"},
        ),
        # Memcheck makes each call many times slower, hence few tests and only some lengths.
        test(
            "sanitizer/memcheck",
            "some of tests/cuda under compute-sanitizer",
            "cuda --test-threads 1 all_reduce_on all_reduce_of_all transfers",
            ALL_REDUCE,
            environment={"BONFIRE_TEST_LENGTHS": "10"},
            needs=["compute-sanitizer"],
        ),
        test(
            "soak/cuda",
            "BONFIRE_SOAK random all_reduces, 100,000 by default",
            "cuda soak",
            ALL_REDUCE,
            environment={"BONFIRE_SOAK": soak},
        ),
        *(
            Program(
                f"trainers/digits/{ranks}",
                f"ranks: {ranks}",
                f"{digits} {ranks}",
                ["examples/digits", *ALL_REDUCE],
            )
            for ranks in [1, 2, 4]
        ),
        *(
            Program(
                f"trainers/burn_train/{ranks}",
                f"burn-train's DDP, ranks: {ranks}",
                f"{burn_train} {ranks}",
                ["examples/burn_train", *ALL_REDUCE],
            )
            for ranks in [1, 2, 4]
        ),
    ]
