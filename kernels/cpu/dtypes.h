// The C interface: its dtypes, 0 float32, 1 bfloat16, 2 float16; what pages keep; and its kernels as calls that can be recorded.
#pragma once

#include <utility>

#include "floats.h"

// The numbers in pages of KV: those of the compute dtype, codes of eight bits with a scale for each token's head, or codes of
// four bits with a scale for each channel of a block's keys and for each value.
enum Kept : int64_t { PLAIN, INT8, FP8, INT4 };

// One layer of paged KV [num_pages, 2, num_kv_heads, block_size, head_dim], a token's head contiguous; scales of codes [num_pages, 2,
// num_kv_heads, block_size], as many bytes apart. `Layer` in backend.py has the same fields in the same order.
struct Layer {
    Kept kept;
    char *kv, *scales;  // scales: where those of the first block are, null for none
    int64_t page_stride, plane_stride, head_stride;  // in bytes
    int64_t block_size, row_bytes;  // row_bytes: of a token's head without its scale
    char* open;  // of INT4: blocks of the compute dtype, with strides of their own, and their places by page
    const int32_t* page_to_open;
    int64_t open_page_stride, open_plane_stride, open_head_stride;

    char* open_block(int64_t page) const { return open + page_to_open[page] * open_page_stride; }
};

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
