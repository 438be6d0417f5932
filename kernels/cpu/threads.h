// A pool of threads that gives back the machine: they spin for 100 microseconds between two calls, then sleep.
#pragma once

#include <cstdint>

// Calls run(context, unit) for each unit from 0 to count - 1, on as many threads as are set; returns when all have ended.
// Each thread begins with a range of its own, of units that follow one another, and then helps with the others': a thread
// which lost its core holds up no more than the unit that it has.
void for_each_unit(int64_t count, void (*run)(const void* context, int64_t unit), const void* context);

template <class Function>
void parallel(int64_t count, const Function& function) {
    for_each_unit(count, [](const void* context, int64_t unit) { (*static_cast<const Function*>(context))(unit); }, &function);
}

// Tells what comes next: threads that wait bring the start of their share of it into their caches.
void expect(const void* data, int64_t num_bytes);
