"""Litmus tests of the kernels' signals under PTX's memory model: one for each argument of docs/memory-model.md.

Orders and scopes of accesses to signals are read from the kernels' source, so a test fails if the source no longer
suffices. Each test has mutants, with an order weakened, a scope narrowed or something left out: each must allow the bad
outcome or a data race. Where the kernels do more than a test needs, it also has variants that are enough.

    python3 kernels/litmus.py       prints every case with its result
"""

import pathlib
import re
import sys
import time
from typing import Callable, NamedTuple

sys.dont_write_bytecode = True
from litmus_known import KNOWN, check_known  # noqa: E402
from memory_model import BARRIER, HOST, Place, Thread, atom, fence, load, store, verdict  # noqa: E402

KERNELS = pathlib.Path(__file__).resolve().parent

# The source

# Every access by a function of ptx.cuh: instruction, file and first argument.
ACCESSES = {
    "mail.store": ("st", "signal.cuh", "&out.epoch"),
    "mail.load": ("ld", "signal.cuh", "&in.epoch"),
    "step.store": ("st", "signal.cuh", "&control(peer).step[blockIdx.y][rank]"),
    "step.load": ("ld", "signal.cuh", "&theirs"),
    "ended.add": ("atom", "signal.cuh", "&own.ended"),
    "failure.claim": ("atom", "signal.cuh", "&own.failure"),
    "failure.load": ("ld", "signal.cuh", "&own.failure"),
    "news.store": ("st", "signal.cuh", "&control(peer).news[rank]"),
    "news.load": ("ld", "signal.cuh", "&own.news[peer]"),
    "host.failure.store": ("st", "signal.cuh", "&host().failure"),
    "host.abort.load": ("ld", "signal.cuh", "&host().abort"),
    "packet.store": ("st", "all_reduce_push.cu", "place(meeting.control(to).inbox[parity][rank])"),
    "packet.load": ("ld", "all_reduce_push.cu", "place(meeting.own.inbox[parity][from])"),
    "packet.clear": ("st", "all_reduce_push.cu", "place(meeting.own.inbox[parity][from])"),
    "ready.store": ("st", "order.cu", "reinterpret_cast<u64 *>(order.word)"),
    "done.load": ("ld", "order.cu", "word"),
    "await.abort.load": ("ld", "order.cu", "&host.abort"),
    "await.failure.load": ("ld", "order.cu", "&host.failure"),
    "await.failure.store": ("st", "order.cu", "&host.failure"),
    "tensor.load": ("ld", "vector.cuh", "any && present"),
    "tensor.store": ("st", "vector.cuh", "pack"),
}


# An instruction that accesses memory or orders accesses, and those of them that the model knows.
INSTRUCTION = re.compile(r"\b(ld|st|atom|red|fence|membar|cp)\.([\w.:]+)")
MODELLED = re.compile(r"(?:((?:relaxed|acquire|release|acq_rel)\.(?:cta|gpu|sys))\.)?global\.(?!nc\b).*")


def accesses_of_the_source():
    """Returns the order and scope of each access, and fails if the source has others than these."""
    functions, found, unknown = {}, {name: [] for name in ACCESSES}, []
    for function in (KERNELS / "ptx.cuh").read_text().split("\n__device__ ")[1:]:
        if instruction := INSTRUCTION.search(function.partition("asm")[2]):
            modelled = MODELLED.fullmatch(instruction[2])
            unknown += [] if modelled else [f"ptx.cuh: {instruction[0]}"]
            access = modelled and modelled[1] or "weak"
            functions[re.search(r"(\w+)\(", function)[1]] = (instruction[1], access)
    for file in sorted(KERNELS.glob("*.cu*")):
        for function, arguments in re.findall(r"\bptx::(\w+)\((?=(.*))", file.read_text()):
            kind, access = functions.get(function, ("", ""))
            names = [
                name
                for name, (of_kind, in_file, word) in ACCESSES.items()
                if (of_kind, in_file) == (kind, file.name) and arguments.startswith((f"{word},", f"{word})"))
            ]
            unknown += [f"{file.name}: {function}({arguments}"] if kind and not names else []
            for name in names:
                found[name].append(access)
    unknown += [f"{name} occurs {len(accesses)} times" for name, accesses in found.items() if len(accesses) != 1]
    if unknown:
        sys.exit("kernels/litmus.py: FAILED: accesses that are not those of the tests:\n" + "\n".join(unknown))
    return {name: accesses[0] for name, accesses in found.items()}


