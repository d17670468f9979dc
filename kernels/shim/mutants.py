"""Mutants of the kernels: a name, a file, a text that occurs there once, and its replacement.

MUTANTS must be caught where the kernels run, on the shim, and COMPILED in what NVRTC makes of them: these compute the
same, only slower.
"""


def unordered(name, where, file="signal.cuh"):
    release = where.startswith("ptx::store")
    word = "release" if release else "acquire"
    return (f"{name} is not {word}d", file, where, where.replace(word, "relaxed"))


def without_meeting(file):
    return (f"{file} ends without a meeting", f"{file}.cu", "meeting.end(meeting.meet());", "meeting.end(true);")


def swapped(name, file, first, second):
    return (name, file, first + second, second + first)


MUTANTS = [
    # Memory orders.
    unordered("mail", "ptx::store_release_system(&out.epoch"),
    unordered("mail", "ptx::load_acquire_system(&in.epoch"),
    unordered("a step", "ptx::store_release_system(&control(peer).step"),
    unordered("a step", "ptx::load_acquire_system(&theirs"),
    unordered("the tensors' ready word", "ptx::store_release_system(", "order.cu"),
    unordered("the call's done word", "ptx::load_acquire_system(", "order.cu"),
    (
        "the last block is not ordered",
        "shim/cuda.hpp",
        "std::memory_order_acq_rel",
        "std::memory_order_relaxed",
    ),
    # Waits.
    (
        "threads do not wait before a step",
        "signal.cuh",
        "        __syncthreads();\n        if (threadIdx.x < call.ranks) {",
        "        if (threadIdx.x < call.ranks) {",
    ),
    ("all steps are equal", "signal.cuh", "u64 now = epoch << 20 | ++step;", "u64 now = epoch << 20;"),
    ("epochs do not advance", "signal.cuh", "            own.epoch = epoch;\n", ""),
    ("mail of any call is accepted", "signal.cuh", "(&in.epoch) == epoch ?", "(&in.epoch) > 0 ?"),
    without_meeting("all_reduce_two_shot"),
    without_meeting("reduce_scatter"),
    without_meeting("all_gather"),
    without_meeting("broadcast"),
    without_meeting("all_to_all"),
    without_meeting("gather"),
    without_meeting("scatter"),
    without_meeting("copy"),
    swapped(
        "one-shot stores before all have read",
        "all_reduce_one_shot.cu",
        "        if (!meeting.meet()) return false;\n",
        "        store<T, N>(target, result, reach);\n",
    ),
    (
        "all_to_all writes before it has read",
        "all_to_all.cu",
        "        load_two<Byte, N>(out, at.mine, in, at.theirs, reach, true);\n",
        "        load<Byte, N>(out, at.mine, reach);\n"
        "        store<Byte, N>(at.to_them, out, reach);\n"
        "        load<Byte, N>(in, at.theirs, reach);\n",
    ),
    # Members.
    ("all members are the first one", "signal.cuh", "member(call.member[blockIdx.x])", "member(call.member[0])"),
    (
        "one member's blocks start before the next one's",
        "shim/device.cpp",
        "{number % launch.grid.x, number / launch.grid.x, 0}",
        "{number / launch.grid.y, number % launch.grid.y, 0}",
    ),
    # Pushes.
    ("pushes do not alternate", "all_reduce_push.cu", "parity(meeting.epoch % 2)", "parity(0)"),
    (
        "received packets are not cleared",
        "all_reduce_push.cu",
        "                ptx::store_pair_relaxed_system(place(meeting.own.inbox[parity][from]), {0, 0});\n",
        "",
    ),
    ("half a packet is enough", "all_reduce_push.cu", "u32(packet.low >> 32) == tag && ", ""),
    # Failures.
    ("peers' calls are not compared", "signal.cuh", "return theirs == digest ||", "return true ||"),
    ("a push does not compare calls", "all_reduce_push.cu", "well = meeting.agrees(r, data[r]);", "well = true;"),
    ("peers' failures are not checked", "signal.cuh", "any |= news[peer];", ""),
    ("the host's abort is not checked", "signal.cuh", "if (ptx::load_relaxed_system(&host().abort))", "if (false)"),
    ("no timeout", "signal.cuh", "if (ptx::nanoseconds() - began > call.timeout)", "if (false)"),
    ("no timeout for a call's end", "order.cu", "!aborted && ptx::nanoseconds() - began <= order.timeout", "!aborted"),
    (
        "a timeout overwrites an earlier failure",
        "order.cu",
        "if (ptx::load_relaxed_system(&host.failure) == 0) {",
        "if (true) {",
    ),
    # Arithmetic.
    ("NaNs keep their bits", "reduction.cuh", "value == value ? value : ptx::from_bits(0x7fc00000u)", "value"),
]

LATER_RANKS = "join_two<R, N, false>(sums, meeting, rank, rank + 1 < ranks, from, reach);"


def later_ranks(load):
    """Code that loads the packs of the second two and all further ranks in another way."""
    return f"""for (u32 r = rank; r < ranks && r < rank + 2; ++r) {{
            Tile<T, N> tile = {{}};
            const T *source = meeting.source<T>(r) + from;
            if (reach.ragged) load_elements<T, N>(tile, source, reach);
            reach.each_pack([&](u32 i, u64 at, bool present) {{ if (present) {{ {load} }} }});
            join<R, N, false>(sums, tile);
        }}"""


COMPILED = [
    ("a tile is one pack", "vector.cuh", "sizeof(T) == 1 ? 2 : 4;", "1;"),
    ("a tile that is only moved is one pack", "vector.cuh", "UNROLL<Byte> = 4;", "UNROLL<Byte> = 1;"),
    (
        "the second rank's loads wait for the first one's",
        "combine.cuh",
        "join_two<R, N, true>(sums, meeting, 0, true, from, reach);",
        "{\n        join_two<R, N, true>(sums, meeting, 0, false, from, reach);\n"
        "        join_two<R, N, false>(sums, meeting, 1, false, from, reach);\n    }",
    ),
    (
        "later ranks' packs are loaded one by one",
        "combine.cuh",
        LATER_RANKS,
        later_ranks(
            "tile[i] = *reinterpret_cast<const typename Held<T, N>::Type *>(source + at);"
            " if (!*reinterpret_cast<const u8 *>(&tile[i])) __nanosleep(0);"
        ),
    ),
    (
        "later ranks' packs are loaded by element",
        "combine.cuh",
        LATER_RANKS,
        later_ranks(
            "Pack<T, N> pack; for (u32 lane = 0; lane < N; ++lane) pack.lane[lane] = source[at + lane];"
            " tile[i] = hold(pack);"
        ),
    ),
    (
        "later ranks' loads are not in pairs",
        "combine.cuh",
        LATER_RANKS,
        "join_two<R, N, false>(sums, meeting, rank, false, from, reach);\n"
        "        if (rank + 1 < ranks) join_two<R, N, false>(sums, meeting, rank + 1, false, from, reach);",
    ),
    (
        "kernels that move data have a case of no rank",
        "move.cuh",
        "        do {\n            Byte *target",
        "        if (ranks) do {\n            Byte *target",
    ),
    (
        "failures are looked for one by one",
        "signal.cuh",
        "news[peer] = ptx::load_relaxed_system(&own.news[peer]);",
        "if ((news[peer] = ptx::load_relaxed_system(&own.news[peer]))) return fail(news[peer]);",
    ),
    ("a multiprocessor has room for two blocks", "instances.cuh", "(MAX_THREADS, 1)", "(MAX_THREADS, 2)"),
]
