// Products of rows with packed columns: the one inner loop of the linear layers and of attention.
//
// Columns lie in panels of 32: panel[step][column][depth of a step], so that a panel is read from its start to its end.
// A step is one multiplication on each of the 32 columns; its depth is 2 where bf16 is multiplied in pairs, else 1.
// Every output is summed over the whole depth in one order, whatever rows stand beside it: a row alone, in a batch and in
// a chunk of a prompt gets the same bits.
#pragma once

#include <algorithm>
#include <new>
#include <type_traits>

#include "floats.h"

constexpr int PANEL = 2 * LANES;

// Memory of whole cache lines: a vector that is stored over two of them is slow to be read again.
template <class V>
struct Aligned {
    using value_type = V;
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    V* allocate(size_t count) { return (V*)::operator new(count * sizeof(V), std::align_val_t(64)); }
    void deallocate(V* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const Aligned&) const { return true; }
};

// The way of one dtype of weights. Rows: what a row must consist of, ROW_STEPS of them in a step. Sums of two vectors cover a panel.
template <class T>
struct Product {  // float32, and float16, which is widened on its way
    using Row = float;
    static constexpr int DEPTH = 1, ROW_STEPS = 1;
    struct Weights {
        Floats of[2];
    };
    static Weights weights(const T* step) {
        return {load(step), load(step + LANES)};
    }
    static void keep(const Weights& weights, float* step) {
        store(step, weights.of[0]);
        store(step + LANES, weights.of[1]);
    }
    static Floats weight(const T* step, int half, int) { return load(step + half * LANES); }
    static Floats row(const float* p, int64_t) { return splat(*p); }
    static Floats add(Floats sum, Floats row, const Weights& weights, int half) { return fma(row, weights.of[half], sum); }
};

template <>
struct Product<bf16> {
    static constexpr int DEPTH = 2;
#if defined(__AVX512BF16__)
    using Row = bf16;
    static constexpr int ROW_STEPS = 1;
    struct Weights {
        __m512bh of[2];
    };
    static Weights weights(const bf16* step) {
        return {(__m512bh)_mm512_loadu_si512(step), (__m512bh)_mm512_loadu_si512(step + 2 * LANES)};
    }
    static void keep(const Weights& weights, bf16* step) {
        _mm512_storeu_si512(step, (__m512i)weights.of[0]);
        _mm512_storeu_si512(step + 2 * LANES, (__m512i)weights.of[1]);
    }
    static Floats first(const Weights& weights, int half) { return as_floats(shifted(Ints{(__m512i)weights.of[half]}, 16)); }
    static Floats second(const Weights& weights, int half) { return as_floats(Ints{(__m512i)weights.of[half]} & int(0xffff0000)); }
    static __m512bh row(const bf16* p, int64_t = 0) {
        int pair;
        std::memcpy(&pair, p, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static Floats add(Floats sum, __m512bh row, const Weights& weights, int half) {
        return {_mm512_dpbf16_ps(sum.v, row, weights.of[half])};
    }
#elif defined(BATON_BLOCKS)  // multiplied by tiles.h alone
    using Row = bf16;
    static constexpr int ROW_STEPS = 1;
    struct Weights {  // numbers that bf16 can hold
        Floats of_first[2], of_second[2];
    };
    static Floats first(const Weights& weights, int half) { return weights.of_first[half]; }
    static Floats second(const Weights& weights, int half) { return weights.of_second[half]; }
    static void keep(const Weights& weights, bf16* step) {
        for (int half = 0; half < 2; ++half) {
            const Ints pairs = shifted(as_ints(first(weights, half)), -16) | as_ints(second(weights, half));
            _mm256_storeu_si256((__m256i*)(step + half * PANEL), pairs.lo);
            _mm256_storeu_si256((__m256i*)(step + half * PANEL + LANES), pairs.hi);
        }
    }
#else
    using Row = float;  // widened before: a number from memory is in all lanes by one instruction
    static constexpr int ROW_STEPS = 2;
    struct Weights {
        Floats first[2], second[2];
    };
    struct Pair {
        Floats first, second;
    };
    static Weights weights(const bf16* step) {
        Weights out;
        for (int half = 0; half < 2; ++half) split(step + half * 2 * LANES, out.first[half], out.second[half]);
        return out;
    }
#if defined(__AVX2__)
    static Floats weight(const bf16* step, int half, int place) {  // of one of both places of a pair
        const Ints pairs = load_ints(step + half * 2 * LANES);
        return as_floats(place ? pairs & int(0xffff0000) : shifted(pairs, 16));
    }
#endif
    static Pair row(const float* p, int64_t row_step) { return {splat(p[0]), splat(p[row_step])}; }
    static Floats add(Floats sum, const Pair& row, const Weights& weights, int half) {
        return fma(row.second, weights.second[half], fma(row.first, weights.first[half], sum));
    }
    static void split(const bf16* pairs, Floats& first, Floats& second) {
#if defined(__AVX2__)
        const __m256i lo = _mm256_loadu_si256((const __m256i*)pairs), hi = _mm256_loadu_si256((const __m256i*)(pairs + LANES));
        const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
        first = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
        second = {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))};
#else
        first = each([&](int i) { return to_float(pairs[2 * i]); });
        second = each([&](int i) { return to_float(pairs[2 * i + 1]); });
#endif
    }
#endif
};

