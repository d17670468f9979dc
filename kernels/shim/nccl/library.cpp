// A library with NCCL's interface for machines without a GPU. It has the functions that Bonfire calls, on host memory,
// between threads and processes of one host, which share a file. In a process with the software CUDA driver its
// operations run on that driver's streams (stream.hpp).
//
// It is strict where NCCL is undefined or slow to fail, so that a wrong order of calls makes a test fail:
// * A communicator never blocks. A call while an earlier one is in progress is refused, and an operation is on its
//   stream only some time after the call has returned.
// * Ranks that call different things get an error. With NCCL they would hang or get wrong numbers.
// * A stream must belong to the context that was current when the communicator was made. There must have been one.
//
// On the software driver an operation is a host function that blocks its stream until the other ranks have called it
// and all data is moved, or until the communicator is aborted. So ranks on one GPU whose streams share a hardware queue
// wait for each other until the deadline. What this library cannot show: kernels that share a GPU's multiprocessors,
// and how long NCCL itself takes to abort.
//
// FAKE_NCCL_VERSION is the version that it reports. FAKE_NCCL_ABSENT=r keeps rank r from joining the others.
// FAKE_NCCL_BROKEN=r breaks rank r's connections at its first operation. FAKE_NCCL_HANGS=r keeps those of rank r from
// ending. With FAKE_NCCL_WAITS=1 an abort waits for all
// work on its GPU, as CUDA does when NCCL frees memory there. Built with FAKE_NCCL_PARTIAL it has no
// ncclCommSplit.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "communicator.hpp"

using namespace nccl;

namespace {

thread_local int depth = 0;
thread_local std::vector<std::pair<Comm*, Call>> grouped;

Result submit(Comm* comm, std::vector<Call> calls) {
    // NCCL lets several streams wait for a group. No user of this library does that.
    void* stream = calls[0].stream;
    for (const Call& call : calls) {
        if (call.stream != stream) return invalid_usage;
    }
    Result result = comm->start([comm, calls = std::move(calls)] { comm->operations(calls); });
    if (result == in_progress && !comm->gpu) static_cast<Counters*>(stream)->put.fetch_add(1);
    return result;
}

Result enqueue(Comm* comm, Call call) {
    bool pair = call.kind == send || call.kind == receive;
    bool root = call.kind == reduce || call.kind == broadcast || pair;
    if (!comm || unsigned(call.type) >= types || unsigned(call.op) >= ops) return invalid_argument;
    if (root && (call.root < 0 || call.root >= comm->ranks)) return invalid_argument;
    if (call.count == 0) return success;
    if (depth > 0) {
        grouped.emplace_back(comm, call);
        return success;
    }
    return submit(comm, {call});
}

struct Id {
    char internal[name_bytes];
};

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) {
    *version = int(variable("FAKE_NCCL_VERSION", 23007));
    return success;
}

const char* ncclGetErrorString(Result result) {
    switch (result) {
        case success: return "no error";
        case cuda_error: return "unhandled cuda error";
        case system_error: return "unhandled system error";
        case invalid_argument: return "invalid argument";
        case invalid_usage: return "invalid usage";
        case remote_error: return "remote process exited or there was a network error";
        case in_progress: return "operation in progress";
        default: return "unknown result code";
    }
}

const char* ncclGetLastError(Comm*) { return ""; }

Result ncclGetUniqueId(Id* id) {
    static std::atomic<int> count{0};
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/bonfire-nccl-%d-%d", int(getpid()), count.fetch_add(1));
    return success;
}

Result ncclCommInitRankConfig(Comm** comm, int ranks, Id id, int rank, const int* config) {
    // The fifth word of a configuration is whether to block.
    if (ranks < 1 || ranks > int(most_ranks) || rank < 0 || rank >= ranks || config[4] != 0) return invalid_argument;
    std::optional<Gpu> gpu = Gpu::current();
    if (gpu && !gpu->context) return cuda_error;
    *comm = create(id.internal, rank, ranks, gpu);
    return in_progress;
}

