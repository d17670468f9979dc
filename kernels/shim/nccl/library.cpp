// A library with NCCL's interface for machines without a GPU: what Bonfire calls of it, on host memory, between threads
// and processes of one host, in a file that they share.
//
// It is strict where NCCL is undefined or slow to fail, so that a wrong order of calls makes a test fail:
// * a communicator never blocks. A call while an earlier one is in progress is refused, and an operation is on its stream only
//   some time after the call has returned;
// * ranks that call different things get an error. With NCCL they would hang, or get wrong numbers.
// A stream is the address of two numbers of 64 bits: how much work was put on it, and how much of that is done.
//
// FAKE_NCCL_VERSION says which version it gives itself out as, FAKE_NCCL_ABSENT=r keeps rank r from coming to the
// others, FAKE_NCCL_BROKEN=r breaks rank r's connections at its first operation. Built with FAKE_NCCL_PARTIAL it has no
// ncclCommSplit.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result { success = 0, system_error = 2, invalid_argument = 4, invalid_usage = 5, remote_error = 6, in_progress = 7 };
enum Type { i8, u8, i32, u32, i64, u64, f16, f32, f64, bf16, e4m3, e5m2, types };
enum Op { sum, product, maximum, minimum, average, ops };
enum Kind { all_reduce, reduce, broadcast, all_gather, reduce_scatter, send, receive, split, finish };

constexpr size_t most_ranks = 8, slot_bytes = 1 << 16, mail_bytes = 1 << 14, name_bytes = 128;
const size_t sizes[types] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

long variable(const char* name, long otherwise) {
    const char* value = getenv(name);
    return value ? atol(value) : otherwise;
}

// What ranks must agree on.
struct Header {
    int64_t kind, count, type, op, root, color, key;
};

struct Mail {
    std::atomic<uint32_t> full;
    uint32_t length;
    unsigned char data[mail_bytes];
};

// What the ranks of a communicator share. All zero at first.
struct Shared {
    std::atomic<uint32_t> arrived, waiting, generation;
    Header header[most_ranks];
    unsigned char slot[most_ranks][slot_bytes];
    Mail mail[most_ranks][most_ranks];
};

// Opens what a name stands for; the first one makes it.
Shared* open_shared(const char* name) {
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0) return nullptr;
    void* memory = MAP_FAILED;
    if (ftruncate(file, sizeof(Shared)) == 0) {
        memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    return memory == MAP_FAILED ? nullptr : static_cast<Shared*>(memory);
}

double from_bits(unsigned bits, int exponent_bits, int fraction_bits, bool infinities) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    unsigned exponent = bits >> fraction_bits & ((1u << exponent_bits) - 1), fraction = bits & ((1u << fraction_bits) - 1);
    bool last = exponent == (1u << exponent_bits) - 1;
    double value;
    if (last && infinities) {
        value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (last && fraction == (1u << fraction_bits) - 1) {
        value = std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
        value = std::ldexp(fraction, 1 - bias - fraction_bits);
    } else {
        value = std::ldexp(fraction | 1u << fraction_bits, int(exponent) - bias - fraction_bits);
    }
    return bits >> (exponent_bits + fraction_bits) & 1 ? -value : value;
}

// The nearest number that the bits can say, the even one of two that are as near.
unsigned to_bits(double value, int exponent_bits, int fraction_bits, bool infinities) {
    unsigned sign = std::signbit(value) ? 1u << (exponent_bits + fraction_bits) : 0, low = 0;
    unsigned high = (1u << (exponent_bits + fraction_bits)) - 1;
    auto number = [&](unsigned bits) { return from_bits(bits, exponent_bits, fraction_bits, infinities); };
    if (std::isnan(value)) return sign | high;
    double size = std::fabs(value);
    while (std::isnan(number(high))) --high;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        (number(middle) <= size ? low : high) = middle;
    }
    double below = size - number(low), above = number(high) - size;
    bool up = above < below || (above == below && low % 2 == 1);
    return sign | (up ? high : low);
}