// The dtype in which scores, values and packed weights are multiplied: bf16 where the machine does, or gives the bits of one that does, else float32.
#if defined(__AVX512BF16__) || defined(BATON_BLOCKS)
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <class T>
using Factor = float;
#endif

// Rows that are multiplied at once. ROWS_BY_HALF and more pass half a panel at a time; ROWS_BY_CHUNK and more pass plain weights chunk by chunk, but
// with AVX-512, where that is slower, and 0 stands for none.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12, ROWS_BY_CHUNK = 0;  // 24 sums, 2 weights and a row, of 32 registers
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6, ROWS_IN_ORDER = 3, ROWS_BY_HALF = 4, ROWS_BY_CHUNK = 3;  // 12 sums, 2 weights and a row, of 16 registers
#else
constexpr int MAX_ROWS = 3, ROWS_BY_CHUNK = 0;
#endif

// Writes two vectors side by side: of bf16 as one.
template <class T>
inline void store_panel(T* to, Floats first, Floats second) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) return _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
#endif
    store(to, first);
    store(to + LANES, second);
}

inline void convert(const bf16* from, bf16* to, int64_t count) { std::memcpy(to, from, count * sizeof(bf16)); }
template <class T, class F>
inline void convert(const T* from, F* to, int64_t count) {
    int64_t i = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<F, bf16>)  // whole vectors: two halves could not be read again at once
        for (; i + PANEL <= count; i += PANEL) store_panel(to + i, load(from + i), load(from + i + LANES));
#endif
#if defined(BATON_BLOCKS) && !defined(__AVX512F__)
    if constexpr (std::is_same_v<F, bf16> && sizeof(T) == 1)  // codes, which bf16 can hold
        for (; i + LANES <= count; i += LANES) store_high(to + i, load(from + i));
#endif
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; ++i) from_float(to_float(from[i]), to + i);
}

#if defined(__AVX512F__)
// Sixteen rows of sixteen words of 32 bits become columns: pairs of rows, then fours, then whole halves, in four rounds of exchanges.
inline __attribute__((always_inline)) void turn(__m512i (&a)[LANES]) {
    __m512i b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < LANES; i += 8)
        for (int j = 0; j < 4; ++j) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; ++j) {
        a[j] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88);
        a[j + 8] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd);
    }
}
#endif

// Sixteen rows of `count` words of 32 bits become columns: out[word][row], rows of `out` `stride` words apart.
inline void transpose(const uint32_t* const* rows, int64_t count, uint32_t* out, int64_t stride) {
#if defined(__AVX512F__)
    for (int64_t first = 0; first < count; first += LANES, out += LANES * stride) {
        const int words = int(std::min<int64_t>(LANES, count - first));
        const __mmask16 mask = __mmask16((1u << words) - 1);
        __m512i a[LANES];
        for (int i = 0; i < LANES; ++i) a[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + first);
        turn(a);
        for (int word = 0; word < words; ++word) _mm512_storeu_si512(out + word * stride, a[word]);
    }
#else
    const int64_t num_rows = std::min<int64_t>(LANES, stride);  // the lanes behind belong to the next word
    for (int64_t word = 0; word < count; ++word)
        for (int64_t row = 0; row < num_rows; ++row) out[word * stride + row] = rows[row][word];
#endif
}

