// Weights of 4, 5, 6 and 8 bits in groups along the depth, and their widening: weight = code * scale + offset, rounded once to float32
// and once to the dtype that multiplies it.
//
// A matrix is one run of bytes: the number of panels and the depth, padded to whole groups, in int64 each; one `Panel` each; then the
// panels' data, each at a multiple of 64 bytes. A panel holds 32 columns; missing ones are zeros. Each part of the matrix has a format of
// its own. A panel is read from its start to its end. For each block of the depth it has
//   scales [32] and, if there are any, offsets [32], and for each group of the block
//     scale factors [32] of eight bits, if there are any; likewise offset factors [32]; the group's codes.
// In front of the first block, codes that are looked up have the table of their sixteen numbers, int8, in TABLE_BYTES.
// A group's scale is that of its block, times its factor; so is its offset.
// Codes lie in vectors of sixteen lanes: those of columns one after the other, D = PACKED_DEPTH neighbours of the depth of each side by
// side, as the machine multiplies them; 2 D vectors are a panel. Codes of 8 bits lie as [depth / D][32][D]. Those of 4 bits lie in words
// of 32, eight of a lane in each, the first in the low bits: [depth / 8 D][32][D]. Of eight codes of 5 or 6 bits a word has the first six
// or five and, on top, the last two bits of the eighth. The rest, the seventh or the next two and what the eighth has left, lies in a byte
// or in 16 bits of each lane, behind the words of all lanes. So a shift puts any code but the eighth in its place.
#pragma once

#include <utility>

#include "dtypes.h"
#include "products.h"

enum class CodeType : uint8_t { U4, U5, U6, S8, E4M3, TABLE4 };
constexpr int TABLE_BYTES = 64;
enum : uint8_t { OFFSETS = 1, SCALE_FACTORS = 2, OFFSET_FACTORS = 4, CENTERED = 8 };

// The numbers of a part's weights. `Format` in packed.py has the same fields in the same order.
struct Format {
    CodeType codes;
    uint8_t scale_dtype;  // of scales and offsets, as of FOR_DTYPE
    uint8_t flags;        // CENTERED: codes less half of their range are multiplied
    uint8_t source_dtype;  // to which a weight is rounded first: the file's own; float32 for none
    uint16_t group, block;  // in weights of a column; 128 is a multiple of the group, the block one of the group

    bool has(uint8_t flag) const { return flags & flag; }
    int64_t scale_bytes() const { return (scale_dtype ? 2 : 4) * PANEL * (has(OFFSETS) ? 2 : 1); }
    int64_t factor_bytes() const { return PANEL * ((has(SCALE_FACTORS) ? 1 : 0) + (has(OFFSET_FACTORS) ? 1 : 0)); }
    int64_t bits() const { return codes == CodeType::U4 || codes == CodeType::TABLE4 ? 4 : codes == CodeType::U5 ? 5 : codes == CodeType::U6 ? 6 : 8; }
    int64_t code_bytes() const { return PANEL * group * bits() / 8; }
    int64_t table_bytes() const { return codes == CodeType::TABLE4 ? TABLE_BYTES : 0; }
    int64_t num_groups(int64_t depth) const { return (depth + group - 1) / group; }
    int64_t num_blocks(int64_t depth) const { return (depth + block - 1) / block; }
    int64_t panel_bytes(int64_t depth) const {
        const int64_t size = table_bytes() + num_blocks(depth) * scale_bytes() + num_groups(depth) * (factor_bytes() + code_bytes());
        return (size + 63) / 64 * 64;
    }
};

struct Panel {
    int64_t offset;  // in bytes from the start of the matrix
    int32_t first_column, num_columns;
    Format format;
};

struct Packed {
    const char* data;

    int64_t num_panels() const { return ((const int64_t*)data)[0]; }
    int64_t padded_depth() const { return ((const int64_t*)data)[1]; }
    const Panel* panels() const { return (const Panel*)(data + 2 * sizeof(int64_t)); }
};

#if defined(__AVX2__)
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL
#endif