SOURCE = accesses_of_the_source()
# Of words in host memory, by the host: crates/cuda/src/memory.rs.
HOST_STORE, HOST_LOAD = "release.sys", "acquire.sys"

# The arguments


class Argument(NamedTuple):
    program: Callable  # returns the threads, and whether values are a bad outcome
    mutants: list
    enough: list
    admitted: bool  # the source itself allows the bad outcome


ARGUMENTS = []


def argument(mutants, enough=(), admitted=False):
    def add(program):
        ARGUMENTS.append(Argument(program, mutants, list(enough), admitted))
        return program

    return add


def each(**choices):
    return [{name: choice} for name, some in choices.items() for choice in some]


def when(given, *ops):
    return ops if given else ()


# A and B are ranks, on GPUs 0 and 1 unless `gpus` says otherwise. A block belongs to one kernel. Tensors and all other
# words without an access here are weak.
APART, ON_ONE_GPU = (0, 1), (0, 0)
NOT_RELEASED = ["relaxed.sys", "weak", "release.gpu", "release.cta"]
NOT_ACQUIRED = ["relaxed.sys", "weak", "acquire.gpu", "acquire.cta"]
NOT_OF_THE_SYSTEM = ["relaxed.gpu", "relaxed.cta", "weak"]


@argument(
    each(release=NOT_RELEASED, acquire=NOT_ACQUIRED, barrier=[False], stream=[False]),
    [dict(gpus=ON_ONE_GPU, release="release.gpu", acquire="acquire.gpu")],
)
def mail(release=SOURCE["mail.store"], acquire=SOURCE["mail.load"], barrier=True, stream=True, gpus=APART):
    """After begin() all threads of the block see the mail, and what earlier kernels of the peer wrote."""
    receive = [load("epoch", "", acquire, until=(1,)), load("mail", "mail"), store("places", 1)]
    return {
        "earlier kernel": Thread(Place(gpus[0], "A-"), [store("source", 1)]),
        "A": Thread(
            Place(gpus[0], "A"), [store("mail", 1), store("epoch", 1, release)], when(stream, "earlier kernel")
        ),
        "B": Thread(Place(gpus[1], "B"), [*receive, *when(barrier, BARRIER)]),
        "B's block": Thread(
            Place(gpus[1], "B"), [*when(barrier, BARRIER), load("places", "places"), load("source", "source")]
        ),
    }, lambda values: 0 in (values["mail"], values["places"], values["source"])


@argument(each(release=NOT_RELEASED, acquire=NOT_ACQUIRED, stream=[False], meets=[False]))
def next_mail(release=SOURCE["step.store"], acquire=SOURCE["step.load"], stream=True, meets=True):
    """The next mail does not overwrite one that the peer still needs."""
    send, receive = SOURCE["mail.store"], load("epoch", "", SOURCE["mail.load"], until=(1,))
    met = when(meets, load("step", "", acquire, until=(1,)))
    return {
        "A": Thread(Place(0, "A"), [store("mail", 1), store("epoch", 1, send), *met]),
        "A's next kernel": Thread(Place(0, "A+"), [store("mail", 2), store("epoch", 2, send)], when(stream, "A")),
        "B": Thread(Place(1, "B"), [receive, load("mail", "mail"), store("step", 1, release)]),
    }, lambda values: values["mail"] != 1


@argument(
    each(release=NOT_RELEASED, acquire=NOT_ACQUIRED, before=[False], after=[False]),
    [dict(gpus=ON_ONE_GPU, release="release.gpu", acquire="acquire.gpu")],
)
def step(release=SOURCE["step.store"], acquire=SOURCE["step.load"], before=True, after=True, gpus=APART):
    """What A's block did before meet() precedes what B's block does after it, also if A is a step ahead."""
    signals = [store("step", 1, release), store("step", 2, release)]
    uses = [store("source", 2), load("target", "target")]
    return {
        "A": Thread(Place(gpus[0], "A"), [*when(before, BARRIER), *signals]),
        "A's block": Thread(
            Place(gpus[0], "A"), [load("source", "source"), store("target", 1), *when(before, BARRIER)]
        ),
        "B": Thread(Place(gpus[1], "B"), [load("step", "", acquire, until=(1, 2)), *when(after, BARRIER)]),
        "B's block": Thread(Place(gpus[1], "B"), [*when(after, BARRIER), *uses]),
    }, lambda values: (values["source"], values["target"]) != (0, 1)


