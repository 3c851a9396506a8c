// Counters of steps, where blocks of one launch know of each other's work (staged.cuh, forward_staged.cu); in launches that need
// none of these, of who is done with a slice's rows (column_blocks.cuh: a word for each slice, of which config/column_blocks.py
// makes fewer). All are zero before a launch, and after it.
#pragma once

// On a line of its own. The first number counts; 16 bytes are what the copy engine takes.
struct alignas(128) StepCounter {
    unsigned steps[4];
};
constexpr int kStepCounters = 4;  // STEP_COUNTERS of config/common.py
