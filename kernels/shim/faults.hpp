#pragma once

#include "../types.cuh"

// What goes wrong: a rank that never comes or stops half-way, ranks that are fast and slow, ranks that
// disagree, a host that gives up, tags that repeat; a call whose end is waited for in vain.
void faults(u32 ranks);
