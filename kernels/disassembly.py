"""What a compiler made of the kernels: loads in flight, registers and spills, read from cubins.

A warp stalls on memory in one way only: a load increments one of six scoreboards when it is issued and decrements it
when its data is there, and an instruction may wait until some scoreboards are zero. ptxas writes both into the control
word of each instruction, so loads are counted as the hardware counts them: a load is in flight until the first
instruction that waits for its scoreboard. Which registers instructions read would not tell: loads may share a
scoreboard, and an instruction that needs one of them then waits for all.

Each load has figures of its own, so that good ones do not hide a serial loop beside them. The count follows all paths
through the control flow graph, loops included, and takes the fewest of all paths. A predicated load counts as issued; a
call of a subroutine counts as a wait for everything. Where the control words are in an instruction is not documented,
so it is checked on every path: no instruction may name a register that a load in flight has yet to write.
"""

import collections
import json
import re
import struct
import subprocess
import tempfile

# What a kernel does at once. `loads` are the loads of 16 bytes or more of a tensor, as Loads; `words` is the number of
# 8-byte loads that poll failures and signals and are in flight at once, where there are most.
Figures = collections.namedtuple("Figures", "loads words registers spills")
# How many loads are in flight at once while this one is, and how many that an instruction does not wait for were then
# issued after all that it waits for. Both are the fewest of all paths, but of each path the most.
Load = collections.namedtuple("Load", "together ahead address")
# A load on one path.
Flight = collections.namedtuple("Flight", "at board register together ahead")

BULK = re.compile(r"LDG?\.E(\.\w+)*\.(128|256)\b(?!.*STRONG)")
WORD = re.compile(r"LDG?\.E\.64\.STRONG\.SYS")
SPILL = re.compile(r"(LDL|STL)\b")
# More loads than this are not told apart.
MOST = 24


class Undecodable(Exception):
    pass


class Instruction:
    def __init__(self, listed, control):
        self.opcode = listed["opcode"]
        self.operands = listed.get("operands", "")
        self.conditional = "predicate" in listed
        # Bits 41 and above of an instruction's second word: stall count (4), yield (1), scoreboard that is released
        # when the result is there (3; 7 is none), the same when the operands are read (3), scoreboards to wait for (6).
        self.sets = control >> 46 & 7
        self.waits = {board for board in range(6) if control >> 52 >> board & 1}
        # Waits until all but a number of loads are there. Loads may overtake each other, so this assumes all.
        if self.opcode.startswith("DEPBAR"):
            self.waits |= {int(board) for board in re.findall(r"SB(\d)", self.operands)}

    def names(self):
        return {int(register) for register in re.findall(r"\bR(\d+)", self.operands)}

    def branch(self):
        """Returns whether execution may go on with the next instruction, and the target's address or None."""
        kind = self.opcode.split(".")[0]
        if kind == "BRA":
            # A condition is a predicate of the instruction, or an operand before the target.
            *condition, target = self.operands.split(",")
            return self.conditional or bool(condition), int(target, 16)
        return self.conditional or kind not in ("EXIT", "RET", "BRX", "BRXU", "JMP", "JMX"), None


def control_words(cubin):
    """Returns each kernel's control words, number of registers, and stack frame's bytes, by name."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names = struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + 64 * i) for i in range(count)]
    attributes, code = {}, {}
    for name, _, _, _, start, size, _, info, _, _ in headers:
        name = headers[names][4] + name
        name = cubin[name : cubin.index(b"\0", name)].decode()
        if name == ".nv.info":
            at = start
            while at < start + size:
                form, attribute, length = struct.unpack_from("<BBH", cubin, at)
                if form == 4 and length == 8:
                    symbol, value = struct.unpack_from("<II", cubin, at + 4)
                    attributes[attribute, symbol] = value
                at += 4 + (length if form == 4 else 0)
        if name.startswith(".text."):
            words = struct.unpack_from(f"<{size // 8}Q", cubin, start)
            code[name.removeprefix(".text.")] = (words[1::2], info & 0xFFFFFF)
    registers, frame = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
    return {
        kernel: (words, attributes[registers, symbol], attributes[frame, symbol])
        for kernel, (words, symbol) in code.items()
    }


def disassemble(nvdisasm, cubin):
    """Returns each kernel's instructions, number of registers, and stack frame's bytes, by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([nvdisasm, "-json", file.name], check=True, capture_output=True, text=True).stdout
    code = control_words(cubin)
    kernels = {}
    # Subroutines are listed as functions of their own at the end of the section of the kernel that calls them.
    for function in json.loads(listing)[1]:
        name = function["function-name"]
        if name in code:
            words, registers, frame = code[name]
            instructions = [Instruction(*pair) for pair in zip(function["sass-instructions"], words)]
            kernels[name] = (instructions, registers, frame)
    if kernels.keys() != code.keys():
        raise Undecodable(f"kernels not listed: {code.keys() - kernels.keys()}")
    return kernels