// Into the second cache: the first is too small for what comes after next.
inline void prefetch(const void* p, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

// Panels that are read side by side: few rows alone would wait for one another's sums.
constexpr int side_by_side(int rows) { return MAX_ROWS < 12 ? 1 : rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }

#if defined(__AVX2__) && !defined(__AVX512F__)
// sum = number * weight + sum. Three instructions in one: compilers would load numbers early, and spill sums for them.
inline void add_product(const float* number, Floats weight, Floats& sum) {
    __m256 all;
    asm("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
        : "+x"(sum.lo), "+x"(sum.hi), "=&x"(all)
        : "m"(*number), "x"(weight.lo), "x"(weight.hi));
}
#endif

struct Nothing {
    void operator()(int64_t, int64_t = 1) const {}
};

// Memory that is brought into the second cache little by little: a burst would hold up what is being computed.
struct Ahead {
    const char* at;
    int64_t bytes_per_step;

    void operator()(int64_t step) const { __builtin_prefetch(at + step * bytes_per_step, 0, 2); }
    // The same beside several steps: of bf16 a block has BLOCK_DEPTH halves of a panel.
    void operator()(int64_t first_step, int64_t num_steps) const { prefetch(at + first_step * bytes_per_step, num_steps * bytes_per_step); }
};

// Adds to sums[row][2 * panel + half] the product of `ROWS` rows with `PANELS` panels, over all steps. Row r of a step is at
// rows + r * row_stride + step * step_stride, where a step is one of rows. ahead(at): beside each step, half a panel counting as one of `at`.
template <class T, int ROWS, int PANELS, class Beside = Nothing>
inline __attribute__((always_inline)) void multiply(
    const typename Product<T>::Row* rows, int64_t row_stride, int64_t step_stride, const T* panels, int64_t panel_stride,
    int64_t num_steps, Floats (&sums)[ROWS][2 * PANELS], const Beside& ahead = {}) {
    using P = Product<T>;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (ROWS >= ROWS_IN_ORDER) {
        constexpr int HALVES = ROWS < ROWS_BY_HALF ? 2 : 1;
        for (int first = 0; first < 2; first += HALVES) {
            Floats of[ROWS][HALVES];  // in registers
            for (int row = 0; row < ROWS; ++row)
                for (int half = 0; half < HALVES; ++half) of[row][half] = sums[row][first + half];
            for (int64_t step = 0; step < num_steps; ++step) {
                ahead(first * num_steps + step * HALVES);
#pragma GCC unroll 2
                for (int place = 0; place < P::ROW_STEPS; ++place) {
                    const auto* numbers = rows + (step * P::ROW_STEPS + place) * step_stride;
#pragma GCC unroll 2
                    for (int half = 0; half < HALVES; ++half) {
                        const Floats weight = P::weight(panels + step * PANEL * P::DEPTH, first + half, place);
#pragma GCC unroll 6
                        for (int row = 0; row < ROWS; ++row) add_product(numbers + row * row_stride, weight, of[row][half]);
                    }
                }
            }
            for (int row = 0; row < ROWS; ++row)
                for (int half = 0; half < HALVES; ++half) sums[row][first + half] = of[row][half];
        }
        return;
    }
#endif
    for (int64_t step = 0; step < num_steps; ++step) {
        ahead(2 * step);
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; ++panel) {
            const T* here = panels + panel * panel_stride + step * PANEL * P::DEPTH;
            const typename P::Weights weights = P::weights(here);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; ++row) {
                const auto value = P::row(rows + row * row_stride + step * P::ROW_STEPS * step_stride, step_stride);
                sums[row][2 * panel] = P::add(sums[row][2 * panel], value, weights, 0);
                sums[row][2 * panel + 1] = P::add(sums[row][2 * panel + 1], value, weights, 1);
            }
        }
    }
}

// Calls function.template operator()<PANELS>(first panel) for all panels, as many side by side as suit `ROWS` rows.
template <int ROWS, class Function>
inline void for_panels(int64_t num_panels, Function&& function) {
    constexpr int WIDE = side_by_side(ROWS);
    int64_t panel = 0;
    for (; panel + WIDE <= num_panels; panel += WIDE) function.template operator()<WIDE>(panel);
    if constexpr (WIDE > 2)
        for (; panel + 2 <= num_panels; panel += 2) function.template operator()<2>(panel);
    if constexpr (WIDE > 1)
        for (; panel < num_panels; ++panel) function.template operator()<1>(panel);
}

// Calls function.template operator()<N>() for N = `rows`, at most MAX_ROWS.
template <int N = MAX_ROWS, class Function>
inline void for_rows(int rows, Function&& function) {
    if constexpr (N > 0) {
        if (rows == N)
            function.template operator()<N>();
        else
            for_rows<N - 1>(rows, function);
    }
}
