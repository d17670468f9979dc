"""A checker of litmus tests under PTX's memory model: small programs, all of whose executions it enumerates.

The rules are those of "Memory Consistency Model" in NVIDIA's PTX ISA, cited as [ISA, section] with the numbers of
version 9. Their formal version is Lustig, Sahasrabuddhe and Giroux, "A Formal Analysis of the NVIDIA PTX Memory
Consistency Model", ASPLOS 2019, cited as [paper], which is about version 6.0. The order of kernels on a stream is only
in later versions of the ISA, which also count program order alone as causality.

Modelled: loads, stores and atoms of whole words, weak or with an order and a scope; fences; barriers of a block; the
order of kernels on a stream; threads of the host. Not modelled: other proxies than the generic one, accesses that
overlap in part, clusters, and loops. A loop that waits for a value is its last load, with the values that end it.

Relations are lists with one integer for each event: bit j of row i means that event i is related to event j.
"""

import itertools
from typing import Callable, NamedTuple, Optional


class Place(NamedTuple):
    """Where a thread runs. The host has neither GPU nor block. A block belongs to one kernel only."""

    gpu: Optional[int]
    block: Optional[str]


HOST = Place(None, None)


class Op(NamedTuple):
    """An instruction. Its access is "weak", or an order and a scope as in PTX: "acquire.sys"."""

    kind: str  # load, store, atom, fence or barrier
    at: str = ""
    access: str = "weak"
    value: int = 0  # that a store writes, or that an atom adds
    name: str = ""  # of what a load or an atom reads
    until: Optional[tuple] = None  # the values with which a wait ends


def load(at, name="", access="weak", until=None):
    return Op("load", at, access, name=name, until=until)


def store(at, value, access="weak"):
    return Op("store", at, access, value)


def atom(at, name, access, add=1, until=None):
    return Op("atom", at, access, add, name, until)


def fence(access):
    return Op("fence", access=access)


BARRIER = Op("barrier")


class Thread(NamedTuple):
    place: Place
    ops: list
    after: tuple = ()  # threads of kernels that end before this one's begins


class Event(NamedTuple):
    """An instruction in an execution. An atom is two events, a read and a write [ISA, 8.4]."""

    kind: str  # R, W, F for a fence, B for a barrier
    thread: str
    place: Place
    op: Op
    order: str
    scope: str
    ordinal: int  # of a barrier among those of its thread


class Execution(NamedTuple):
    values: dict  # by the names of loads and atoms; "x at the end" is a set, because coherence is a partial order
    races: set


# What each half of an atom is, given the atom's order.
READ_HALF = {"relaxed": "relaxed", "acquire": "acquire", "release": "relaxed", "acq_rel": "acquire"}
WRITE_HALF = {"relaxed": "relaxed", "acquire": "relaxed", "release": "release", "acq_rel": "release"}


def closed(rows):
    """The transitive closure."""
    rows = list(rows)
    for k, _ in enumerate(rows):
        for i, row in enumerate(rows):
            if row >> k & 1:
                rows[i] |= rows[k]
    return rows


def irreflexive(rows):
    return not any(row >> i & 1 for i, row in enumerate(rows))


def bits(row):
    return (i for i in range(row.bit_length()) if row >> i & 1)


def reaches(scope, of, other):
    """Whether the scope of a thread's operation includes another thread [ISA, 8.5]."""
    if scope == "sys":
        return True
    same_gpu = of.gpu is not None and of.gpu == other.gpu
    return same_gpu and (scope == "gpu" or of.block == other.block)