@argument(each(release=NOT_RELEASED, acquire=NOT_ACQUIRED, meets=[False]))
def one_shot(release=SOURCE["step.store"], acquire=SOURCE["step.load"], meets=True):
    """In place, both ranks have read both sources before one of them is overwritten."""

    def rank(gpu, own, other):
        reads = [load(f"tensor of {of}", f"{own} reads {of}") for of in "AB"]
        meet = when(meets, store(f"step of {own}", 1, release), load(f"step of {other}", "", acquire, until=(1,)))
        return Thread(Place(gpu, own), [*reads, *meet, store(f"tensor of {own}", 1)])

    return {"A": rank(0, "A", "B"), "B": rank(1, "B", "A")}, lambda values: any(
        values[f"{reader} reads {of}"] for reader in "AB" for of in "AB"
    )


@argument(each(meet=[0, 1], ended=[(), ("B 0",), ("B 1",)]))
def end_of_a_kernel(meet=2, ended=("B 0", "B 1")):
    """If each block has met the same block of its peer, the next kernel sees what all blocks of the peer wrote."""

    def blocks(number):
        signal = when(number < meet, store(f"step {number}", 1, SOURCE["step.store"]))
        wait = load(f"step {number}", "", SOURCE["step.load"], until=(1,) if number < meet else None)
        return {
            f"A {number}": Thread(Place(0, f"A {number}"), [store(f"part {number}", 1), *signal]),
            f"B {number}": Thread(Place(1, f"B {number}"), [wait]),
        }

    parts = [load("part 0", "part 0"), load("part 1", "part 1")]
    threads = {**blocks(0), **blocks(1), "B's next kernel": Thread(Place(1, "B+"), parts, ended)}
    return threads, lambda values: 0 in (values["part 0"], values["part 1"])


@argument(
    each(add=["relaxed.gpu", "acquire.gpu", "release.gpu", "acq_rel.cta"], barrier=[False], ended=[(), ("0", "1")])
)
def last_block(add=SOURCE["ended.add"], barrier=True, ended=("0", "0's block", "1", "2")):
    """All blocks read the same epoch before the last one advances it, and the next kernel reads the next one."""
    advance = [store("ended", 0), store("epoch", 1)]
    return {
        "0": Thread(Place(0, "0"), [load("epoch", "0 reads"), *when(barrier, BARRIER), atom("ended", "", add)]),
        "0's block": Thread(Place(0, "0"), [load("epoch", "0's block reads"), *when(barrier, BARRIER)]),
        "1": Thread(Place(0, "1"), [load("epoch", "1 reads"), atom("ended", "", add)]),
        "2": Thread(Place(0, "2"), [load("epoch", "2 reads"), atom("ended", "", add, until=(2,)), *advance]),
        "next": Thread(Place(0, "+"), [load("epoch", "epoch"), load("ended", "ended")], ended),
    }, lambda values: (values["epoch"], values["ended"]) != (1, 0) or any(
        values[f"{thread} reads"] for thread in ("0", "0's block", "1", "2")
    )


@argument(
    each(send=NOT_OF_THE_SYSTEM, take=NOT_OF_THE_SYSTEM, both=[False]),
    [dict(gpus=ON_ONE_GPU, send="relaxed.gpu", take="relaxed.gpu")],
)
def packet(send=SOURCE["packet.store"], take=SOURCE["packet.load"], both=True, gpus=APART):
    """A packet with the tag in both halves is whole. Nothing orders the halves."""
    high = load("high", "high", take, until=(1,) if both else None)
    return {
        "sender": Thread(Place(gpus[0], "S"), [store("low", 1, send), store("high", 1, send)]),
        "reader": Thread(Place(gpus[1], "R"), [load("low", "", take, until=(1,)), high]),
    }, lambda values: values["high"] == 0


