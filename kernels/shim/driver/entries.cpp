#include "entries.hpp"

#include <map>
#include <utility>

#include "../../instances.cuh"

typedef void Collective(Call call);
extern "C" Collective all_gather, broadcast, all_to_all, gather, scatter, copy;
#define DECLARE(reduction, Reduction, type)                    \
    extern "C" Collective two_shot_##reduction##_##type;       \
    extern "C" Collective one_shot_##reduction##_##type;       \
    extern "C" Collective push_##reduction##_##type;           \
    extern "C" Collective reduce_scatter_##reduction##_##type;
INSTANCES(DECLARE)
extern "C" void tensors_ready(const void *, const void *, const void *, Order order);
extern "C" void await_done(const void *, Order order);

namespace driver {

namespace {

template <class... P, size_t... I>
void call(void (*function)(P...), void *const *parameters, std::index_sequence<I...>) {
    function(*static_cast<const P *>(parameters[I])...);
}

template <class... P>
HostKernel entry_of(void (*function)(P...)) {
    auto run = [function](void *const *parameters) { call(function, parameters, std::index_sequence_for<P...>()); };
    return {{u32(sizeof(P))...}, run};
}

}  // namespace

const HostKernel *find_kernel(const std::string &name) {
#define ENTRY(name) {#name, entry_of(name)},
#define ENTRIES(reduction, Reduction, type)    \
    ENTRY(two_shot_##reduction##_##type)       \
    ENTRY(one_shot_##reduction##_##type)       \
    ENTRY(push_##reduction##_##type)           \
    ENTRY(reduce_scatter_##reduction##_##type)
    static const auto *all = new std::map<std::string, HostKernel>{
        INSTANCES(ENTRIES)
        ENTRY(all_gather) ENTRY(broadcast) ENTRY(all_to_all) ENTRY(gather) ENTRY(scatter) ENTRY(copy)
        ENTRY(tensors_ready) ENTRY(await_done)
    };
    auto found = all->find(name);
    return found == all->end() ? nullptr : &found->second;
}

}  // namespace driver