class Program:
    """Threads by name, and all that is the same in all executions."""

    def __init__(self, threads):
        self.events, self.half, firsts, lasts = [], {}, {}, {}
        for name, thread in threads.items():
            firsts[name] = len(self.events)
            for number, op in enumerate(thread.ops):
                order, _, scope = op.access.partition(".")
                ordinal = sum(earlier.kind == "barrier" for earlier in thread.ops[:number])
                kinds = {"load": "R", "store": "W", "atom": "RW", "fence": "F", "barrier": "B"}[op.kind]
                for kind in kinds:
                    half = {"R": READ_HALF, "W": WRITE_HALF}[kind][order] if len(kinds) == 2 else order
                    self.events.append(Event(kind, name, thread.place, op, half, scope, ordinal))
                if len(kinds) == 2:
                    self.half[len(self.events) - 2] = len(self.events) - 1
            lasts[name] = len(self.events) - 1
        self.ids = range(len(self.events))
        self.reads = [i for i in self.ids if self.events[i].kind == "R"]
        self.writes = [i for i in self.ids if self.events[i].kind == "W"]
        self.locations = sorted({self.events[i].op.at for i in self.writes})

        # Program order [ISA, 8.9.1].
        self.po = self.relation(lambda i, j: i < j and self.events[i].thread == self.events[j].thread)
        self.po_loc = self.relation(lambda i, j: self.po[i] >> j & 1 and self.overlap(i, j))
        self.moral = self.relation(self.morally_strong)
        # What synchronises in every execution [ISA, 8.9.4]: barriers of a block, and "API synchronization", the end of
        # a task of a stream with the start of the next one.
        kernels = {(lasts[before], firsts[name]) for name, thread in threads.items() for before in thread.after}
        self.static = self.relation(lambda i, j: (i, j) in kernels or self.same_barrier(i, j))
        # No-Thin-Air [ISA, 8.10.4] needs to know which writes depend on which reads. Here an atom's write depends on
        # its read, and what follows a wait depends on it, also in later kernels: none of that runs before the wait
        # ends. Nothing else counts as dependent, which allows more executions.
        self.follows = closed([self.po[i] | self.static[i] for i in self.ids])
        self.depends = self.relation(
            lambda i, j: self.half.get(i) == j or self.events[i].op.until is not None and self.follows[i] >> j & 1
        )
        self.releases, self.acquires = self.release_patterns(), self.acquire_patterns()

    def relation(self, holds: Callable):
        return [sum(1 << j for j in self.ids if holds(i, j)) for i in self.ids]

    def overlap(self, i, j):
        return self.events[i].op.at != "" and self.events[i].op.at == self.events[j].op.at

    def strong(self, i):
        return self.events[i].kind in "RWF" and self.events[i].order != "weak"

    def morally_strong(self, i, j):
        """[ISA, 8.7]: of one thread, or both strong with scopes that include each other; the same bytes, if both access
        memory."""
        a, b = self.events[i], self.events[j]
        if i == j or (a.kind in "RW" and b.kind in "RW" and not self.overlap(i, j)):
            return False
        mutual = self.strong(i) and self.strong(j) and reaches(a.scope, a.place, b.place)
        return a.thread == b.thread or mutual and reaches(b.scope, b.place, a.place)

    def same_barrier(self, i, j):
        a, b = self.events[i], self.events[j]
        return a.kind == b.kind == "B" and i != j and (a.place, a.ordinal) == (b.place, b.ordinal)

    def release_patterns(self):
        """Pairs of first operation and write [ISA, 8.8]: a release; a release and a later strong write to the same
        word; a fence and a later strong write."""
        found = []
        for i, event in enumerate(self.events):
            if event.kind == "W" and event.order == "release":
                found += [(i, i)] + [(i, j) for j in self.writes if self.po_loc[i] >> j & 1 and self.strong(j)]
            if event.kind == "F":
                found += [(i, j) for j in self.writes if self.po[i] >> j & 1 and self.strong(j)]
        return found

    def acquire_patterns(self):
        """Pairs of read and last operation [ISA, 8.8]: an acquire; a strong read and a later acquire of the same word;
        a strong read and a later fence."""
        found = []
        for i, event in enumerate(self.events):
            if event.kind == "R" and event.order == "acquire":
                found += [(i, i)] + [(j, i) for j in self.reads if self.po_loc[j] >> i & 1 and self.strong(j)]
            if event.kind == "F":
                found += [(j, i) for j in self.reads if self.po[j] >> i & 1 and self.strong(j)]
        return found

    def executions(self):
        """Yields all executions that the axioms allow, and in which all waits end."""
        for source in itertools.product(*map(self.candidates, self.reads)):
            source = dict(zip(self.reads, source))
            rf = self.relation(lambda i, j: source.get(j) == i)
            # No-Thin-Air [ISA, 8.10.4; paper: acyclic(rf + dep)].
            if not irreflexive(closed([rf[i] | self.depends[i] for i in self.ids])):
                continue
            value = {i: self.value(i, source) for i in self.reads}
            if any((until := self.events[i].op.until) is not None and value[i] not in until for i in self.reads):
                continue
            for base in self.base_causalities(rf):
                cause, races = self.causality(rf, base)
                # Causality, first half [ISA, 8.10.6]: a read does not read from a write that it precedes.
                if any(cause[i] >> source[i] & 1 for i in self.reads if source[i] is not None):
                    continue
                for co in self.coherence_orders(cause):
                    if self.allowed(source, rf, cause, co):
                        yield Execution(self.final(value, source, co), races)

    def candidates(self, read):
        """The writes that a read may read from. None is the one that initialised the word to zero [ISA, 8.2.6]. Left
        out to save time: those that Causality forbids in every execution, because they follow the read or another
        write comes between."""
        writes = [j for j in self.writes if self.overlap(read, j)]
        before = [j for j in writes if self.follows[j] >> read & 1]
        some = [j for j in writes if not (self.follows[read] >> j & 1 or any(self.follows[j] >> k & 1 for k in before))]
        return some if before else [None, *some]

    def value(self, event, source):
        """What an event reads or writes. It ends, because it follows reads-from and dependencies."""
        if event is None:
            return 0
        if event in source:
            return self.value(source[event], source)
        op = self.events[event].op
        return op.value + (self.value(event - 1, source) if op.kind == "atom" else 0)

    def observed(self, write, rf):
        """The reads that a write precedes in observation order [ISA, 8.9.2]: by morally strong reads-from, also on
        through atoms."""
        reads = rf[write] & self.moral[write]
        for read in bits(reads):
            if read in self.half:
                reads |= self.observed(self.half[read], rf)
        return reads

    def base_causalities(self, rf):
        """Yields base causality [ISA, 8.9.5] for each order of the fences with `.sc`."""
        edges = list(map(int.__or__, self.po, self.static))
        for first, write in self.releases:
            for read, last in self.acquires:
                if self.observed(write, rf) >> read & 1 and self.moral[first] >> last & 1:
                    edges[first] |= 1 << last
        fences = [i for i in self.ids if self.events[i].order == "sc"]
        pairs = [(i, j) for i, j in itertools.combinations(fences, 2) if self.moral[i] >> j & 1]
        for turned in itertools.product([False, True], repeat=len(pairs)):
            order = [(j, i) if turn else (i, j) for turn, (i, j) in zip(turned, pairs)]
            base = list(edges)
            for i, j in order:
                base[i] |= 1 << j
            base = closed(base)
            # Fence-SC [ISA, 8.10.2]: their order does not contradict causality; and it is acyclic [ISA, 8.9.3].
            if not any(base[j] >> i & 1 for i, j in order):
                yield base

    def causality(self, rf, base):
        """Causality order of accesses to the same word [ISA, 8.9.5]: base causality, also after observation. And the
        data races [ISA, 8.7.1]: conflicts that are neither morally strong nor in causality order."""
        cause = list(base)
        for write in self.writes:
            for read in bits(self.observed(write, rf)):
                cause[write] |= base[read]
        cause = self.relation(lambda i, j: cause[i] >> j & 1 and self.overlap(i, j))
        races = set()
        for i, j in itertools.combinations(self.ids, 2):
            a, b = self.events[i], self.events[j]
            if self.overlap(i, j) and "W" in a.kind + b.kind and not self.moral[i] >> j & 1:
                if not (cause[i] >> j & 1 or cause[j] >> i & 1):
                    races.add(f"{a.op.at}: {a.op.kind} of {a.thread}, {b.op.kind} of {b.thread}")
        return cause, races

    def coherence_orders(self, cause):
        """Yields the coherence orders [ISA, 8.9.6]. By the axiom Coherence [ISA, 8.10.1] causality is part of it, and
        pairs that are morally strong have an order. Nothing else is ordered here: more order would forbid more."""
        wanted = [(i, j) for i, j in itertools.combinations(self.writes, 2) if self.moral[i] >> j & 1]

        def extended(co):
            co = closed(co)
            if not irreflexive(co):
                return
            open_pairs = [(i, j) for i, j in wanted if not (co[i] >> j & 1 or co[j] >> i & 1)]
            if not open_pairs:
                yield co
                return
            i, j = open_pairs[0]
            for first, second in [(i, j), (j, i)]:
                yield from extended([row | (1 << second if k == first else 0) for k, row in enumerate(co)])

        writes = sum(1 << i for i in self.writes)
        return extended([cause[i] & writes if i in self.writes else 0 for i in self.ids])

    def allowed(self, source, rf, cause, co):
        """Whether the axioms that need coherence hold."""
        # From-reads: a read precedes the writes that follow the one it read from [ISA, 8.9.7].
        fr = [0] * len(self.events)
        for read in self.reads:
            later = sum(1 << j for j in self.writes if self.overlap(read, j))
            fr[read] = later if source[read] is None else co[source[read]]
        # Causality, second half [ISA, 8.10.6]: a read does not miss a write that precedes it.
        if any(cause[write] >> read & 1 for read in self.reads for write in bits(fr[read])):
            return False
        # Atomicity [ISA, 8.10.3]: no morally strong write comes between an atom's read and its write.
        for read, write in self.half.items():
            between = fr[read] & self.moral[read] & ~(1 << write)
            if any(co[other] >> write & 1 and self.moral[other] >> write & 1 for other in bits(between)):
                return False
        # SC-per-Location [ISA, 8.10.5; paper: acyclic(strong(rf + co + fr) + po_loc)]. No known test needs it beside
        # the other axioms, since program order is part of causality.
        communication = [(rf[i] | co[i] | fr[i]) & self.moral[i] | self.po_loc[i] for i in self.ids]
        return irreflexive(closed(communication))

    def final(self, value, source, co):
        values = {self.events[i].op.name: value[i] for i in self.reads if self.events[i].op.name}
        for at in self.locations:
            last = (i for i in self.writes if self.events[i].op.at == at and not co[i])
            values[f"{at} at the end"] = {self.value(i, source) for i in last}
        return values


def verdict(threads, bad):
    """Returns whether a bad outcome is allowed, and the races of all executions. A program without an execution shows
    nothing, and is an error."""
    executions = list(Program(threads).executions())
    if not executions:
        raise ValueError("no execution in which all waits end")
    return any(bad(execution.values) for execution in executions), set().union(*(e.races for e in executions))
