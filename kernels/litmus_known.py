"""Litmus tests whose results under PTX's memory model are known: they show that memory_model.py tells allowed from
forbidden. Called by litmus.py.
"""

import re

from memory_model import BARRIER, Place, Thread, atom, fence, load, store, verdict

BLOCK = [Place(0, "0")] * 4
BLOCKS = [Place(0, str(block)) for block in range(4)]  # of one GPU
GPUS = [Place(gpu, str(gpu)) for gpu in range(4)]
ACQ_REL, SC = "fence.acq_rel.gpu", "fence.sc.gpu"

# Names as in the literature. [ISA] gives the section of PTX ISA, version 9, with the test or the rule that decides it;
# [NVlabs] is a test of NVIDIA's repository "mixedproxy" with this result. The others follow from the axioms by hand.
# "x=1 release.gpu" is a store, "r=x" a load, "r=x+1 relaxed.gpu" an atom; what follows "r=x then" depends on it. The
# last column: is the outcome allowed?
KNOWN = [
    ("MP, fences [ISA, 8.10.6]", GPUS,
     ["x=1; fence.acq_rel.sys; f=1 relaxed.sys", "r=f relaxed.sys; fence.acq_rel.sys; s=x"], dict(r=1, s=0), False),
    ("MP, fences, cta between blocks", BLOCKS,
     ["x=1; fence.acq_rel.cta; f=1 relaxed.sys", "r=f relaxed.sys; fence.acq_rel.cta; s=x"], dict(r=1, s=0), True),
    ("MP, weak", BLOCKS, ["x=1; f=1", "r=f; s=x"], dict(r=1, s=0), True),
    ("MP, relaxed", BLOCKS, ["x=1; f=1 relaxed.gpu", "r=f relaxed.gpu; s=x"], dict(r=1, s=0), True),
    ("MP, gpu", BLOCKS, ["x=1; f=1 release.gpu", "r=f acquire.gpu; s=x"], dict(r=1, s=0), False),
    ("MP, gpu between GPUs", GPUS, ["x=1; f=1 release.gpu", "r=f acquire.gpu; s=x"], dict(r=1, s=0), True),
    ("MP, one scope too narrow", GPUS, ["x=1; f=1 release.sys", "r=f acquire.gpu; s=x"], dict(r=1, s=0), True),
    ("MP, cta and gpu in a block [NVlabs]", BLOCK,
     ["x=1; f=1 release.cta", "r=f acquire.gpu; s=x"], dict(r=1, s=0), False),
    ("MP, cta between blocks", BLOCKS, ["x=1; f=1 release.cta", "r=f acquire.cta; s=x"], dict(r=1, s=0), True),
    ("MP, barrier", BLOCK, ["x=1; barrier", "barrier; s=x"], dict(s=0), False),
    ("MP, barriers of two blocks", BLOCKS, ["x=1; barrier", "barrier; s=x"], dict(s=0), True),
    ("MP, second barrier", BLOCK, ["barrier; x=1; barrier", "barrier; s=x; barrier"], dict(s=0), True),
    ("MP, a later store to the flag [ISA, 8.8]", BLOCKS,
     ["x=1; f=1 release.gpu; f=2 relaxed.gpu", "r=f relaxed.gpu; fence.acq_rel.gpu; s=x"], dict(r=2, s=0), False),
    ("MP, a later acquire of the flag [ISA, 8.8]", BLOCKS,
     ["x=1; f=1 release.gpu", "f=2 relaxed.gpu", "r=f relaxed.gpu; q=f acquire.gpu; s=x"], dict(r=1, q=2, s=0), False),
    ("MP, through an atom", BLOCKS,
     ["x=1; f=1 release.gpu", "q=f+1 relaxed.gpu", "r=f acquire.gpu; s=x"], dict(q=1, r=2, s=0), False),
    ("MP, through an atom of a block", BLOCKS,
     ["x=1; f=1 release.gpu", "q=f+1 relaxed.cta", "r=f acquire.gpu; s=x"], dict(q=1, r=2, s=0), True),
    ("SB, fence.sc [ISA, 8.10.6]", BLOCKS, [f"x=1; {SC}; r=y", f"y=1; {SC}; s=x"], dict(r=0, s=0), False),
    ("SB, fence.sc, one after the other", BLOCKS, [f"x=1; {SC}; r=y", f"y=1; {SC}; s=x"], dict(r=1, s=0), True),
    ("SB, fence.acq_rel [ISA, 8.10.6]", BLOCKS, [f"x=1; {ACQ_REL}; r=y", f"y=1; {ACQ_REL}; s=x"], dict(r=0, s=0), True),
    ("SB, release and acquire", BLOCKS,
     ["x=1 release.gpu; r=y acquire.gpu", "y=1 release.gpu; s=x acquire.gpu"], dict(r=0, s=0), True),
    ("SB, two scopes [NVlabs]", BLOCKS, ["x=1; fence.sc.sys; r=y", f"y=1; {SC}; s=x"], dict(r=0, s=0), False),
    ("SB, cta between blocks", BLOCKS, ["x=1; fence.sc.cta; r=y", "y=1; fence.sc.cta; s=x"], dict(r=0, s=0), True),
    ("SB, barrier", BLOCK, ["x=1; barrier; r=y", "y=1; barrier; s=x"], dict(r=0), False),
    ("SB, atoms [NVlabs]", BLOCKS,
     ["a=x+1 acq_rel.gpu; r=y+1 acq_rel.gpu", "b=y+1 acq_rel.gpu; s=x+1 acq_rel.gpu"], dict(r=0, s=0), False),
    ("LB [ISA, 8.10.4]", BLOCKS, ["r=x; y=1", "s=y; x=1"], dict(r=1, s=1), True),
    ("LB, dependencies [ISA, 8.10.4]", BLOCKS, ["r=x then; y=1", "s=y then; x=1"], dict(r=1, s=1), False),
    ("LB, release and acquire", BLOCKS,
     ["r=x acquire.gpu; y=1 release.gpu", "s=y acquire.gpu; x=1 release.gpu"], dict(r=1, s=1), False),
    ("LB, one release", BLOCKS, ["r=x; y=1 release.gpu", "s=y acquire.gpu; x=1"], dict(r=1, s=1), False),
    ("CoRR [ISA, 8.10.5]", GPUS, ["x=1 relaxed.sys", "r=x relaxed.sys; s=x relaxed.sys"], dict(r=1, s=0), False),
    ("CoRR, weak [NVlabs]", BLOCK, ["x=1; x=2", "r=x; s=x"], dict(r=2, s=1), True),
    ("CoRR, gpu between GPUs", GPUS, ["x=1 relaxed.gpu", "r=x relaxed.gpu; s=x relaxed.gpu"], dict(r=1, s=0), True),
    ("CoRW [NVlabs]", BLOCKS, ["x=1 release.sys", "r=x acquire.sys; x=2; s=x"], dict(r=1, s=1), False),
    ("CoWR, one thread", BLOCKS, ["x=1; r=x"], dict(r=0), False),
    ("Coherence of two writers", BLOCKS,
     ["x=1 relaxed.gpu", "x=2 relaxed.gpu", "p=x relaxed.gpu; q=x relaxed.gpu", "r=x relaxed.gpu; s=x relaxed.gpu"],
     dict(p=1, q=2, r=2, s=1), False),
    ("Coherence of two writers, weak [NVlabs]", BLOCK,
     ["x=1", "x=2", "p=x acquire.sys; q=x acquire.sys", "r=x acquire.sys; s=x acquire.sys"],
     dict(p=1, q=2, r=2, s=1), True),
    ("IRIW, acquire", BLOCKS,
     ["x=1 relaxed.gpu", "y=1 relaxed.gpu", "p=x acquire.gpu; q=y acquire.gpu", "r=y acquire.gpu; s=x acquire.gpu"],
     dict(p=1, q=0, r=1, s=0), True),
    ("IRIW, fence.sc", BLOCKS,
     ["x=1 relaxed.gpu", "y=1 relaxed.gpu", f"p=x relaxed.gpu; {SC}; q=y relaxed.gpu",
      f"r=y relaxed.gpu; {SC}; s=x relaxed.gpu"], dict(p=1, q=0, r=1, s=0), False),
    ("WRC", BLOCKS, ["x=1 relaxed.gpu", "r=x relaxed.gpu; y=1 release.gpu", "s=y acquire.gpu; t=x"],
     dict(r=1, s=1, t=0), False),
    ("WRC, weak [NVlabs]", BLOCKS, ["x=1", "r=x acquire.gpu; x=2; f=1 release.sys", "s=f acquire.sys; t=x"],
     dict(r=1, s=1, t=1), True),
    ("WRC, strong [NVlabs]", BLOCKS,
     ["x=1 release.gpu", "r=x acquire.gpu; x=2; f=1 release.sys", "s=f acquire.sys; t=x"], dict(r=1, s=1, t=1), False),
    ("ISA2", BLOCKS, ["x=1; y=1 release.gpu", "r=y acquire.gpu; z=1 release.gpu", "s=z acquire.gpu; t=x"],
     dict(r=1, s=1, t=0), False),
    ("ISA2, cta and then gpu [NVlabs]", [BLOCKS[0], *BLOCKS],
     ["x=1; y=1 release.cta", "r=y acquire.cta; z=1 release.gpu", "s=z acquire.gpu; t=x"],
     dict(r=1, s=1, t=0), False),
    ("ISA2, not released again", BLOCKS,
     ["x=1; y=1 release.gpu", "r=y acquire.gpu; z=1 relaxed.gpu", "s=z acquire.gpu; t=x"], dict(r=1, s=1, t=0), True),
    ("2+2W", BLOCKS, ["x=1 relaxed.gpu; y=2 relaxed.gpu", "y=1 relaxed.gpu; x=2 relaxed.gpu"],
     {"x at the end": {1}, "y at the end": {1}}, True),
    ("2+2W, fence.sc", BLOCKS,
     [f"x=1 relaxed.gpu; {SC}; y=2 relaxed.gpu", f"y=1 relaxed.gpu; {SC}; x=2 relaxed.gpu"],
     {"x at the end": {1}, "y at the end": {1}}, False),
    ("Atomicity [ISA, 8.10.3]", GPUS, ["r=x+1 relaxed.sys", "s=x+1 relaxed.sys"], {"x at the end": {1}}, False),
    ("Atomicity, cta and gpu [ISA, 8.10.3]", BLOCKS, ["r=x+1 relaxed.cta", "s=x+1 relaxed.gpu"],
     {"x at the end": {1}}, True),
]  # fmt: skip
OP = re.compile(r"fence\.(\S+)|barrier|(\w+)=(\w+)(\+1)?(?: (\w+\.\w+))?( then)?")


def parsed(text):
    found = OP.fullmatch(text)
    fence_access, left, right, add, access, then = found.groups()
    if fence_access or not left:
        return fence(fence_access) if fence_access else BARRIER
    if right.isdigit():
        return store(left, int(right), access or "weak")
    return atom(right, left, access) if add else load(right, left, access or "weak", until=(0, 1) if then else None)


def check_known(show):
    """Returns the known tests with another result."""
    wrong = []
    for name, places, texts, outcome, expected in KNOWN:
        ops = [[parsed(op) for op in text.split("; ")] for text in texts]
        threads = {str(i): Thread(place, some) for i, (place, some) in enumerate(zip(places, ops))}
        allowed, _ = verdict(threads, lambda values: all(values[key] == outcome[key] for key in outcome))
        show(f"{name}: {'allowed' if allowed else 'forbidden'}")
        wrong += [name] if allowed != expected else []
    return wrong