// Floats of 16 and 8 bits, as numbers that are calculated with.
template <int Exponent, int Fraction, bool Infinities, class Bits>
struct Small {
    Bits bits;
    Small() = default;
    Small(double value) : bits(Bits(to_bits(value, Exponent, Fraction, Infinities))) {}
    operator double() const { return from_bits(bits, Exponent, Fraction, Infinities); }
};

template <class T>
T combine(T a, T b, Op op) {
    switch (op) {
        case product: return T(a * b);
        case maximum: return a > b ? a : b;
        case minimum: return a < b ? a : b;
        default: return T(a + b);
    }
}

// Combines what the ranks have in their slots, in the order of ranks. Means are multiplied by 1/n first, as NCCL does.
template <class T>
void fold(const Shared& shared, size_t ranks, void* output, size_t bytes, Op op) {
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
        T whole{};
        for (size_t r = 0; r < ranks; ++r) {
            T one;
            memcpy(&one, shared.slot[r] + i * sizeof(T), sizeof(T));
            if (op == average) one = T(one * T(1.0 / double(ranks)));
            whole = r == 0 ? one : combine<T>(whole, one, op);
        }
        memcpy(static_cast<unsigned char*>(output) + i * sizeof(T), &whole, sizeof(T));
    }
}

void fold(const Shared& shared, size_t ranks, void* output, size_t bytes, Type type, Op op) {
    switch (type) {
        // Without a sign, because sums and products wrap.
        case i8: return op == maximum || op == minimum ? fold<int8_t>(shared, ranks, output, bytes, op)
                                                       : fold<uint8_t>(shared, ranks, output, bytes, op);
        case i32: return op == maximum || op == minimum ? fold<int32_t>(shared, ranks, output, bytes, op)
                                                        : fold<uint32_t>(shared, ranks, output, bytes, op);
        case i64: return op == maximum || op == minimum ? fold<int64_t>(shared, ranks, output, bytes, op)
                                                        : fold<uint64_t>(shared, ranks, output, bytes, op);
        case u8: return fold<uint8_t>(shared, ranks, output, bytes, op);
        case u32: return fold<uint32_t>(shared, ranks, output, bytes, op);
        case u64: return fold<uint64_t>(shared, ranks, output, bytes, op);
        case f16: return fold<Small<5, 10, true, uint16_t>>(shared, ranks, output, bytes, op);
        case bf16: return fold<Small<8, 7, true, uint16_t>>(shared, ranks, output, bytes, op);
        case e4m3: return fold<Small<4, 3, false, uint8_t>>(shared, ranks, output, bytes, op);
        case e5m2: return fold<Small<5, 2, true, uint8_t>>(shared, ranks, output, bytes, op);
        case f32: return fold<float>(shared, ranks, output, bytes, op);
        default: return fold<double>(shared, ranks, output, bytes, op);
    }
}

struct Call {
    Kind kind;
    const unsigned char* input;
    unsigned char* output;
    size_t count;
    Type type;
    Op op;
    int root;  // or the other rank of a send or receive
    std::atomic<uint64_t>* stream;  // two of them
};

struct Comm {
    Shared* shared = nullptr;
    char name[name_bytes] = {};
    int rank = 0, ranks = 0, splits = 0;
    std::atomic<int> state{in_progress};
    std::atomic<bool> aborted{false};
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool over = false;
    std::thread worker;

