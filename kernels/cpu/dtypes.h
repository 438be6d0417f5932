// The dtypes of the C interface: 0 float32, 1 bfloat16, 2 float16.
#pragma once

#include "floats.h"

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