#if defined(__AVX512BF16__)
constexpr int PACKED_DEPTH = 2;
#else
constexpr int PACKED_DEPTH = 1;
#endif
constexpr int NUM_VECTORS = 2 * PACKED_DEPTH, CODES_IN_WORD = 8, WORD_DEPTH = CODES_IN_WORD * PACKED_DEPTH;
template <class F>  // of the depth, whole groups: sums of a tile are read and written once a chunk
constexpr int CHUNK = PACKED_DEPTH == 2 || std::is_same_v<F, bf16> ? 512 : 128;
template <class F>  // of the depth, that are rounded at once: a pair of bf16
constexpr int PLACES = PACKED_DEPTH == 1 && std::is_same_v<F, bf16> ? 2 : 1;
constexpr int AHEAD_BYTES = 4096;  // of prefetched codes: a product of several rows would wait for them

// What the columns of half a panel have, for the lanes of its vectors.
inline void spread(Floats of_half, Floats* vectors) {
#if defined(__AVX512BF16__)
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    vectors[0] = {_mm512_permutexvar_ps(low, of_half.v)};
    vectors[1] = {_mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), of_half.v)};
#else
    vectors[0] = of_half;
#endif
}

// A group's scales and offsets, by lane. zero: what is taken from a code first, where `fma` rounds twice. table: of codes looked up.
struct GroupScales {
    Floats scale[NUM_VECTORS], offset[NUM_VECTORS], zero, table;
};

// Reads a panel group by group.
class Groups {
   public:
    Groups(Packed matrix, const Panel& panel) : format_(panel.format), at_(matrix.data + panel.offset + panel.format.table_bytes()) {
        table_ = format_.table_bytes() ? load((const int8_t*)matrix.data + panel.offset) : splat(0);
    }

    const Format& format() const { return format_; }
    // The codes of the next group, whose scales are put into `scales`: registers, if it is inlined.
    inline __attribute__((always_inline)) const char* next(GroupScales& scales) {
        if (count_++ % (format_.block / format_.group) == 0) FOR_DTYPE(format_.scale_dtype, read_block((const T*)at_))
        const float zero = (format_.has(CENTERED) ? float(1 << (format_.bits() - 1)) : 0) + (format_.codes == CodeType::U6 ? CODE_ADDEND<6> : 0);
        scales.zero = splat(zero);
        scales.table = table_;
        for (int half = 0; half < 2; ++half) {
            Floats scale = scale_[half];
            if (format_.has(SCALE_FACTORS)) scale = scale * load((const int8_t*)at_ + half * LANES);
            spread(scale, scales.scale + half * PACKED_DEPTH);
        }
        if (format_.has(SCALE_FACTORS)) at_ += PANEL;
#if defined(__AVX2__)
        if (zero) {  // exactly: and `fma` rounds once
            for (int v = 0; v < NUM_VECTORS; ++v) scales.offset[v] = splat(-zero) * scales.scale[v];
            return next_codes();
        }
#endif
        for (int half = 0; half < 2; ++half) {
            Floats offset = offset_[half];
            if (format_.has(OFFSET_FACTORS)) offset = offset * load((const int8_t*)at_ + half * LANES);
            spread(offset, scales.offset + half * PACKED_DEPTH);
        }
        if (format_.has(OFFSET_FACTORS)) at_ += PANEL;
        return next_codes();
    }

   private:
    const char* next_codes() {
        const char* codes = at_;
        at_ += format_.code_bytes();
        return codes;
    }

    template <class S>
    void read_block(const S* scales) {
        for (int half = 0; half < 2; ++half) {
            scale_[half] = load(scales + half * LANES);
            offset_[half] = format_.has(OFFSETS) ? load(scales + PANEL + half * LANES) : splat(0);
        }
        at_ += format_.scale_bytes();
    }

    Format format_;
    const char* at_;
    int64_t count_ = 0;
    Floats scale_[2], offset_[2], table_;
};

