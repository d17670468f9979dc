// A communicator: the state shared by its ranks, and how they synchronise on it.
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

constexpr size_t most_ranks = 8, mailbox_bytes = 1 << 14, name_bytes = 128;

inline long variable(const char* name, long otherwise) {
    const char* value = getenv(name);
    return value ? atol(value) : otherwise;
}

// What the ranks must agree on.
struct Header {
    int64_t kind, count, type, op, root, color, key;
};

struct Mailbox {
    std::atomic<uint32_t> full;
    uint32_t length;
    unsigned char data[mailbox_bytes];
};

// State shared by the ranks of a communicator. All zero at first.
struct Shared {
    std::atomic<uint32_t> arrived, waiting, generation;
    Header header[most_ranks];
    Slot slot[most_ranks];
    Mailbox mail[most_ranks][most_ranks];
};

// Opens the shared memory with this name. The first rank creates it.
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
    int root;  // or the peer of a send or receive
    void* stream;
};

struct Comm : std::enable_shared_from_this<Comm> {
    // Held by the program until it ends the communicator. Streams may hold work of an aborted one for longer.
    std::shared_ptr<Comm> handle;
    std::optional<Gpu> gpu;
    Shared* shared = nullptr;
    char name[name_bytes] = {};
    int rank = 0, ranks = 0, splits = 0;
    std::atomic<int> state{success};
    std::atomic<bool> aborted{false};
    uint64_t put = 0;  // operations put on streams; owned by the worker
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

    // Runs an item in the background. The communicator is in progress until the item settles it, and takes one only.
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

    // Polls until `done`, and yields to the other ranks. Returns false if this communicator was aborted.
    template <class F>
    bool until(F done) {
        for (int looks = 0; !done(); ++looks) {
            if (aborted) return false;
            // The other ranks run on the same cores.
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

    // Publishes what this rank calls, waits until all ranks have called, and compares.
    bool agree(const Header& own) {
        shared->header[rank] = own;
        if (!barrier()) return false;
        bool same = true;
        for (int r = 0; r < ranks; ++r) same &= memcmp(&shared->header[r], &own, offsetof(Header, color)) == 0;
        if (!barrier()) return false;
        if (!same) state = invalid_usage;
        return same;
    }

    // Reduces or moves data, in chunks, from the ranks that have an input to those that have an output.
    bool chunks(const Call& call, const unsigned char* input, unsigned char* output, size_t bytes) {
        for (size_t done = 0; done < bytes; done += slot_bytes) {
            size_t chunk = std::min(slot_bytes, bytes - done);
            if (input) memcpy(shared->slot[rank], input + done, chunk);
            if (!barrier()) return false;
            if (output && call.kind == broadcast) memcpy(output + done, shared->slot[call.root], chunk);
            if (output && call.kind != broadcast) fold(shared->slot, ranks, output + done, chunk, call.type, call.op);
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
            case all_reduce: return chunks(call, call.input, call.output, bytes);
            case reduce: return chunks(call, call.input, root ? call.output : nullptr, bytes);
            case broadcast: return chunks(call, root ? call.input : nullptr, call.output, bytes);
            case reduce_scatter:
                for (int r = 0; r < ranks; ++r) {
                    // This rank's part is read before anything is written in its place.
                    if (!chunks(call, call.input + r * bytes, r == rank ? call.output : nullptr, bytes)) return false;
                }
                return true;
            default:
                for (int r = 0; r < ranks; ++r) {
                    Call part = call;
                    part.kind = broadcast, part.root = r;
                    if (!chunks(part, r == rank ? call.input : nullptr, call.output + r * bytes, bytes)) return false;
                }
                return true;
        }
    }

    // Moves all messages concurrently, a chunk of each in turn. Messages between the same two ranks stay in order.
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
                size_t chunk = std::min(mailbox_bytes, call.count * sizes[call.type] - done[i]);
                Mailbox& mail = call.kind == send ? shared->mail[rank][call.root] : shared->mail[call.root][rank];
                if ((mail.full.load() == 1) == (call.kind == send)) continue;
                if (call.kind == send) {
                    memcpy(mail.data, call.input + done[i], chunk);
                    mail.length = uint32_t(chunk);
                } else {
                    if (mail.length != chunk) state = invalid_usage;
                    memcpy(call.output + done[i], mail.data, std::min(chunk, size_t(mail.length)));
                }
                mail.full = call.kind == send ? 1 : 0;
                done[i] += chunk;
                if (done[i] == call.count * sizes[call.type]) ended[i] = true, --open;
            }
            return open == 0;
        });
    }

    void operations(const std::vector<Call>& calls) {
        // The operation is on its stream only some time later.
        for (int i = 0; i < 100; ++i) sched_yield();
        if (!gpu) {
            settle(success);
            perform(calls);
            static_cast<Counters*>(calls[0].stream)->done.fetch_add(1);
            return;
        }
        auto item = [own = shared_from_this(), calls, before = put] {
            // Operations of one communicator on several streams also run in call order.
            own->until([&] { return own->ended == before; });
            own->perform(calls);
            ++own->ended;
        };
        ++put;
        if (gpu->put(calls[0].stream, item)) return settle(success);
        --put;
        settle(cuda_error);
    }

    // Executes an operation on its stream. The stream continues after an abort.
    void perform(const std::vector<Call>& calls) {
        if (aborted) return;
        if (variable("FAKE_NCCL_BROKEN", -1) == rank) {
            state = remote_error;
            until([] { return false; });
        }
        if (variable("FAKE_NCCL_HANGS", -1) == rank) until([] { return false; });
        std::vector<Call> mail;
        bool sound = true;
        for (const Call& call : calls) {
            if (call.kind == send || call.kind == receive) mail.push_back(call);
            else if (sound) sound = collective(call);
        }
        if (sound && !mail.empty()) sound = messages(mail);
        if (state == invalid_usage) until([] { return false; });
    }

    // Waits until the streams are past all its operations. The shared state serves one thing at a time.
    bool wait_idle() {
        return until([&] { return ended == put; });
    }

    // Joins the other ranks. The last one removes the name.
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
        wait_idle();
    }

    ~Comm() {
        if (shared && shared->arrived.load() < uint32_t(ranks)) shm_unlink(name);
        if (shared) munmap(shared, sizeof(Shared));
    }
};

inline Comm* create(const char* name, int rank, int ranks, const std::optional<Gpu>& gpu) {
    auto owner = std::make_shared<Comm>();
    Comm* comm = owner.get();
    comm->handle = std::move(owner);
    strncpy(comm->name, name, name_bytes - 1);
    comm->rank = rank, comm->ranks = ranks, comm->gpu = gpu;
    comm->worker = std::thread([comm] { comm->run(); });
    comm->start([comm] {
        if (comm->arrive()) comm->settle(success);
    });
    return comm;
}

}  // namespace nccl
