// A pool of threads that gives back the machine: they spin for 100 microseconds between two calls, then sleep.
#pragma once

#include <algorithm>
#include <cstdint>

// Calls run(context, unit) for each unit from 0 to count - 1, on as many threads as are set; returns when all have ended.
// Each thread begins with a range of its own, of units that follow one another, and then helps with the others': a thread
// which lost its core holds up no more than the unit that it has.
void for_each_unit(int64_t count, void (*run)(const void* context, int64_t unit), const void* context);

template <class Function>
void parallel(int64_t count, const Function& function) {
    for_each_unit(count, [](const void* context, int64_t unit) { (*static_cast<const Function*>(context))(unit); }, &function);
}

// Calls function(row) for each row, 16 in a unit.
template <class Function>
void for_each_row(int64_t num_rows, const Function& function) {
    constexpr int64_t ROWS_PER_UNIT = 16;
    parallel((num_rows + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT, [&](int64_t unit) {
        const int64_t end = std::min(num_rows, (unit + 1) * ROWS_PER_UNIT);
        for (int64_t row = unit * ROWS_PER_UNIT; row < end; ++row) function(row);
    });
}

// Tells what comes next: threads that wait bring the start of their share of it into their caches.
void expect(const void* data, int64_t num_bytes);