// Calls use(step, weights) with weights that are still to be rounded, at PACKED_DEPTH places of the depth, or PLACES.
template <class F, class R, class Use>
inline __attribute__((always_inline)) void use_each(int at, const Floats* weights, const Use& use) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<F, bf16>) {  // rounded here: the machine's conversion is to the nearest, too
        use(at, {_mm512_cvtne2ps_pbh(weights[1].v, weights[0].v), _mm512_cvtne2ps_pbh(weights[3].v, weights[2].v)});
    } else {
        const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        for (int i = 0; i < PACKED_DEPTH; ++i) {
            const auto half = [&](const Floats* of) {
                return nearest<R>({_mm512_permutex2var_ps(of[0].v, _mm512_add_epi32(first, _mm512_set1_epi32(i)), of[1].v)});
            };
            use(at * PACKED_DEPTH + i, {half(weights), half(weights + 2)});
        }
    }
#else
    if constexpr (PLACES<F> == 2) {
        use(at / 2, {{nearest<R>(weights[0]), nearest<R>(weights[1])}, {nearest<R>(weights[2]), nearest<R>(weights[3])}});
    } else {
        use(at, {nearest<R>(weights[0]), nearest<R>(weights[1])});
    }
#endif
}

// Code `at` of the eight of a lane.
template <int BITS>
inline __attribute__((always_inline)) Floats code_at(Ints word, Ints rest, int at) {
    constexpr int IN_WORD = 32 / BITS, PLACE = CODE_PLACE<BITS>;
    if (at < IN_WORD) return to_floats<BITS>(shifted(word, PLACE - at * BITS));
    const int place = (at - IN_WORD) * BITS;
    if (at < CODES_IN_WORD - 1) return to_floats<BITS>(shifted(rest, PLACE - place));
    return to_floats<BITS>(selected(3 << PLACE, shifted(word, PLACE - 30), shifted(rest, PLACE + 2 - place)));
}

// Calls use(step, weights) for each step of a group of codes. R: to what weights are rounded; F: in what they are multiplied.
template <class F, class R, CodeType CODES, class Use>
inline __attribute__((always_inline)) void widen(const char* codes, int64_t group, const GroupScales& scales, const Use& use) {
    constexpr int VECTOR_BYTES = LANES * sizeof(uint32_t), D = PACKED_DEPTH;
    constexpr bool IS_BYTES = CODES == CodeType::S8 || CODES == CodeType::E4M3;
    constexpr int BITS = IS_BYTES ? 8 : CODES == CodeType::U5 ? 5 : CODES == CodeType::U6 ? 6 : 4, REST_BYTES = BITS - 4;
    constexpr int STEP_BYTES = PANEL * WORD_DEPTH * BITS / 8;
    for (int64_t k = 0; k < group; k += WORD_DEPTH, codes += STEP_BYTES) {
        for (int i = 0; i < STEP_BYTES; i += 64) __builtin_prefetch(codes + AHEAD_BYTES + i);
        Ints words[NUM_VECTORS], rests[NUM_VECTORS];
        if constexpr (!IS_BYTES)
            for (int v = 0; v < NUM_VECTORS; ++v) words[v] = load_ints(codes + v * VECTOR_BYTES);
        if constexpr (!IS_BYTES && REST_BYTES > 0)
            for (int v = 0; v < NUM_VECTORS; ++v) rests[v] = load_ints<REST_BYTES>(codes + NUM_VECTORS * VECTOR_BYTES + v * LANES * REST_BYTES);
        Floats all[PLACES<F> * NUM_VECTORS];
        UNROLL
        for (int j = 0; j < CODES_IN_WORD; ++j) {
            Floats* weights = all + j % PLACES<F> * NUM_VECTORS;
            for (int v = 0; v < NUM_VECTORS; ++v) {
                Floats code;
                if constexpr (IS_BYTES) {
                    const char* at = codes + (j * NUM_VECTORS + v) * LANES;
                    code = CODES == CodeType::S8 ? load((const int8_t*)at) : load((const fp8*)at);
                } else if constexpr (CODES == CodeType::TABLE4) {
                    code = looked_up(scales.table, shifted(words[v], -4 * j));
                } else {
                    code = code_at<BITS>(words[v], rests[v], j);
                }
#if !defined(__AVX2__)
                code = code - scales.zero;
#endif
                weights[v] = fma(code, scales.scale[v], scales.offset[v]);
            }
            if ((j + 1) % PLACES<F> == 0) use_each<F, R>(k / D + j, all, use);
        }
    }
}