    void run() {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return over || !work.empty(); });
            if (work.empty()) return;
            std::function<void()> next = std::move(work.front());
            work.pop_front();
            lock.unlock();
            next();
        }
    }

    // In the background, with the communicator in progress until the work says otherwise.
    Result start(std::function<void()> next) {
        state = in_progress;
        std::lock_guard<std::mutex> lock(mutex);
        work.push_back(std::move(next));
        changed.notify_one();
        return in_progress;
    }

    void settle(int result) {
        int expected = in_progress;
        state.compare_exchange_strong(expected, result);
    }

    // Lets the other ranks go on, unless this one was aborted.
    template <class F>
    bool until(F done) {
        while (!done()) {
            if (aborted) return false;
            sched_yield();
        }
        return true;
    }

    bool barrier() {
        if (aborted) return false;
        uint32_t generation = shared->generation.load();
        if (shared->waiting.fetch_add(1) + 1 == uint32_t(ranks)) {
            shared->waiting = 0;
            shared->generation.fetch_add(1);
            return true;
        }
        return until([&] { return shared->generation.load() != generation; });
    }

    // Tells the others what this rank does, and waits until all have come to it.
    bool agree(const Header& own) {
        shared->header[rank] = own;
        if (!barrier()) return false;
        bool same = true;
        for (int r = 0; r < ranks; ++r) same &= memcmp(&shared->header[r], &own, offsetof(Header, color)) == 0;
        if (!barrier()) return false;
        if (!same) state = invalid_usage;
        return same;
    }

    // Reduces or moves from the inputs of those who bring something to the outputs of those who get something.
    bool pieces(const Call& call, const unsigned char* input, unsigned char* output, size_t bytes) {
        for (size_t done = 0; done < bytes; done += slot_bytes) {
            size_t piece = std::min(slot_bytes, bytes - done);
            if (input) memcpy(shared->slot[rank], input + done, piece);
            if (!barrier()) return false;
            if (output && call.kind == broadcast) memcpy(output + done, shared->slot[call.root], piece);
            if (output && call.kind != broadcast) fold(*shared, ranks, output + done, piece, call.type, call.op);
            if (!barrier()) return false;
        }
        return true;
    }

    bool collective(const Call& call) {
        Header header{call.kind, int64_t(call.count), call.type, call.op, call.root, 0, 0};
        if (!agree(header)) return false;
        size_t bytes = call.count * sizes[call.type];
        bool root = call.root == rank;
        switch (call.kind) {
            case all_reduce: return pieces(call, call.input, call.output, bytes);
            case reduce: return pieces(call, call.input, root ? call.output : nullptr, bytes);
            case broadcast: return pieces(call, root ? call.input : nullptr, call.output, bytes);
            case reduce_scatter:
                for (int r = 0; r < ranks; ++r) {
                    // The own part is read before anything is written in its place.
                    if (!pieces(call, call.input + r * bytes, r == rank ? call.output : nullptr, bytes)) return false;
                }
                return true;
            default:
                for (int r = 0; r < ranks; ++r) {
                    Call part = call;
                    part.kind = broadcast, part.root = r;
                    if (!pieces(part, r == rank ? call.input : nullptr, call.output + r * bytes, bytes)) return false;
                }
                return true;
        }
    }

    // All messages at once, a piece of each in turn; those between the same two ranks in their order.
    bool messages(const std::vector<Call>& calls) {
        std::vector<size_t> done(calls.size(), 0);
        std::vector<bool> ended(calls.size(), false);
        size_t open = calls.size();
        return until([&] {
            bool sending[most_ranks] = {}, receiving[most_ranks] = {};
            for (size_t i = 0; i < calls.size(); ++i) {
                const Call& call = calls[i];
                bool& busy = (call.kind == send ? sending : receiving)[call.root];
                if (ended[i] || busy) continue;
                busy = true;
                size_t piece = std::min(mail_bytes, call.count * sizes[call.type] - done[i]);
                Mail& mail = call.kind == send ? shared->mail[rank][call.root] : shared->mail[call.root][rank];
                if ((mail.full.load() == 1) == (call.kind == send)) continue;
                if (call.kind == send) {
                    memcpy(mail.data, call.input + done[i], piece);
                    mail.length = uint32_t(piece);
                } else {
                    if (mail.length != piece) state = invalid_usage;
                    memcpy(call.output + done[i], mail.data, std::min(piece, size_t(mail.length)));
                }
                mail.full = call.kind == send ? 1 : 0;
                done[i] += piece;
                if (done[i] == call.count * sizes[call.type]) ended[i] = true, --open;
            }
            return open == 0;
        });
    }

    void operations(const std::vector<Call>& calls) {
        // For others it takes time until an operation is on its stream.
        for (int i = 0; i < 100; ++i) sched_yield();
        settle(success);
        if (variable("FAKE_NCCL_BROKEN", -1) == rank) {
            state = remote_error;
            until([] { return false; });
        }
        std::vector<Call> mail;
        bool sound = true;
        for (const Call& call : calls) {
            if (call.kind == send || call.kind == receive) mail.push_back(call);
            else if (sound) sound = collective(call);
        }
        if (sound && !mail.empty()) sound = messages(mail);
        if (state == invalid_usage) until([] { return false; });
        // A stream goes on after its kernel was aborted.
        calls[0].stream[1].fetch_add(1);
    }

    // Joins the others. Whoever comes last takes the name away.
    bool arrive() {
        if (variable("FAKE_NCCL_ABSENT", -1) == rank) return until([] { return false; });
        shared = open_shared(name);
        if (!shared) {
            state = system_error;
            return false;
        }
        if (shared->arrived.fetch_add(1) + 1 == uint32_t(ranks)) shm_unlink(name);
        return until([&] { return shared->arrived.load() >= uint32_t(ranks); });
    }

    void end() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            over = true;
            changed.notify_one();
        }
        worker.join();
        if (shared && shared->arrived.load() < uint32_t(ranks)) shm_unlink(name);
        if (shared) munmap(shared, sizeof(Shared));
    }
};