def in_flight(instructions, is_load, starts):
    """Counts loads on all paths from these positions, with nothing in flight there. Returns a Load for each that is
    reached."""
    branches = [instruction.branch() for instruction in instructions]
    loads = [bool(is_load.match(instruction.opcode)) for instruction in instructions]
    found = {}

    def ended(flight):
        load = found.get(flight.at, Load(MOST, MOST, flight.at * 16))
        found[flight.at] = Load(min(load.together, flight.together), min(load.ahead, flight.ahead), load.address)

    # A state is the loads in flight, oldest first.
    seen = collections.defaultdict(set)
    todo = [(at, ()) for at in starts]
    while todo:
        at, state = todo.pop()
        while at < len(instructions) and state not in seen[at]:
            seen[at].add(state)
            instruction = instructions[at]
            there = [i for i, flight in enumerate(state) if flight.board in instruction.waits]
            if there:
                ahead = len(state) - 1 - there[-1]
                state = [flight._replace(ahead=max(flight.ahead, ahead)) for flight in state]
                for i in there:
                    ended(state[i])
                state = tuple(flight for flight in state if flight.board not in instruction.waits)
            if state and not loads[at]:
                names = instruction.names()
                for flight in state:
                    if flight.register in names:
                        what = f"{instruction.opcode} {instruction.operands}"
                        raise Undecodable(f"{what} does not wait for R{flight.register}")
            if loads[at]:
                if instruction.sets > 5:
                    raise Undecodable(f"{instruction.opcode} {instruction.operands} has no scoreboard")
                register = int(re.match(r"R(\d+)", instruction.operands)[1])
                if len(state) == MOST:
                    ended(state[0])
                state = (*state, Flight(at, instruction.sets, register, 0, 0))[-MOST:]
                state = tuple(flight._replace(together=max(flight.together, len(state))) for flight in state)
            goes_on, target = branches[at]
            if instruction.opcode.startswith("CALL") or not goes_on and target is None:
                for flight in state:
                    ended(flight)
                state = ()
            if target is not None:
                todo.append((target // 16, state))
            if not goes_on:
                break
            at += 1
    return list(found.values())


def figures(nvdisasm, cubin):
    """Returns each kernel's figures by name."""
    found = {}
    for name, (instructions, registers, frame) in disassemble(nvdisasm, cubin).items():
        spills = sum(bool(SPILL.match(instruction.opcode)) for instruction in instructions)
        # Ranks learn from each other's mail where tensors are, and all threads do so at the block's first barrier. So
        # what is loaded before it is mail, of which 16 bytes are one load.
        barriers = [at for at, instruction in enumerate(instructions) if instruction.opcode.startswith("BAR")]
        try:
            loads = in_flight(instructions, BULK, [at + 1 for at in barriers])
            words = max((load.together for load in in_flight(instructions, WORD, [0])), default=0)
        except Undecodable as error:
            raise Undecodable(f"{name}: {error}") from None
        found[name] = Figures(loads, words, registers, max(spills, frame))
    return found


# Requirements. These name what vector.cuh (UNROLL) and signal.cuh (MAX_RANKS) say.

REDUCING = re.compile(r"(?:two_shot|one_shot|reduce_scatter)_(sum|mean|max|min)_(\w+)")
MOVING = ("all_gather", "all_to_all", "broadcast", "copy", "gather", "scatter")
# The loads of a tile: single bytes take a register each when they are combined, so there are fewer of those.
TILE = collections.defaultdict(lambda: 4, i8=2, u8=2)
# Before its first signal a rank looks for a failure of its own and of each of 8 ranks.
FAILURES = 9

# The fewest that a kernel must have: loads, how many of them in flight together, how many ahead, and words. Nothing but
# their existence is required of as many loads as `lone` says.
Least = collections.namedtuple("Least", "loads lone together ahead words")


def least(kernel):
    """What a kernel must have. Only loads of 16 bytes count: tensors that are not aligned for them, and the last
    elements that do not fill a pack, are loaded in smaller units, by other instructions.

    A reducing kernel loads a tile of two ranks at a time: once for the first two, and in a loop for all others. When
    the first pack is used, all but one of the second tile's must still be in flight, except where combine.cuh says
    PACKS_FIRST: compilers mix the last ones. A rank that is alone in its group has code of its own, with one tile.
    all_to_all loads two tiles, other kernels that move data one."""
    if reducing := REDUCING.fullmatch(kernel):
        reduction, element = reducing.groups()
        tile = TILE[element]
        packs_first = element == "f32" and reduction in ("max", "min")
        return Least(5 * tile, tile, 2 * tile, 0 if packs_first else tile - 1, FAILURES)
    tile = TILE["Byte"]
    if kernel == "all_to_all":
        return Least(2 * tile, 0, 2 * tile, tile - 1, FAILURES)
    if kernel in MOVING:
        return Least(tile, 0, tile, 0, FAILURES)
    return Least(0, 0, 0, 0, FAILURES if kernel.startswith("push_") else 0)


def fewest(kernel, has):
    """Returns two Loads of those that are not lone: that with the fewest in flight together, and with the fewest
    ahead. Lone ones have fewer together than all others must have, so no other takes their place unnoticed."""
    loads = sorted(has.loads)[least(kernel).lone :]
    nothing = Load(0, 0, 0)
    return min(loads, default=nothing), min(loads, default=nothing, key=lambda load: load.ahead)


def shortcomings(kernel, has):
    """What a kernel lacks, as messages."""
    must = least(kernel)
    paired, used = fewest(kernel, has)
    compared = [
        (len(has.loads), must.loads, "16-byte loads"),
        (paired.together, must.together, f"loads in flight with that at {paired.address:#x}"),
        (used.ahead, must.ahead, f"loads in flight while others, with that at {used.address:#x}, are used"),
        (has.words, must.words, "words in flight"),
    ]
    lacks = [f"{number} {what}, not {needed}" for number, needed, what in compared if number < needed]
    return lacks + ([f"spills ({has.spills})"] if has.spills else [])


def table(found):
    """Lines with the figures of all kernels, which are by architecture and kernel. One per operation and element type,
    with the fewest loads and the most registers of its reductions, without lone loads; `!` marks spills."""
    rows = collections.defaultdict(lambda: collections.defaultdict(list))
    for (architecture, kernel), has in found.items():
        paired, used = fewest(kernel, has)
        row = re.sub(r"_(sum|mean|max|min)_", " ", kernel)
        rows[row][architecture].append((paired.together, used.ahead, has.words, has.registers, has.spills))
    architectures = list(dict.fromkeys(architecture for architecture, _ in found))
    lines = [f"{'loads/ahead/words, registers':26}" + "".join(f"{name:>13}" for name in architectures)]
    for row, columns in sorted(rows.items()):
        line = f"{row:26}"
        for architecture in architectures:
            all_of = list(zip(*columns[architecture]))
            least_of = "/".join(str(min(values)) for values in all_of[:3]) if all_of else ""
            line += f"{least_of:>8}{max(all_of[3]) if all_of else '':>4}" + ("!" if all_of and any(all_of[4]) else " ")
        lines.append(line.rstrip())
    return lines
