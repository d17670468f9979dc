#pragma once

#include "../types.cuh"

// What goes wrong: a rank that never comes or stops half-way, ranks that disagree, a host that gives up, tags that
// repeat.
void faults(u32 ranks);
