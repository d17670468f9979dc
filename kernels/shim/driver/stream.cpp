// Streams, events, and words in memory that streams wait for and write.
#include <unistd.h>

#include <algorithm>

#include "gpu.hpp"

using driver::Gpu;
using driver::CompletionPtr;
using driver::Stream;

namespace {

struct Event {
    Gpu *gpu;
    unsigned flags;
    CompletionPtr recorded;  // null: never; under the GPU's lock
};
driver::Handles<Event> &events() { return driver::global<driver::Handles<Event>>(); }

CompletionPtr recorded(Event &event) {
    std::lock_guard<std::mutex> guard(event.gpu->lock);
    return event.recorded;
}

// The error that ended the work before the event, if any did.
CUresult fault(Event &event) { return CUresult(event.gpu->fault.load()); }

template <class Word>
CUresult wait_value(void *stream, u64 at, Word value, unsigned flags) {
    enum { AT_LEAST, EQUAL, ANY_BIT, NOT_ALL_BITS };
    u32 how = flags & 3;
    if (at % sizeof(Word) || !driver::takes_words(at, sizeof(Word))) return CUDA_ERROR_INVALID_VALUE;
    Stream *found = driver::find_stream(stream);
    if (!found) return driver::no_stream(stream);
    return driver::submit(stream, [=, gpu = found->gpu] {
        auto reached = [=] {
            Word now = std::atomic_ref<Word>(*reinterpret_cast<Word *>(at)).load();
            switch (how) {
                // Cyclic, as in the driver.
                case AT_LEAST: return std::make_signed_t<Word>(now - value) >= 0;
                case EQUAL: return now == value;
                case ANY_BIT: return (now & value) != 0;
                default: return Word(~(now | value)) != 0;
            }
        };
        while (!reached() && gpu->fault == CUDA_SUCCESS) usleep(20);
    });
}

template <class Word>
CUresult write_value(void *stream, u64 at, Word value) {
    if (at % sizeof(Word) || !driver::takes_words(at, sizeof(Word))) return CUDA_ERROR_INVALID_VALUE;
    return driver::submit(stream, [=] { std::atomic_ref<Word>(*reinterpret_cast<Word *>(at)).store(value); });
}

}  // namespace

API cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    return driver::in_context([&](Gpu &own) {
        // As in the driver, others are moved into the range.
        priority = std::clamp(priority, GREATEST_PRIORITY, LEAST_PRIORITY);
        *stream = driver::streams().add(own.make_stream(flags, priority));
        return CUDA_SUCCESS;
    });
}
API cuStreamCreate(void **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, LEAST_PRIORITY); }

// Submitted work still runs.
API cuStreamDestroy_v2(void *stream) {
    return driver::streams().remove(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API cuStreamSynchronize(void *handle) {
    CompletionPtr last;
    CUresult result = driver::on_stream(handle, [&](Stream &stream) {
        last = stream.last;
        return CUDA_SUCCESS;
    });
    if (last) last->wait();
    // A fault may have ended the work.
    return result == CUDA_SUCCESS ? driver::on_stream(handle, [](Stream &) { return CUDA_SUCCESS; }) : result;
}

API cuStreamQuery(void *handle) {
    return driver::on_stream(handle, [](Stream &stream) {
        return stream.last->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

API cuStreamGetCtx(void *handle, void **context) {
    return driver::on_stream(handle, [&](Stream &stream) {
        *context = stream.gpu;
        return CUDA_SUCCESS;
    });
}

API cuStreamGetFlags(void *handle, unsigned *flags) {
    return driver::on_stream(handle, [&](Stream &stream) {
        *flags = stream.flags;
        return CUDA_SUCCESS;
    });
}

API cuStreamGetPriority(void *handle, int *priority) {
    return driver::on_stream(handle, [&](Stream &stream) {
        *priority = stream.priority;
        return CUDA_SUCCESS;
    });
}

API cuStreamIsCapturing(void *, int *status) {
    *status = 0;
    return CUDA_SUCCESS;
}

API cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    {
        std::lock_guard<std::mutex> guard(driver::record().mutex);
        ++driver::record().host_functions;
    }
    return driver::submit(stream, [=] { function(data); });
}

// The number of calls of cuLaunchHostFunc so far.
EXPORTED u64 shimHostFunctions() {
    std::lock_guard<std::mutex> guard(driver::record().mutex);
    return driver::record().host_functions;
}

API cuEventCreate(void **event, unsigned flags) {
    return driver::in_context([&](Gpu &own) {
        *event = events().add({&own, flags, nullptr});
        return CUDA_SUCCESS;
    });
}

API cuEventDestroy_v2(void *event) { return events().remove(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

API cuEventRecord(void *handle, void *on) {
    Event *event = events().find(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    return driver::on_stream(on, [&](Stream &stream) {
        if (stream.gpu != event->gpu) return CUDA_ERROR_INVALID_HANDLE;
        event->recorded = stream.gpu->submit(stream, [] {});
        return CUDA_SUCCESS;
    });
}
API cuEventRecordWithFlags(void *event, void *stream, unsigned) { return cuEventRecord(event, stream); }

API cuStreamWaitEvent(void *stream, void *handle, unsigned) {
    Event *event = events().find(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    CompletionPtr completion = recorded(*event);
    return driver::submit(stream, [completion] {
        if (completion) completion->wait();
    });
}

API cuEventSynchronize(void *handle) {
    Event *event = events().find(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (CompletionPtr completion = recorded(*event)) completion->wait();
    return fault(*event);
}

API cuEventQuery(void *handle) {
    Event *event = events().find(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    CompletionPtr completion = recorded(*event);
    if (fault(*event) != CUDA_SUCCESS) return fault(*event);
    return !completion || completion->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    Event *first = events().find(from), *second = events().find(to);
    if (!first || !second) return CUDA_ERROR_INVALID_HANDLE;
    CompletionPtr began = recorded(*first), ended = recorded(*second);
    if (!began || !ended) return CUDA_ERROR_INVALID_HANDLE;
    if (!began->done || !ended->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = float(double(i64(ended->when - began->when)) / 1e6);
    return CUDA_SUCCESS;
}
API cuEventElapsedTime_v2(float *milliseconds, void *from, void *to) {
    return cuEventElapsedTime(milliseconds, from, to);
}

API cuStreamWaitValue32_v2(void *stream, u64 at, u32 value, unsigned flags) {
    return wait_value(stream, at, value, flags);
}
API cuStreamWaitValue64_v2(void *stream, u64 at, u64 value, unsigned flags) {
    return wait_value(stream, at, value, flags);
}
API cuStreamWriteValue32_v2(void *stream, u64 at, u32 value, unsigned) { return write_value(stream, at, value); }
API cuStreamWriteValue64_v2(void *stream, u64 at, u64 value, unsigned) { return write_value(stream, at, value); }
