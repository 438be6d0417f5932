// Kernels one after another without Python in between, which takes longer than the smallest of them.

#include "threads.h"

namespace {

// A call as it is recorded, num_words arguments behind it. `expected`: what the next product reads, for threads that wait.
struct Call {
    void (*kernel)(const int64_t* words);
    int64_t num_words;
    const void* expected;
    int64_t expected_bytes;
};

}  // namespace

extern "C" void baton_replay(const int64_t* words, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; ++i) {
        const Call& call = *reinterpret_cast<const Call*>(words);
        words += sizeof(Call) / sizeof(int64_t);
        expect(call.expected, call.expected_bytes);
        call.kernel(words);
        words += call.num_words;
    }
}
