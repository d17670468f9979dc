// A communicator: what its ranks share, and how they come together there.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "numbers.hpp"
#include "stream.hpp"

namespace nccl {

enum Result {
    success = 0, cuda_error = 1, system_error = 2, invalid_argument = 4, invalid_usage = 5, remote_error = 6,
    in_progress = 7
};
enum Kind { all_reduce, reduce, broadcast, all_gather, reduce_scatter, send, receive, split, finish };

constexpr size_t most_ranks = 8, mail_bytes = 1 << 14, name_bytes = 128;

inline long variable(const char* name, long otherwise) {
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
    Slot slot[most_ranks];
    Mail mail[most_ranks][most_ranks];
};

// Opens what a name stands for; the first one makes it.
inline Shared* open_shared(const char* name) {
    int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0) return nullptr;
    void* memory = MAP_FAILED;
    if (ftruncate(file, sizeof(Shared)) == 0) {
        memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    return memory == MAP_FAILED ? nullptr : static_cast<Shared*>(memory);
}

struct Call {
    Kind kind;
    const unsigned char* input;
    unsigned char* output;
    size_t count;
    Type type;
    Op op;
    int root;  // or the other rank of a send or receive
    void* stream;
};

struct Comm : std::enable_shared_from_this<Comm> {
    // The program's, until it ends the communicator. Streams may have work of an aborted one for longer.
    std::shared_ptr<Comm> handle;
    std::optional<Gpu> gpu;
    Shared* shared = nullptr;
    char name[name_bytes] = {};
    int rank = 0, ranks = 0, splits = 0;
    std::atomic<int> state{success};
    std::atomic<bool> aborted{false};
    uint64_t put = 0;  // operations on streams; the worker's
    std::atomic<uint64_t> ended{0};  // of these
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> work;
    bool over = false;
    std::thread worker;

    void run() {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return over || !work.empty(); });
            if (work.empty()) return;
            Item next = std::move(work.front());
            work.pop_front();
            lock.unlock();
            next();
        }
    }

    // In the background, with the communicator in progress until the work says otherwise. It takes one thing at a time.
    Result start(Item next) {
        int found = success;
        if (!state.compare_exchange_strong(found, in_progress)) {
            return found == in_progress ? invalid_argument : Result(found);
        }
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
        for (int looks = 0; !done(); ++looks) {
            if (aborted) return false;
            // What others do until they come, they do on the same cores.
            looks < 1000 ? (void)sched_yield() : (void)usleep(20);
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
            if (output && call.kind != broadcast) fold(shared->slot, ranks, output + done, piece, call.type, call.op);
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
        if (!gpu) {
            settle(success);
            perform(calls);
            static_cast<Numbers*>(calls[0].stream)->done.fetch_add(1);
            return;
        }
        auto item = [own = shared_from_this(), calls, before = put] {
            // Operations of one communicator on several streams are in the order of the calls, too.
            own->until([&] { return own->ended == before; });
            own->perform(calls);
            ++own->ended;
        };
        ++put;
        if (gpu->put(calls[0].stream, item)) return settle(success);
        --put;
        settle(cuda_error);
    }

    // What a stream does. It goes on after an abort.
    void perform(const std::vector<Call>& calls) {
        if (aborted) return;
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
    }

    // Waits until its streams are past all that was put there. What ranks share is for one thing at a time.
    bool rest() {
        return until([&] { return ended == put; });
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
        rest();
    }

    ~Comm() {
        if (shared && shared->arrived.load() < uint32_t(ranks)) shm_unlink(name);
        if (shared) munmap(shared, sizeof(Shared));
    }
};

inline Comm* made(const char* name, int rank, int ranks, const std::optional<Gpu>& gpu) {
    auto made = std::make_shared<Comm>();
    Comm* comm = made.get();
    comm->handle = std::move(made);
    strncpy(comm->name, name, name_bytes - 1);
    comm->rank = rank, comm->ranks = ranks, comm->gpu = gpu;
    comm->worker = std::thread([comm] { comm->run(); });
    comm->start([comm] {
        if (comm->arrive()) comm->settle(success);
    });
    return comm;
}

}  // namespace nccl