#ifndef FAKE_NCCL_PARTIAL
Result ncclCommSplit(Comm* comm, int color, int key, Comm** part, const int*) {
    return comm->start([=] {
        if (!comm->wait_idle()) return;
        Header own{split, comm->splits++, 0, 0, 0, color, key};
        comm->shared->header[comm->rank] = own;
        if (!comm->barrier()) return;
        int rank = 0, ranks = 0;
        for (int r = 0; r < comm->ranks; ++r) {
            const Header& other = comm->shared->header[r];
            if (other.color != color) continue;
            ++ranks;
            rank += other.key < key || (other.key == key && r < comm->rank);
        }
        if (!comm->barrier()) return;
        char name[name_bytes];
        snprintf(name, sizeof name, "%.90s-%d-%d", comm->name, comm->splits, color);
        *part = color < 0 ? nullptr : create(name, rank, ranks, comm->gpu);
        comm->settle(success);
    });
}
#endif

Result ncclCommGetAsyncError(Comm* comm, int* state) {
    *state = comm->state;
    return success;
}

Result ncclCommCount(Comm* comm, int* count) {
    *count = comm->ranks;
    return success;
}

Result ncclCommUserRank(Comm* comm, int* rank) {
    *rank = comm->rank;
    return success;
}

Result ncclCommFinalize(Comm* comm) {
    return comm->start([comm] {
        if (comm->wait_idle() && comm->agree({finish, 0, 0, 0, 0, 0, 0})) comm->settle(success);
    });
}

Result ncclCommDestroy(Comm* comm) {
    comm->end();
    std::shared_ptr<Comm> last = std::move(comm->handle);
    return success;
}

Result ncclCommAbort(Comm* comm) {
    comm->aborted = true;
    std::optional<Gpu> gpu = comm->gpu;
    if (gpu && variable("FAKE_NCCL_WAITS", 0)) gpu->wait();
    return ncclCommDestroy(comm);
}

Result ncclGroupStart() {
    ++depth;
    return success;
}

Result ncclGroupEnd() {
    if (--depth > 0) return success;
    std::vector<std::pair<Comm*, Call>> all;
    all.swap(grouped);
    Result result = success;
    while (!all.empty()) {
        Comm* comm = all[0].first;
        std::vector<Call> calls;
        for (auto& [other, call] : all) {
            if (other == comm) calls.push_back(call);
        }
        all.erase(std::remove_if(all.begin(), all.end(), [=](auto& one) { return one.first == comm; }), all.end());
        result = submit(comm, std::move(calls));
        if (result != in_progress) return result;
    }
    return result;
}

Result ncclAllReduce(const void* input, void* output, size_t count, Type type, Op op, Comm* comm, void* stream) {
    return enqueue(comm, {all_reduce, (const unsigned char*)input, (unsigned char*)output, count, type, op, 0, stream});
}

Result ncclReduce(const void* input, void* output, size_t count, Type type, Op op, int root, Comm* comm, void* stream) {
    return enqueue(comm, {reduce, (const unsigned char*)input, (unsigned char*)output, count, type, op, root, stream});
}

Result ncclReduceScatter(const void* input, void* output, size_t count, Type type, Op op, Comm* comm, void* stream) {
    return enqueue(comm,
                   {reduce_scatter, (const unsigned char*)input, (unsigned char*)output, count, type, op, 0, stream});
}

Result ncclBroadcast(const void* input, void* output, size_t count, Type type, int root, Comm* comm, void* stream) {
    return enqueue(comm,
                   {broadcast, (const unsigned char*)input, (unsigned char*)output, count, type, sum, root, stream});
}

Result ncclAllGather(const void* input, void* output, size_t count, Type type, Comm* comm, void* stream) {
    return enqueue(comm,
                   {all_gather, (const unsigned char*)input, (unsigned char*)output, count, type, sum, 0, stream});
}

Result ncclSend(const void* input, size_t count, Type type, int to, Comm* comm, void* stream) {
    return enqueue(comm, {send, (const unsigned char*)input, nullptr, count, type, sum, to, stream});
}

Result ncclRecv(void* output, size_t count, Type type, int from, Comm* comm, void* stream) {
    return enqueue(comm, {receive, nullptr, (unsigned char*)output, count, type, sum, from, stream});
}

}  // extern "C"
