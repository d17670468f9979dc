#pragma once

#include "../types.cuh"

// Fault tests: absent, stalled, fast and slow ranks, mismatched calls, an aborting host, tags that repeat, and a call
// that never ends.
void faults(u32 ranks);