Comm* made(const char* name, int rank, int ranks) {
    Comm* comm = new Comm;
    strncpy(comm->name, name, name_bytes - 1);
    comm->rank = rank, comm->ranks = ranks;
    comm->worker = std::thread([comm] { comm->run(); });
    comm->start([comm] {
        if (comm->arrive()) comm->settle(success);
    });
    return comm;
}

thread_local int depth = 0;
thread_local std::vector<std::pair<Comm*, Call>> grouped;

Result submit(Comm* comm, std::vector<Call> calls) {
    if (comm->state != success) return invalid_argument;
    calls[0].stream[0].fetch_add(1);
    return comm->start([comm, calls = std::move(calls)] { comm->operations(calls); });
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
    *comm = made(id.internal, rank, ranks);
    return in_progress;
}

#ifndef FAKE_NCCL_PARTIAL
Result ncclCommSplit(Comm* comm, int color, int key, Comm** part, const int*) {
    if (comm->state != success) return invalid_argument;
    return comm->start([=] {
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
        *part = color < 0 ? nullptr : made(name, rank, ranks);
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
    if (comm->state != success) return invalid_argument;
    return comm->start([comm] {
        if (comm->agree({finish, 0, 0, 0, 0, 0, 0})) comm->settle(success);
    });
}

Result ncclCommDestroy(Comm* comm) {
    comm->end();
    delete comm;
    return success;
}

Result ncclCommAbort(Comm* comm) {
    comm->aborted = true;
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

using Stream = std::atomic<uint64_t>*;

Result ncclAllReduce(const void* input, void* output, size_t count, Type type, Op op, Comm* comm, Stream stream) {
    return enqueue(comm, {all_reduce, (const unsigned char*)input, (unsigned char*)output, count, type, op, 0, stream});
}

Result ncclReduce(const void* input, void* output, size_t count, Type type, Op op, int root, Comm* comm, Stream stream) {
    return enqueue(comm, {reduce, (const unsigned char*)input, (unsigned char*)output, count, type, op, root, stream});
}

Result ncclReduceScatter(const void* input, void* output, size_t count, Type type, Op op, Comm* comm, Stream stream) {
    return enqueue(comm, {reduce_scatter, (const unsigned char*)input, (unsigned char*)output, count, type, op, 0, stream});
}

Result ncclBroadcast(const void* input, void* output, size_t count, Type type, int root, Comm* comm, Stream stream) {
    return enqueue(comm, {broadcast, (const unsigned char*)input, (unsigned char*)output, count, type, sum, root, stream});
}

Result ncclAllGather(const void* input, void* output, size_t count, Type type, Comm* comm, Stream stream) {
    return enqueue(comm, {all_gather, (const unsigned char*)input, (unsigned char*)output, count, type, sum, 0, stream});
}

Result ncclSend(const void* input, size_t count, Type type, int to, Comm* comm, Stream stream) {
    return enqueue(comm, {send, (const unsigned char*)input, nullptr, count, type, sum, to, stream});
}

Result ncclRecv(void* output, size_t count, Type type, int from, Comm* comm, Stream stream) {
    return enqueue(comm, {receive, nullptr, (unsigned char*)output, count, type, sum, from, stream});
}

}  // extern "C"