@argument(each(sender_waits=[False], reader_waits=[False], stream=[False]))
def packet_is_kept(sender_waits=True, reader_waits=True, stream=True):
    """The packet of epoch e + 2 does not overwrite that of epoch e before it is read: no value is out of thin air."""
    send, take = SOURCE["packet.store"], SOURCE["packet.load"]
    # With the later packet it would go on waiting, and send no header.
    read = load("packet", "packet", take, until=(1, 3) if reader_waits else None)
    header = load("header", "", take, until=(1,) if sender_waits else None)
    return {
        "R e": Thread(Place(1, "R"), [read]),
        "R e + 1": Thread(Place(1, "R+"), [store("header", 1, send)], when(stream, "R e")),
        "S e": Thread(Place(0, "S"), [store("packet", 1, send)]),
        "S e + 1": Thread(Place(0, "S+"), [header], ("S e",)),
        "S e + 2": Thread(Place(0, "S++"), [store("packet", 3, send)], ("S e + 1",)),
    }, lambda values: values["packet"] == 3


@argument(
    [
        *[dict(send=order, take="acquire.sys") for order in NOT_RELEASED],
        *[dict(send="release.sys", take=order) for order in NOT_ACQUIRED],
        *each(before=["acq_rel.sys"], after=["acq_rel.sys"]),
        dict(before="acq_rel.gpu", after="acq_rel.gpu"),
    ],
    [dict(send="release.sys", take="acquire.sys"), dict(before="acq_rel.sys", after="acq_rel.sys")],
    admitted=True,
)
def clear(send=SOURCE["packet.store"], take=SOURCE["packet.load"], before="", after=""):
    """The reader's zeros over the packet of epoch e do not overwrite that of epoch e + 2. The parameters are about the
    header of epoch e + 1: its store and load, and fences before the one and after the other."""
    read = load("packet", "", SOURCE["packet.load"], until=(1,))
    header = load("header", "", take, until=(1,))
    return {
        "R e": Thread(Place(1, "R"), [read, store("packet", 0, SOURCE["packet.clear"])]),
        "R e + 1": Thread(Place(1, "R+"), [*when(before, fence(before)), store("header", 1, send)], ("R e",)),
        "S e": Thread(Place(0, "S"), [store("packet", 1, SOURCE["packet.store"])]),
        "S e + 1": Thread(Place(0, "S+"), [header, *when(after, fence(after))], ("S e",)),
        "S e + 2": Thread(Place(0, "S++"), [store("packet", 3, SOURCE["packet.store"])], ("S e + 1",)),
    }, lambda values: values["packet at the end"] != {3}


@argument(each(claim=["relaxed.cta"], look=["relaxed.cta", "weak"]), [dict(look="relaxed.gpu")])
def failure_word(claim=SOURCE["failure.claim"], look=SOURCE["failure.load"]):
    """One block of a rank claims its failure word. An atom that finds it claimed would store nothing."""
    return {
        "0": Thread(Place(0, "0"), [atom("failure", "0 finds", claim, 1)]),
        "1": Thread(Place(0, "1"), [atom("failure", "1 finds", claim, 2)]),
        "2": Thread(Place(0, "2"), [load("failure", "", look)]),
    }, lambda values: values["0 finds"] == values["1 finds"] == 0


def never(_):
    return False


@argument(
    each(send=NOT_OF_THE_SYSTEM, look=NOT_OF_THE_SYSTEM),
    [dict(gpus=ON_ONE_GPU, send="relaxed.gpu", look="relaxed.gpu")],
)
def news(send=SOURCE["news.store"], look=SOURCE["news.load"], gpus=APART):
    """A peer's failure is no race."""
    return {
        "A": Thread(Place(gpus[0], "A"), [store("news", 1, send)]),
        "B": Thread(Place(gpus[1], "B"), [load("news", "", look)]),
    }, never


@argument(
    each(abort=NOT_OF_THE_SYSTEM, report=NOT_OF_THE_SYSTEM, late_abort=NOT_OF_THE_SYSTEM, late=NOT_OF_THE_SYSTEM),
    [dict(found="relaxed.gpu")],
)
def host_words(
    abort=SOURCE["host.abort.load"], report=SOURCE["host.failure.store"], late_abort=SOURCE["await.abort.load"],
    found=SOURCE["await.failure.load"], late=SOURCE["await.failure.store"],
):  # fmt: skip
    """The host's abort, and reports to the host, are no races, also if a collective and await_done report at once."""
    awaits = [load("abort", "", late_abort), load("failure", "", found), store("failure", 2, late)]
    return {
        "host": Thread(HOST, [store("abort", 1, HOST_STORE), load("failure", "", HOST_LOAD)]),
        "collective": Thread(Place(0, "C"), [load("abort", "", abort), store("failure", 1, report)]),
        "await_done": Thread(Place(0, "D"), awaits),
    }, never


