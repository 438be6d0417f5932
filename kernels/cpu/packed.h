// Weights of 4, 5, 6 and 8 bits in groups along the depth, and their widening: weight = code * scale + offset, rounded once to float32
// and once to the dtype that multiplies it.
//
// A matrix is one run of bytes: the number of panels and the depth, padded to whole groups, in int64 each; one `Panel` each; then the
// panels' data, each at a multiple of 64 bytes. A panel holds 32 columns; missing ones are zeros. Each part of the matrix has a format of
// its own. A panel is read from its start to its end. For each block of the depth it has
//   scales [32] and, if there are any, offsets [32], and for each group of the block
//     scale factors [32] of eight bits, if there are any; likewise offset factors [32]; the group's codes.
// A group's scale is that of its block, times its factor; so is its offset. Codes of 8 bits lie as [depth][32]. Those of 4 bits lie in words
// of 32, eight of one column in each, the first in the low bits: [depth / 8][32]. Codes of 5 bits have their fifth bits before the rest, 32
// of one column in a word, those of 6 bits their last two, 16 in a word: eight of 32 columns become eight vectors by shifts alone.
#pragma once

#include <utility>

#include "dtypes.h"
#include "products.h"

enum class CodeType : uint8_t { U4, U5, U6, S8, E4M3 };
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
    int64_t bits() const { return codes == CodeType::U4 ? 4 : codes == CodeType::U5 ? 5 : codes == CodeType::U6 ? 6 : 8; }
    int64_t code_bytes() const { return PANEL * group * bits() / 8; }
    int64_t num_groups(int64_t depth) const { return (depth + group - 1) / group; }
    int64_t num_blocks(int64_t depth) const { return (depth + block - 1) / block; }
    int64_t panel_bytes(int64_t depth) const {
        const int64_t size = num_blocks(depth) * scale_bytes() + num_groups(depth) * (factor_bytes() + code_bytes());
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

constexpr int CODES_IN_WORD = 8, CHUNK = 128;  // CHUNK: of the depth, whole groups

// A group's scales and offsets of the two halves of a panel. zero: what is taken from a code first, where `fma` rounds twice.
struct GroupScales {
    Floats scale[2], offset[2], zero;
};

// Reads a panel group by group.
class Groups {
   public:
    Groups(Packed matrix, const Panel& panel) : format_(panel.format), at_(matrix.data + panel.offset) {}

    const Format& format() const { return format_; }
    // The codes of the next group, whose scales are put into `scales`.
    const char* next(GroupScales& scales) {
        if (count_++ % (format_.block / format_.group) == 0) FOR_DTYPE(format_.scale_dtype, read_block((const T*)at_))
        const float zero = format_.has(CENTERED) ? float(1 << (format_.bits() - 1)) : 0;
        scales.zero = splat(zero);
        for (int half = 0; half < 2; ++half) {
            scales.scale[half] = scale_[half];
            if (format_.has(SCALE_FACTORS)) scales.scale[half] = scale_[half] * load((const int8_t*)at_ + half * LANES);
        }
        if (format_.has(SCALE_FACTORS)) at_ += PANEL;
        for (int half = 0; half < 2; ++half) {
            scales.offset[half] = offset_[half];
            if (format_.has(OFFSET_FACTORS)) scales.offset[half] = offset_[half] * load((const int8_t*)at_ + half * LANES);
#if defined(__AVX2__)
            if (zero) scales.offset[half] = splat(-zero) * scales.scale[half];  // exactly: and `fma` rounds once
#endif
        }
        if (format_.has(OFFSET_FACTORS)) at_ += PANEL;
        const char* codes = at_;
        at_ += format_.code_bytes();
        return codes;
    }

   private:
    template <class S>
    void read_block(const S* scales) {
        for (int half = 0; half < 2; ++half) {
            scale_[half] = load(scales + half * LANES);
            offset_[half] = format_.has(OFFSETS) ? load(scales + PANEL + half * LANES) : splat(0);
        }
        at_ += format_.scale_bytes();
    }

    const Format format_;
    const char* at_;
    int64_t count_ = 0;
    Floats scale_[2], offset_[2];
};

// Weights of two vectors of columns, at one place of the depth, or at two for bf16 in pairs.
template <class F>
inline typename Product<F>::Weights joined(const Floats (&first)[2], const Floats (&second)[2]) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<F, bf16>) {  // rounded here: the machine's conversion is to the nearest, too
        const __m512i in_pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const auto pairs = [&](int half) {
            return (__m512bh)_mm512_permutexvar_epi16(in_pairs, (__m512i)_mm512_cvtne2ps_pbh(second[half].v, first[half].v));
        };
        return {pairs(0), pairs(1)};
    } else
#endif
        return {first[0], first[1]};
}

// Calls use(step, weights) for each step of a group of codes. R: to what weights are rounded; F: in what they are multiplied.
template <class F, class R, CodeType CODES, class Use>
inline __attribute__((always_inline)) void widen(const char* codes, int group, const GroupScales& scales, const Use& use) {
    constexpr int D = Product<F>::DEPTH, WORD_BYTES = PANEL * sizeof(uint32_t);
    constexpr bool IS_BYTES = CODES == CodeType::S8 || CODES == CodeType::E4M3;
    constexpr int NUM_HIGH = CODES == CodeType::U5 ? 1 : CODES == CodeType::U6 ? 2 : 0, PER_HIGH = NUM_HIGH ? 32 / NUM_HIGH : 1;
    const char* low = codes + (NUM_HIGH ? group / PER_HIGH * WORD_BYTES : 0);
    const auto rounded_once = [&](Floats code, int half) {
#if !defined(__AVX2__)
        code = code - scales.zero;
#endif
        const Floats weight = fma(code, scales.scale[half], scales.offset[half]);
        if constexpr (std::is_same_v<F, bf16>) return weight;  // `joined` does
        return nearest<R>(weight);
    };
    for (int k = 0; k < group; k += CODES_IN_WORD) {
        Ints words[2], high[2];
        if constexpr (!IS_BYTES)
            for (int half = 0; half < 2; ++half) words[half] = load_ints(low + k / CODES_IN_WORD * WORD_BYTES + half * WORD_BYTES / 2);
        if constexpr (NUM_HIGH > 0)
            for (int half = 0; half < 2; ++half)
                high[half] = shifted(load_ints(codes + k / PER_HIGH * WORD_BYTES + half * WORD_BYTES / 2), -(k % PER_HIGH * NUM_HIGH));
        const auto weight = [&](int j, int half) __attribute__((always_inline)) {
            if constexpr (IS_BYTES) {
                const char* at = codes + (k + j) * PANEL + half * LANES;
                return rounded_once(CODES == CodeType::S8 ? load((const int8_t*)at) : load((const fp8*)at), half);
            } else {
                Ints code = shifted(words[half], -4 * j) & 15;
                if constexpr (NUM_HIGH > 0) code = code | (shifted(high[half], 4 - NUM_HIGH * j) & ((16 << NUM_HIGH) - 16));
                return rounded_once(to_floats(code), half);
            }
        };
        UNROLL
        for (int j = 0; j < CODES_IN_WORD; j += D) {
            const Floats first[2] = {weight(j, 0), weight(j, 1)};
            if constexpr (D == 2) {
                const Floats second[2] = {weight(j + 1, 0), weight(j + 1, 1)};
                use((k + j) / D, joined<F>(first, second));
            } else {
                use(k + j, joined<F>(first, first));
            }
        }
    }
}
