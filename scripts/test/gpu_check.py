#!/usr/bin/env python3
"""Tests scripts/gpu-check without a GPU, on programs and libraries that only look like CUDA's: gpu_check.py

Each test has a bundle of its own, in which every program is a shell script. Needs a C compiler for the libraries.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "gpu-check"
sys.dont_write_bytecode = True
sys.path.insert(0, str(SCRIPT.parent))
from gpu import ledger  # noqa: E402
from gpu.programs import programs  # noqa: E402

# With the numbers that a library's version function returns as macros.
LIBRARY = """
int cuDriverGetVersion(int *version) { *version = DRIVER; return 0; }
int nvrtcVersion(int *major, int *minor) { *major = NVRTC; *minor = 4; return 0; }
int ncclGetVersion(int *version) { *version = 22703; return 0; }
"""
OK = "echo 'test result: ok. 7 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out'"
REAL_TOOLKIT = os.path.exists("/usr/local/cuda") or shutil.which("nvcc")


def alive(process):
    """Whether a process runs, from its number in a file."""
    try:
        state = pathlib.Path(f"/proc/{int(process.read_text())}/stat").read_text()
        return state.rsplit(")", 1)[1].split()[0] not in "ZX"
    # ValueError: the file exists, and the number is not yet in it.
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen")
        time.sleep(0.02)


class GpuCheck(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.made = tempfile.TemporaryDirectory()
        cls.library = {}
        for name, driver, nvrtc in [("cuda 12", 12040, 12), ("cuda 13", 13000, 13)]:
            cls.library[name] = pathlib.Path(cls.made.name) / f"{nvrtc}.so"
            options = ["-shared", "-fPIC", f"-DDRIVER={driver}", f"-DNVRTC={nvrtc}", "-x", "c", "-"]
            compile = ["cc", *options, "-o", cls.library[name]]
            subprocess.run(compile, input=LIBRARY, text=True, check=True)

    @classmethod
    def tearDownClass(cls):
        cls.made.cleanup()

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.out, self.bundle = self.folder / "out", self.folder / "bundle"
        for name in ["bundle/programs", "bin", "driver", "temporary"]:
            (self.folder / name).mkdir(parents=True)
        self.script_into(self.bundle)
        (self.bundle / "gpu" / "hashes.json").write_text("{}")
        (self.bundle / "commit").write_text("0123456789ab\n")
        self.executable(self.folder / "bin" / "nvidia-smi", "echo 'Some GPU, 80 GiB, 550.1'")
        self.put("driver/libcuda.so.1")
        # Its temporary folders are checked.
        self.environment = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{self.folder}/driver",
            "TMPDIR": f"{self.folder}/temporary",
        }

    def script_into(self, folder):
        shutil.copy2(SCRIPT, folder)
        shutil.copytree(SCRIPT.parent / "gpu", folder / "gpu")

    def executable(self, path, text):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def program(self, name, text):
        self.executable(self.bundle / "programs" / name, text)

    def put(self, name, version="cuda 12"):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".h":
            path.write_text(f"#define CUDA_VERSION {12040 if version == 'cuda 12' else 13000}\n")
        else:
            shutil.copy(self.library[version], path)

    def toolkit(self):
        """A toolkit in the usual layout, with NCCL."""
        for name in ["lib64/libnvrtc.so.12", "lib64/libnccl.so.2", "include/cuda_fp16.h", "include/cuda.h"]:
            self.put(f"toolkit/{name}")
        self.environment["CUDA_PATH"] = f"{self.folder}/toolkit"

    def start(self, *arguments):
        command = [sys.executable, self.bundle / "gpu-check", "--out", self.out, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=self.environment, text=True, **pipes)

    def check(self, *arguments, status=0):
        """Runs gpu-check, and returns its output. A status of None may be any."""
        process = self.start(*arguments)
        output = process.communicate(timeout=60)[0]
        self.assertIn(status, (None, process.returncode), output)
        self.assertEqual(list((self.folder / "temporary").iterdir()), [], "temporary folders are removed")
        return output

    def rows(self):
        report = json.loads((self.out / "report.json").read_text())
        return {row["program"]: row for row in report["programs"]}

    # What is found

    def found_in(self, *files, **environment):
        """Checks that a program finds NVRTC and all headers in a toolkit with these files."""
        for name in files:
            self.put(name)
        self.environment.update(environment)
        headers = " ".join(f'"$CUDA_PATH/include/{pathlib.Path(name).name}"' for name in files if name.endswith(".h"))
        self.program(
            "test-cuda",
            f'for file in {headers} "$CUDA_PATH/lib64/libnvrtc.so"; do cat "$file" >/dev/null || exit 3; done\n'
            f'for folder in $(echo "$LD_LIBRARY_PATH" | tr : " "); do ls "$folder"; done | grep -q libnvrtc || exit 4\n'
            f"{OK}",
        )
        output = self.check("tests/cuda")
        self.assertIn("passed, 7 tests passed, 0 failed", output)
        return output

    def test_a_toolkit_of_an_option(self):
        names = ["kit/lib64/libnvrtc.so.12", "kit/include/cuda_fp16.h", "kit/include/cuda.h"]
        for name in names:
            self.put(name)
        self.program("test-cuda", OK)
        output = self.check("--cuda", str(self.folder / "kit"), "tests/cuda")
        self.assertIn(f"{self.folder}/kit/lib64/libnvrtc.so.12 (12.4)", output)
        self.assertIn(f"{self.folder}/kit/include/cuda_fp16.h (12.4)", output)

    @unittest.skipIf(REAL_TOOLKIT, "this machine has a toolkit, which comes first")
    def test_the_layout_of_conda(self):
        kit = "conda/targets/x86_64-linux"
        self.found_in("conda/lib/libnvrtc.so.12", f"{kit}/include/cuda_fp16.h", CONDA_PREFIX=f"{self.folder}/conda")

    @unittest.skipIf(REAL_TOOLKIT, "this machine has a toolkit, which comes first")
    def test_the_layout_of_pip_with_a_folder_for_each_package(self):
        site = "site/nvidia"
        self.found_in(
            f"{site}/cuda_nvrtc/lib/libnvrtc.so.12",
            f"{site}/cuda_runtime/include/cuda_fp16.h",
            f"{site}/cuda_cccl/include/barrier.h",
            PYTHONPATH=f"{self.folder}/site",
        )

    @unittest.skipIf(REAL_TOOLKIT, "this machine has a toolkit, which comes first")
    def test_the_layout_of_pip_from_cuda_13_on(self):
        site = "site/nvidia/cu13"
        names = [f"{site}/lib/libnvrtc.so.13", f"{site}/include/cuda_fp16.h"]
        output = self.found_in(*names, PYTHONPATH=f"{self.folder}/site")
        self.assertNotIn("WARNING", output)

    @unittest.skipIf(REAL_TOOLKIT, "this machine has a toolkit, which comes first")
    def test_the_version_that_the_driver_is_not_too_old_for(self):
        for name in ["lib/libnvrtc.so.13", "include/cuda_fp16.h", "include/cuda.h"]:
            self.put(f"site/nvidia/cu13/{name}", "cuda 13")
        self.environment["PYTHONPATH"] = f"{self.folder}/site"
        self.program("test-cuda", OK)
        self.assertIn("WARNING: this NVRTC is newer than the driver's CUDA", self.check("tests/cuda"))
        self.put("site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
        for name in ["cuda_fp16.h", "cuda.h"]:
            self.put(f"site/nvidia/cuda_runtime/include/{name}")
        output = self.check("tests/cuda")
        self.assertNotIn("WARNING", output)
        self.assertIn("site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12 (12.4)", output)
        self.assertIn("site/nvidia/cuda_runtime/include/cuda_fp16.h (12.4)", output)

    def test_a_sanitizer_that_may_not_be_run_is_copied(self):
        self.toolkit()
        package = self.folder / "site/nvidia/cuda_sanitizer_api"
        for folder in ["bin", "lib"]:
            (package / folder).mkdir(parents=True)
        (package / "lib" / "libsanitizer-collection.so").write_text("")
        script = '#!/bin/sh\nls "$(dirname "$0")/libsanitizer-collection.so" || exit 3\nshift 4\nexec "$@"\n'
        (package / "bin" / "compute-sanitizer").write_text(script)
        self.environment["PYTHONPATH"] = f"{self.folder}/site"
        self.program("test-cuda", OK)
        self.check("sanitizer")
        self.assertEqual(self.rows()["sanitizer/memcheck"]["result"], "passed")

    @unittest.skipIf(REAL_TOOLKIT, "this machine has a toolkit")
    def test_what_lacks_is_named_at_once(self):
        self.program("test-cuda", OK)
        output = self.check(status=1)
        self.assertIn("libnvrtc: pip install nvidia-cuda-nvrtc-cu12", output)
        self.assertIn("cuda_fp16.h: pip install nvidia-cuda-runtime-cu12", output)
        self.assertNotIn("tests/cuda", output)
        self.executable(self.folder / "bin" / "nvidia-smi", "echo 'No devices were found'; exit 6")
        self.assertIn("nvidia-smi finds none (No devices were found)", self.check(status=1))

    # Results

    def test_a_skip_is_visible_and_not_passed(self):
        self.toolkit()
        (self.folder / "toolkit/lib64/libnccl.so.2").unlink()
        self.program("test-nccl", OK)
        skipped = "skipped: libnccl not found; pip install nvidia-nccl-cu12"
        self.assertIn(f"tests/nccl                   {skipped}\n", self.check("tests/nccl", status=77))
        self.assertIn(f"| tests/nccl | {skipped} |", (self.out / "summary.md").read_text())
        row = self.rows()["tests/nccl"]
        self.assertEqual((row["result"], row["reason"]), ("skipped", skipped.removeprefix("skipped: ")))
        self.put("toolkit/lib64/libnccl.so.2")
        output = self.check("tests/nccl_groups", status=77)
        self.assertIn("skipped: needs NCCL 2.30 or 5 GPUs; found NCCL 2.27.3 and 1 GPUs", output)
        self.assertIn("skipped: needs 4 GPUs; found 1", self.check("bench/paths/4", status=77))

    def test_failures(self):
        self.toolkit()
        self.program("test-cuda", f"echo 'test it ... FAILED'; {OK}; exit 101")
        self.program("test-cuda_groups", "echo 'test result: ok. 0 passed; 0 failed; 0 ignored'")
        self.program("test-cuda_compute", "kill -SEGV $$")
        self.program("test-digits", "sleep 60")
        names = ["tests/cuda", "tests/cuda_groups", "tests/cuda_compute", "tests/digits"]
        output = self.check("--limit", "0.5", *names, status=1)
        self.assertIn("FAILED: exit status 101, 7 tests passed", output)
        self.assertIn("    test it ... FAILED\n", output)
        reasons = [(row["result"], row["reason"]) for row in self.rows().values()]
        expected = ["exit status 101", "no test of these names", "ended by SIGSEGV", "took longer than 0.5 s"]
        self.assertEqual(reasons, [("failed", reason) for reason in expected])

    def test_a_program_that_is_not_there_has_failed(self):
        self.toolkit()
        self.check("tests/digits", status=1)
        self.assertEqual(self.rows()["tests/digits"]["result"], "failed")

    def test_calls_add_to_one_report(self):
        self.toolkit()
        self.program("test-cuda", "exit 1")
        self.program("test-digits", OK)
        self.check("tests/cuda", status=1)
        self.check("tests/digits")
        self.program("test-cuda", OK)
        self.check("tests/cuda")
        self.assertEqual([row["result"] for row in self.rows().values()], ["passed", "passed"])
        self.assertEqual((self.out / "log.txt").read_text().count("\n== tests/"), 3)
        # Another commit's results are not mixed with these.
        (self.bundle / "commit").write_text("ba9876543210\n")
        self.check("tests/digits")
        self.assertEqual(list(self.rows()), ["tests/digits"])

    def test_the_order_of_steps(self):
        self.toolkit()
        tests = ["cuda", "cuda_groups", "cuda_compute", "cuda_training", "digits", "nccl", "operations"]
        for name in [f"test-{test}" for test in tests]:
            self.program(name, OK)
        for name in ["example-gpu_bench", "example-digits", "example-burn_train", "cli-bonfire"]:
            self.program(name, "echo a figure")
        output = self.check()
        steps = list(dict.fromkeys(name.split("/")[0] for name in self.rows()))
        self.assertEqual(steps, ["tests", "bench", "forms", "sanitizer", "soak", "trainers"])
        self.assertIn("a figure\n", output)
        self.assertIn("31 passed, 0 failed, 8 skipped", output)

    # The end at any moment

    def hanging(self):
        """Starts a program that waits, with a child of its own. Returns the script's process when both run."""
        self.toolkit()
        self.program("test-cuda", OK)
        numbers = [self.folder / "own", self.folder / "child"]
        self.program("test-digits", f"sleep 60 & echo $! >{numbers[1]}; echo $$ >{numbers[0]}; wait")
        process = self.start("tests/cuda", "tests/digits")
        self.addCleanup(process.stdout.close)
        until(lambda: numbers[0].exists() and alive(numbers[0]) and alive(numbers[1]))
        return process, numbers

    def test_killed(self):
        process, numbers = self.hanging()
        process.kill()
        process.wait()
        rows = self.rows()
        self.assertEqual([rows[name]["result"] for name in ("tests/cuda", "tests/digits")], ["passed", "started"])
        self.assertIn("| tests/digits | started: it was running when", (self.out / "summary.md").read_text())
        until(lambda: not alive(numbers[0]))
        os.kill(int(numbers[1].read_text()), signal.SIGKILL)

    def test_interrupted(self):
        for number in [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]:
            with self.subTest(number.name):
                process, numbers = self.hanging()
                process.send_signal(number)
                self.assertEqual(process.wait(30), 128 + number)
                self.assertEqual(self.rows()["tests/digits"]["result"], "interrupted")
                self.assertEqual(list((self.folder / "temporary").iterdir()), [])
                until(lambda: not any(map(alive, numbers)))
                numbers[0].unlink()

    def test_the_report_is_complete_at_any_moment(self):
        self.toolkit()
        self.program("test-cuda", OK)
        process, read = self.start("forms"), 0
        while process.poll() is None:
            if (self.out / "report.json").exists():
                json.loads((self.out / "report.json").read_text())
                read += 1
        process.communicate()
        self.assertGreater(read, 50)

    # Sittings

    def repository(self):
        """A repository with this script and a file for each that programs cover. All programs are due."""
        root = self.folder / "repository"
        measurements = root / ledger.MEASUREMENTS
        measurements.mkdir(parents=True)
        (root / "scripts").mkdir()
        self.script_into(root / "scripts")
        forms = [f"kernels/all_reduce_{form}.cu" for form in ("push", "one_shot", "two_shot")]
        modules = [pattern + ("" if "." in pattern else ".rs") for p in programs(1) for pattern in p.covers]
        for name in [*forms, "kernels/some.cuh", *(name for name in modules if "*" not in name)]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
        (measurements / "gpu.md").write_text("before\n" + "".join(ledger.MARKS) + "after\n")
        failed = {"hash": None, "result": "failed", "reason": None, "device": "a GPU", "driver": "1"}
        book = ledger.Ledger(measurements / ledger.NAME)
        book.rows = [
            {"program": program.name, "seconds": 4, "date": "2026-01-01", **failed} for program in programs(1)
        ]
        book.path.write_text(book.text())
        return root, measurements

    def sitting(self, root, *arguments, **more):
        """Runs a bundle of this repository with a report of its own."""
        (self.bundle / "gpu" / "hashes.json").write_text(json.dumps(ledger.hashes(programs(1), root)))
        shutil.copy(root / ledger.MEASUREMENTS / ledger.NAME, self.bundle / "gpu")
        shutil.rmtree(self.out, ignore_errors=True)
        return self.check(*arguments, **more)

    def in_repository(self, root, *arguments, status=0):
        command = [sys.executable, root / "scripts" / "gpu-check", *arguments]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(ended.returncode, status, ended.stdout)
        return ended.stdout

    def next_names(self, root):
        return [line.split()[0] for line in self.in_repository(root, "--next").splitlines()[1:]]

    def test_each_sitting_goes_on_where_the_last_one_ended(self):
        self.toolkit()
        root, measurements = self.repository()
        self.program("test-cuda", f"sleep 1.2; {OK}")
        # Each is expected to take 5 s, so that no sitting has time for two. On a slow machine one may have none.
        ran = []
        for _ in range(20):
            left = [name for name in self.next_names(root) if name.startswith("forms")]
            if not left:
                break
            output = self.sitting(root, "--budget", "6", "forms", status=None)
            ran.append(list(self.rows()))
            self.assertIn(f"{len(left) - len(ran[-1])} left" if len(left) > len(ran[-1]) else "1 passed", output)
            recorded = self.in_repository(root, "--record", self.out / "report.json")
            self.assertIn(f"{len(ran[-1])} rows entered", recorded)
        self.assertEqual(sum(ran, []), ["forms/push", "forms/one-shot", "forms/two-shot", "forms/host"])
        self.assertGreaterEqual(len(ran), 4)
        self.assertNotIn("forms", " ".join(self.next_names(root)))
        page = (measurements / "gpu.md").read_text()
        self.assertTrue(page.startswith("before\n") and page.endswith("after\n"))
        self.assertRegex(page, r"\| forms/host \| passed \| 20.* \| Some GPU, 550.1 \| [1-9]")
        # A report that is entered twice adds nothing.
        self.assertIn("0 rows entered", self.in_repository(root, "--record", self.out / "report.json"))
        self.assertIn("0 passed, 0 failed, 0 skipped", self.sitting(root, "--budget", "60", "forms", status=77))

    def test_a_change_brings_back_what_covers_it_and_nothing_else(self):
        root, measurements = self.repository()
        digests = ledger.hashes(programs(1), root)
        book = ledger.Ledger(measurements / ledger.NAME)
        book.rows = [{**row, "result": "passed", "hash": digests[row["program"]]} for row in book.rows]
        book.path.write_text(book.text())
        self.assertEqual(self.in_repository(root, "--next"), "nothing is due\n")
        (root / "kernels/all_reduce_push.cu").write_text("another")
        due = self.next_names(root)
        # What covers all kernels, or all of all_reduce, and the form itself.
        self.assertLessEqual({"forms/push", "tests/cuda", "tests/cuda_groups", "bench/paths/2"}, set(due))
        others = {"forms/one-shot", "forms/two-shot", "forms/host", "tests/nccl", "bench/gpu_bench/overlap"}
        self.assertFalse(others & set(due))
        (root / "kernels/all_reduce_push.cu").write_text("kernels/all_reduce_push.cu")
        self.assertEqual(self.in_repository(root, "--next"), "nothing is due\n")

    def test_what_the_budget_cuts_off_has_not_failed_and_comes_first(self):
        self.toolkit()
        root, _ = self.repository()
        self.program("test-cuda", "sleep 20")
        self.sitting(root, "--budget", "7", "forms/host", status=77)
        self.assertEqual(self.rows()["forms/host"]["result"], "cut off")
        # A call with the same report goes on with it: it needs longer than it had.
        output = self.check("--budget", "7", "forms/host", status=1)
        self.assertIn("--budget 7 is too small for any program that is due: give", output)

    def test_what_is_not_in_a_bundle_is_left(self):
        self.toolkit()
        root, _ = self.repository()
        self.program("test-cuda", OK)
        output = self.sitting(root, "--budget", "600", "tests/cuda", "tests/digits")
        self.assertIn("tests/digits                 left: it is not in this bundle\n", output)
        self.assertEqual(list(self.rows()), ["tests/cuda"])

    def test_what_cannot_be_used_is_one_line_and_changes_nothing(self):
        self.toolkit()
        root, measurements = self.repository()
        self.program("test-cuda", OK)
        self.sitting(root, "--budget", "60", "forms/host")
        report = self.out / "report.json"
        (root / "tests/cuda.rs").write_text("another")
        before = [(measurements / name).read_text() for name in (ledger.NAME, "gpu.md")]
        wrong, newer = self.folder / "wrong.json", self.folder / "newer.json"
        wrong.write_text("{}")
        newer.write_text('{"format": 2, "rows": []}')
        for given, message in [
            (report, "forms/host ran with other files than those here: record it at commit 0123456789ab"),
            (wrong, "is no report of gpu-check"),
            (self.folder / "none", "none: No such file or directory"),
        ]:
            output = self.in_repository(root, "--record", given, status=1)
            self.assertTrue(message in output and len(output.splitlines()) == 1, output)
        self.assertEqual(before, [(measurements / name).read_text() for name in (ledger.NAME, "gpu.md")])
        shutil.copy(newer, measurements / ledger.NAME)
        self.assertIn("is a ledger of format 2", self.in_repository(root, "--next", status=1))
        (measurements / ledger.NAME).write_text(before[0])
        (root / "tests/cuda.rs").unlink()
        output = self.in_repository(root, "--next", status=1)
        self.assertIn("tests/cuda covers tests/cuda, and there is no such file: correct gpu/programs.py", output)

    def test_the_page_has_the_table_of_the_ledger(self):
        measurements = SCRIPT.parent.parent / ledger.MEASUREMENTS
        page = (measurements / "gpu.md").read_text()
        self.assertEqual(page, ledger.with_table(page, ledger.Ledger(measurements / ledger.NAME).table(programs(1))))
        # All that programs cover exists.
        ledger.hashes(programs(1))

    # On another machine

    def test_a_rented_machine(self):
        """With an ssh that runs its command in another folder of this machine."""
        self.toolkit()
        self.program("test-cuda", OK)
        self.program("test-digits", "exit 1")
        home = self.folder / "home"
        home.mkdir()
        self.executable(self.folder / "bin/ssh", f'[ "$1" != -o ] || shift 2\nshift\ncd {home}\nexec sh -c "$*"')
        (self.folder / "bin/python3").symlink_to(sys.executable)
        subprocess.run(["tar", "-cJf", "programs.tar.xz", "programs"], cwd=self.bundle, check=True)
        shutil.rmtree(self.bundle / "programs")
        environment = {**self.environment, "BUNDLE": str(self.bundle), "INSTALL": "no", "OUT": str(self.out)}
        command = [SCRIPT.parent / "gpu-rent", "a-host", "tests/cuda", "tests/digits"]
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.assertEqual(ended.returncode, 1, ended.stdout)
        self.assertIn("1 passed, 1 failed, 0 skipped", ended.stdout)
        self.assertEqual([row["result"] for row in self.rows().values()], ["passed", "failed"])

    # Usage

    def test_wrong_arguments(self):
        for arguments, message in [
            (["nothing"], "there is no step or program nothing"),
            (["tests/cud"], "there is no step or program tests/cud"),
            (["--wrong"], "there is no option --wrong"),
            (["--limit"], "--limit needs a value"),
            (["--limit", "long"], "--limit is long, not a number of seconds"),
            (["--budget", "long"], "--budget is long, not a number of seconds"),
            (["--cuda", "/nowhere"], "--cuda: there is no folder /nowhere"),
        ]:
            self.assertIn(message, self.check(*arguments, status=2))
        self.assertIn("\ntests/cuda_groups ", self.check("--list"))
        self.assertIn("Exit status: 0 if no program failed", self.check("--help"))


if __name__ == "__main__":
    unittest.main()