# PTX's model does not have the driver's operations on words. From the driver's documentation this is assumed: they are
# by a thread of no GPU; a wait is an acquire, a write a fence and then a relaxed store, all of system scope.
DRIVER = HOST


@argument(
    each(ready=NOT_RELEASED, wait=NOT_ACQUIRED, events=[False], stream=[False]),
    [dict(ready="release.gpu", driver=Place(0, "driver"))],
)
def ready(ready=SOURCE["ready.store"], wait="acquire.sys", events=True, stream=True, driver=DRIVER):
    """Work on a tensor's stream precedes the collective, on its own GPU and on a peer's."""
    reads = [load("tensor", "A reads"), store("epoch", 1, SOURCE["mail.store"])]
    peer_reads = [load("epoch", "", SOURCE["mail.load"], until=(1,)), load("tensor", "B reads")]
    return {
        "work": Thread(Place(0, "W"), [store("tensor", 1)]),
        "tensors_ready": Thread(Place(0, "T"), [store("READY", 1, ready)], when(events, "work")),
        "driver": Thread(driver, [load("READY", "", wait, until=(1,))]),
        "A": Thread(Place(0, "A"), reads, when(stream, "driver")),
        "B": Thread(Place(1, "B"), peer_reads),
    }, lambda values: 0 in (values["A reads"], values["B reads"])


@argument(
    each(done=NOT_ACQUIRED, host=["relaxed.sys"], write=["", "acq_rel.gpu"], stream=[False]),
    [dict(done="acquire.gpu", driver=Place(0, "driver"))],
)
def done(done=SOURCE["done.load"], host=HOST_LOAD, write="acq_rel.sys", stream=True, driver=DRIVER):
    """The collective, and what a peer wrote in it, precedes later work that waits for DONE on a GPU or on the host."""
    return {
        "B": Thread(Place(1, "B"), [store("target", 1), store("step", 1, SOURCE["step.store"])]),
        "A": Thread(Place(0, "A"), [load("step", "", SOURCE["step.load"], until=(1,))]),
        "driver": Thread(driver, [*when(write, fence(write)), store("DONE", 1, "relaxed.sys")], when(stream, "A")),
        "await_done": Thread(Place(0, "D"), [load("DONE", "", done, until=(1,))]),
        "later work": Thread(Place(0, "L"), [load("target", "later")], ("await_done",)),
        "host": Thread(HOST, [load("DONE", "", host, until=(1,))]),
        "the host's work": Thread(Place(0, "H"), [load("target", "host's")], ("host",)),
    }, lambda values: 0 in (values["later"], values["host's"])


def check_arguments(show):
    """Returns the cases that are not as expected."""
    wrong = []
    for test in ARGUMENTS:
        safe = [*test.enough] if test.admitted else [{}, *test.enough]
        for case in [{}, *test.enough, *test.mutants]:
            bad, races = verdict(*test.program(**case))
            changes = ", ".join(f"{name}={value}" for name, value in case.items()) or "as in the source"
            result = "; ".join(["bad outcome"] * bad + [f"race on {race}" for race in sorted(races)[:1]]) or "safe"
            show(f"{test.program.__name__}: {changes}: {result}")
            if (case in safe) != (result == "safe"):
                wrong.append(f"{test.program.__name__}: {changes}: {result}")
    return wrong


def check(show=lambda _: None):
    """Returns what is not as expected, and a summary."""
    began = time.monotonic()
    wrong = check_known(show) + check_arguments(show)
    admitted, mutants = sum(test.admitted for test in ARGUMENTS), sum(len(test.mutants) for test in ARGUMENTS)
    summary = f"{len(ARGUMENTS) - admitted} arguments hold, {admitted} is admitted not to; {mutants} mutants are found"
    return wrong, f"memory model: {len(KNOWN)} known tests; {summary}, {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    failed, summary = check(print)
    if failed:
        sys.exit("\n".join(["kernels/litmus.py: FAILED:", *failed]))
    print(summary)
