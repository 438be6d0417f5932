// Kernels one after another without Python in between, which takes longer than the smallest of them; and the kernels that
// only programs have.

#include <algorithm>

#include "dtypes.h"
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

// out [rows, columns] = table[ids].
extern "C" void baton_pick(const float* table, const int64_t* ids, int64_t num_rows, int64_t columns, float* out) {
    for (int64_t row = 0; row < num_rows; ++row) std::memcpy(out + row * columns, table + ids[row] * columns, columns * sizeof(float));
}

// Takes sequences on, each by the first likeliest token of its last row of logits [rows, vocab_size], to the next place of its pages
// in tables [num_sequences, table_stride]: sequence i becomes row i. The last page is never left.
extern "C" void baton_advance(const float* logits, int64_t vocab_size, const int32_t* tables, int64_t table_stride, int64_t block_size,
                              int64_t num_sequences, int64_t* token_ids, int64_t* positions, int64_t* slots, int32_t* context_lens,
                              int32_t* starts) {
    for (int64_t i = 0; i < num_sequences; ++i) {
        const int64_t last = starts[i + 1] - 1, position = positions[last] + 1;
        const float* of_last = logits + last * vocab_size;
        token_ids[i] = std::max_element(of_last, of_last + vocab_size) - of_last;
        positions[i] = position;
        slots[i] = tables[i * table_stride + std::min(position / block_size, table_stride - 1)] * block_size + position % block_size;
        ++context_lens[i];
        starts[i] = int32_t(i);
    }
    starts[num_sequences] = int32_t(num_sequences);
}

RECORDABLE(baton_pick)
RECORDABLE(baton_advance)
