// Pieces of paged KV, packed for `multiply`: keys as columns over the head, values as columns over the keys.
#pragma once

#include <type_traits>
#include <vector>

#include "products.h"

constexpr int PIECE = 2 * PANEL;

struct Shape {
    int64_t num_heads, num_kv_heads, head_size;
    int64_t page_stride, plane_stride, head_stride, block_size;  // of KV, in elements
    float scale;
    int64_t window;  // tokens that a row sees, itself included
    float soft_cap;  // 0 for none
    const float* sinks;  // [num_heads], null for none
    int64_t group() const { return num_heads / num_kv_heads; }
    const float* sink(int64_t head) const { return sinks ? sinks + head : nullptr; }
    int64_t num_panels() const { return (head_size + PANEL - 1) / PANEL; }
};

// The dtype in which scores and values are multiplied: bf16 where the machine does, else float32.
#if defined(__AVX512BF16__)
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
#else
template <class T>
using Factor = float;
#endif

// Two rows of `count` values become pairs, 32 columns at a time: out[column] = {first, second}, zeros behind the last.
inline void interleave(const bf16* first, const bf16* second, int64_t count, bf16* out, int64_t panel_stride) {
    for (int64_t begin = 0; begin < count; begin += PANEL, out += panel_stride) {
        const int columns = int(std::min<int64_t>(PANEL, count - begin));
#if defined(__AVX512BW__)
        const __mmask32 mask = __mmask32((uint64_t(1) << columns) - 1);
        const __m512i a = _mm512_maskz_loadu_epi16(mask, first + begin), b = _mm512_maskz_loadu_epi16(mask, second + begin);
        const __m512i low_a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a));
        const __m512i low_b = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(b));
        const __m512i high_a = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, 1));
        const __m512i high_b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1));
        _mm512_storeu_si512(out, _mm512_or_si512(low_a, _mm512_slli_epi32(low_b, 16)));
        _mm512_storeu_si512(out + PANEL, _mm512_or_si512(high_a, _mm512_slli_epi32(high_b, 16)));
#else
        for (int i = 0; i < PANEL; ++i) {
            out[2 * i] = i < columns ? first[begin + i] : bf16{};
            out[2 * i + 1] = i < columns ? second[begin + i] : bf16{};
        }
#endif
    }
}

// The tokens of a sequence, sixteen at a time: where the first KV head of each has its key, null for one that is not seen. The
// key of another head lies head_stride behind it, a value one plane behind its key.
template <class T>
class Walk {
   public:
    const T* tokens[LANES];

    // Begins at a position; first_visible to end - 1 are seen.
    Walk(const Shape& shape, const T* kv, const int32_t* block_table, int64_t position, int64_t first_visible, int64_t end)
        : shape_(shape), kv_(kv), block_(block_table + position / shape.block_size), offset_(position % shape.block_size),
          num_hidden_(first_visible - position), num_left_(end - position) {}

    void next() {
        for (const T*& token : tokens) {
            token = num_left_-- <= 0 ? nullptr : kv_ + *block_ * shape_.page_stride + offset_ * shape_.head_size;
            if (num_hidden_-- > 0) token = nullptr;
            if (++offset_ == shape_.block_size) ++block_, offset_ = 0;
        }
    }

   private:
    const Shape& shape_;
    const T* kv_;
    const int32_t* block_;
    int64_t offset_, num_hidden_, num_left_;
};

// Up to PIECE keys and their values, of one KV head. Belongs to one thread, which keeps its memory.
template <class T>
class Piece {
    using F = Factor<T>;
    static constexpr int DEPTH = Product<F>::DEPTH;

   public:
    // Empties the piece, for heads of a shape.
    void begin(const Shape& shape) {
        num_keys_ = 0;
        plane_stride_ = shape.plane_stride;
        if (shape.head_size == head_size_) return;
        head_size_ = shape.head_size;
        columns_ = shape.num_panels() * PANEL;
        keys_.assign(PIECE * head_size_, F{});
        values_.assign(PIECE * columns_, F{});
        rows_.assign((LANES + 1) * columns_, F{});
    }

    // Packs sixteen more tokens. Those that are not seen become zeros, for even the weight 0 would not keep an infinity out of a sum.
    void add(const T* const* tokens, int64_t head_offset) {
        const F* rows[LANES];
        for (int64_t i = 0; i < LANES; ++i) rows[i] = read(tokens[i], head_offset, i);
        F* columns = keys_.data() + num_keys_ / PANEL * key_panel_stride();
        transpose((const uint32_t* const*)rows, key_steps(), (uint32_t*)columns + num_keys_ % PANEL, PANEL);
        for (int64_t i = 0; i < LANES; ++i) rows[i] = read(tokens[i], head_offset + plane_stride_, i);
        for (int64_t i = 0; i < LANES; i += DEPTH) pack_values(rows + i, values_.data() + (num_keys_ + i) * PANEL);
        num_keys_ += LANES;
    }

    // Brings sixteen tokens that will be added nearer.
    void expect(const T* const* tokens, int64_t head_offset) const {
        for (int64_t i = 0; i < LANES; ++i) {
            if (!tokens[i]) continue;
            prefetch(tokens[i] + head_offset, head_size_ * sizeof(T));
            prefetch(tokens[i] + head_offset + plane_stride_, head_size_ * sizeof(T));
        }
    }

    int64_t num_keys() const { return num_keys_; }  // a multiple of LANES
    const F* keys() const { return keys_.data(); }
    const F* values() const { return values_.data(); }
    int64_t key_steps() const { return head_size_ / DEPTH; }
    int64_t key_panel_stride() const { return head_size_ * PANEL; }
    static constexpr int64_t value_panel_stride() { return PIECE * PANEL; }

   private:
    void pack_values(const F* const* rows, bf16* out) { interleave(rows[0], rows[1], head_size_, out, value_panel_stride()); }

    void pack_values(const F* const* rows, float* out) {
        for (int64_t begin = 0; begin < head_size_; begin += PANEL, out += value_panel_stride())
            std::memcpy(out, rows[0] + begin, std::min<int64_t>(PANEL, head_size_ - begin) * sizeof(float));
    }

    // A token's head as factors: where it lies if it has their dtype, else widened into one of our rows; zeros for no token.
    const F* read(const T* token, int64_t offset, int64_t row) {
        if (!token) return rows_.data() + LANES * columns_;
        if constexpr (std::is_same_v<T, F>)
            return token + offset;
        else {
            convert(token + offset, rows_.data() + row * columns_, head_size_);
            return rows_.data() + row * columns_;
        }
    }

    int64_t head_size_ = 0, columns_ = 0, plane_stride_ = 0, num_keys_ = 0;
    std::vector<F> keys_, values_, rows_;
};
