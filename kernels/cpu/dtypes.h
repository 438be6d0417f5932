// The C interface: its dtypes, 0 float32, 1 bfloat16, 2 float16; what pages keep; and its kernels as calls that can be recorded.
#pragma once

#include <utility>

#include "floats.h"

// The numbers in pages of KV: those of the compute dtype, codes of eight bits with a scale for each token's head, or codes of
// four bits with a scale for each channel of a block's keys and for each value.
enum Kept : int { PLAIN, INT8, FP8, INT4 };

inline int64_t row_bytes(Kept kept, int64_t head_size, int64_t item_bytes) {
    return kept == PLAIN ? head_size * item_bytes : kept == INT4 ? head_size / 2 : head_size;
}

// Runs a statement with T as the dtype.
#define FOR_DTYPE(dtype, ...)  \
    switch (dtype) {           \
        case 0: {              \
            using T = float;   \
            __VA_ARGS__;       \
            break;             \
        }                      \
        case 1: {              \
            using T = bf16;    \
            __VA_ARGS__;       \
            break;             \
        }                      \
        case 2: {              \
            using T = f16;     \
            __VA_ARGS__;       \
            break;             \
        }                      \
    }

// A kernel that takes its arguments from 64-bit words: integers, addresses, and the bits of a float in a word's low half.
template <auto KERNEL>
struct FromWords;

template <class... Arguments, void (*KERNEL)(Arguments...)>
struct FromWords<KERNEL> {
    template <class T>
    static T read(const int64_t* word) {
        T value;
        std::memcpy(&value, word, sizeof value);
        return value;
    }
    template <size_t... INDEX>
    static void call(const int64_t* words, std::index_sequence<INDEX...>) {
        KERNEL(read<Arguments>(words + INDEX)...);
    }
    static void call(const int64_t* words) { call(words, std::index_sequence_for<Arguments...>()); }
};

#define RECORDABLE(kernel) \
    extern "C" void kernel##_from_words(const int64_t* words) { FromWords<kernel>::call(words); }
