// Attention over paged KV, of decoding tokens and of chunks of prompts alike.
//
// Keys are taken in pieces of 64 and segments of 256, both counted from position 0. A row's softmax runs over the pieces
// of a segment in order, online (arXiv 1805.02867), and its segments are then merged in order. Which pieces a row takes depends on its
// position and window only: it gets the same bits alone and in a chunk, on one thread and on many.

#include <limits>
#include <type_traits>
#include <vector>

#include "dtypes.h"
#include "products.h"
#include "threads.h"

namespace {

constexpr int PIECE = 2 * PANEL, SEGMENT = 4 * PIECE;
constexpr int MAX_UNIT_ROWS = 48;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Shape {
    int64_t num_heads, num_kv_heads, head_size;
    int64_t page_stride, plane_stride, head_stride, block_size;  // of KV, in elements
    float scale;
    int64_t window;  // tokens that a row sees, itself included
    int64_t group() const { return num_heads / num_kv_heads; }
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

inline void convert(const bf16* from, bf16* to, int64_t count) { std::memcpy(to, from, count * sizeof(bf16)); }
template <class T>
inline void convert(const T* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

// Sixteen rows of `count` words of 32 bits become columns: out[word][row], rows of `out` PANEL words apart.
inline void transpose(const uint32_t* const* rows, int64_t count, uint32_t* out) {
#if defined(__AVX512F__)
    for (int64_t first = 0; first < count; first += LANES, out += LANES * PANEL) {
        const int words = int(std::min<int64_t>(LANES, count - first));
        const __mmask16 mask = __mmask16((1u << words) - 1);
        __m512i a[LANES], b[LANES];
        for (int i = 0; i < LANES; ++i) a[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + first);
        for (int i = 0; i < LANES; i += 2) {  // pairs of rows, then fours, then whole halves: four rounds of exchanges
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
        for (int word = 0; word < words; ++word) _mm512_storeu_si512(out + word * PANEL, a[word]);
    }
#else
    for (int64_t word = 0; word < count; ++word)
        for (int row = 0; row < LANES; ++row) out[word * PANEL + row] = rows[row][word];
#endif
}

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

// The keys and values of one piece, packed for `multiply`: keys as columns over the head, values as columns over the keys.
template <class T>
class Piece {
    using F = Factor<T>;
    static constexpr int DEPTH = Product<F>::DEPTH;

   public:
    explicit Piece(const Shape& shape)
        : shape_(shape),
          keys_(key_panel_stride() * (PIECE / PANEL)),
          values_(PIECE * shape.num_panels() * PANEL),
          rows_((LANES + 1) * shape.num_panels() * PANEL) {}

    // Packs positions begin to begin + PIECE - 1 of a sequence, of which first_visible to end - 1 are seen: the others
    // become zeros, for even the weight 0 would not keep an infinity out of a sum.
    void pack(const T* kv, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t first_visible, int64_t end) {
        const F* rows[LANES];
        for (int64_t first = 0; first < PIECE; first += LANES) {
            const T* tokens[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const int64_t position = begin + first + i;
                tokens[i] = position < first_visible ? nullptr : find(kv, block_table, kv_head, position, end);
                if (const T* next = find(kv, block_table, kv_head, begin + first + i + PIECE, end)) {
                    prefetch(next, shape_.head_size * sizeof(T));
                    prefetch(next + shape_.plane_stride, shape_.head_size * sizeof(T));
                }
            }
            for (int64_t i = 0; i < LANES; ++i) rows[i] = read(tokens[i], i);
            transpose((const uint32_t* const*)rows, key_steps(), (uint32_t*)(keys_.data() + first / PANEL * key_panel_stride()) + first % PANEL);
            for (int64_t i = 0; i < LANES; ++i) rows[i] = read(tokens[i] ? tokens[i] + shape_.plane_stride : nullptr, i);
            for (int64_t i = 0; i < LANES; i += DEPTH) pack_values(rows + i, values_.data() + (first + i) * PANEL);
        }
    }

    const F* keys() const { return keys_.data(); }
    const F* values() const { return values_.data(); }
    int64_t key_steps() const { return shape_.head_size / DEPTH; }
    int64_t key_panel_stride() const { return key_steps() * PANEL * DEPTH; }
    static constexpr int64_t value_panel_stride() { return PIECE * PANEL; }

   private:
    // The key of a position, or null from `end` on.
    const T* find(const T* kv, const int32_t* block_table, int64_t kv_head, int64_t position, int64_t end) const {
        if (position >= end) return nullptr;
        return kv + block_table[position / shape_.block_size] * shape_.page_stride + kv_head * shape_.head_stride +
               position % shape_.block_size * shape_.head_size;
    }

    void pack_values(const F* const* rows, bf16* out) {
        interleave(rows[0], rows[1], shape_.head_size, out, value_panel_stride());
    }

    void pack_values(const F* const* rows, float* out) {
        for (int64_t begin = 0; begin < shape_.head_size; begin += PANEL, out += value_panel_stride())
            std::memcpy(out, rows[0] + begin, std::min<int64_t>(PANEL, shape_.head_size - begin) * sizeof(float));
    }

    // A token's head as factors: where it lies if it has their dtype, else widened into one of our rows; zeros for no token.
    const F* read(const T* token, int64_t row) {
        const int64_t size = shape_.num_panels() * PANEL;
        if (!token) return rows_.data() + LANES * size;
        if constexpr (std::is_same_v<T, F>)
            return token;
        else {
            convert(token, rows_.data() + row * size, shape_.head_size);
            return rows_.data() + row * size;
        }
    }

    const Shape& shape_;
    std::vector<F> keys_, values_, rows_;
};

// The state of rows in the middle of a softmax: the largest score, the sum of powers, and the sum of values, unnormalized.
struct Sums {
    Sums(int64_t rows, int64_t columns) : columns(columns), largest(rows), powers(rows), values(rows * columns) { clear(); }

    void clear() {
        std::fill(largest.begin(), largest.end(), NOTHING);
        std::fill(powers.begin(), powers.end(), 0.0f);
        std::fill(values.begin(), values.end(), 0.0f);
    }

    int64_t columns;
    std::vector<float> largest, powers, values;
};

// Merges a later part of a row's keys into an earlier one. A part without keys has no powers, and changes nothing.
void merge(float& largest, float& powers, float* values, float part_largest, float part_powers, const float* part_values,
           int64_t columns) {
    if (part_powers == 0) return;
    const float new_largest = part_largest > largest ? part_largest : largest;
    const float scale = powers == 0 ? 0 : exponential(largest - new_largest), part_scale = exponential(part_largest - new_largest);
    for (int64_t i = 0; i < columns; i += LANES)
        store(values + i, fma(load(part_values + i), splat(part_scale), load(values + i) * splat(scale)));
    powers = powers * scale + part_powers * part_scale;
    largest = new_largest;
}

// Attention of consecutive tokens of a sequence, with all query heads that share a KV head: row = token * group + head.
template <class T>
class Rows {
    using F = Factor<T>;

   public:
    Rows(const Shape& shape, const T* query, int64_t query_stride, int64_t num_tokens, int64_t kv_head, int64_t first_position)
        : shape_(shape),
          first_position_(first_position),
          num_tokens_(num_tokens),
          depth_(shape.head_size),
          queries_(num_tokens * shape.group() * depth_),
          scores_(MAX_ROWS * PIECE),
          weights_(MAX_ROWS * PIECE),
          segment(num_tokens * shape.group(), shape.num_panels() * PANEL) {
        for (int64_t token = 0; token < num_tokens; ++token)
            for (int64_t head = 0; head < shape.group(); ++head)
                convert(query + token * query_stride + (kv_head * shape.group() + head) * shape.head_size,
                        queries_.data() + (token * shape.group() + head) * depth_, shape.head_size);
    }

    // Goes through one piece, with the rows that see any of it.
    void attend(const Piece<T>& piece, int64_t begin) {
        const int64_t first_token = std::max<int64_t>(0, begin - first_position_);
        const int64_t behind = begin + PIECE - 1 + shape_.window - first_position_;  // tokens from here on see none of it
        const int64_t end_token = std::min(num_tokens_, shape_.window > first_position_ + num_tokens_ ? num_tokens_ : behind);
        const int64_t end = end_token * shape_.group();
        for (int64_t row = first_token * shape_.group(); row < end; row += MAX_ROWS)
            for_rows(int(std::min<int64_t>(MAX_ROWS, end - row)), [&]<int ROWS>() { tile<ROWS>(piece, begin, row); });
    }

   private:
    template <int ROWS>
    void tile(const Piece<T>& piece, int64_t begin, int64_t row) {
        Floats sums[ROWS][2];
        for (int panel = 0; panel < PIECE / PANEL; ++panel) {
            for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = splat(0);
            multiply<F, ROWS, 1>(queries_.data() + row * depth_, depth_, Product<F>::DEPTH, piece.keys() + panel * piece.key_panel_stride(), 0,
                                 piece.key_steps(), sums);
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half)
                    store(scores_.data() + r * PIECE + panel * PANEL + half * LANES, sums[r][half] * splat(shape_.scale));
        }
        alignas(64) float kept[LANES];
        weigh<ROWS>(row, begin, kept);
        for (int64_t panel = 0; panel < shape_.num_panels(); ++panel) {
            float* values = segment.values.data() + row * segment.columns + panel * PANEL;
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half)
                    sums[r][half] = load(values + r * segment.columns + half * LANES) * splat(kept[r]);
            multiply<F, ROWS, 1>(weights_.data(), PIECE, Product<F>::DEPTH, piece.values() + panel * piece.value_panel_stride(), 0,
                                 PIECE / Product<F>::DEPTH, sums);
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half) store(values + r * segment.columns + half * LANES, sums[r][half]);
        }
    }

    // Turns the scores of rows into weights, and tells of each row the factor of what was summed before.
    template <int ROWS>
    void weigh(int64_t row, int64_t begin, float* kept) {
        float now[LANES] = {}, powers[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            float* scores = scores_.data() + r * PIECE;
            hide(scores, first_position_ + (row + r) / shape_.group(), begin);
            Floats top = load(scores);
            for (int i = LANES; i < PIECE; i += LANES) top = max(top, load(scores + i));
            now[r] = std::max(segment.largest[row + r], largest(top));
            Floats all = splat(0);
            for (int i = 0; i < PIECE; i += LANES) {
                const Floats power = exponential(load(scores + i) - splat(now[r]));
                all = all + power;
                store(weights_.data() + r * PIECE + i, power);
            }
            powers[r] = sum(all);
        }
        store(kept, exponential(load_some(segment.largest.data() + row, ROWS) - load(now)));  // 0 at first: e^-infinity
        for (int r = 0; r < ROWS; ++r) {
            segment.powers[row + r] = segment.powers[row + r] * kept[r] + powers[r];
            segment.largest[row + r] = now[r];
        }
    }

    // Hides the keys behind a position, and those before its window.
    void hide(float* scores, int64_t position, int64_t begin) const {
        for (int64_t key = std::max<int64_t>(0, position + 1 - begin); key < PIECE; ++key) scores[key] = NOTHING;
        for (int64_t key = 0; key < std::min<int64_t>(PIECE, position - shape_.window + 1 - begin); ++key) scores[key] = NOTHING;
    }

    const Shape& shape_;
    const int64_t first_position_, num_tokens_, depth_;
    std::vector<F> queries_;
    std::vector<float> scores_;
    std::vector<F> weights_;

   public:
    Sums segment;
};

inline int64_t first_visible(const Shape& shape, int64_t position) { return std::max<int64_t>(0, position - shape.window + 1); }

template <class T>
void write(const Shape& shape, const float* values, float powers, T* out) {
    for (int64_t i = 0; i < shape.head_size; i += LANES)
        store_some(out + i, load(values + i) / splat(powers), int(std::min<int64_t>(LANES, shape.head_size - i)));
}

// One token a sequence. A unit is a segment of a sequence's keys, for one KV head: long contexts are shared by threads.
template <class T>
void decode(const Shape& shape, const T* query, int64_t query_stride, const T* kv, const int32_t* tables, int64_t table_stride,
            const int32_t* context_lens, int64_t num_sequences, T* out) {
    struct Unit {
        int64_t sequence, kv_head, segment;
        bool is_of_same_rows(const Unit& other) const { return sequence == other.sequence && kv_head == other.kv_head; }
    };
    const int64_t group = shape.group(), columns = shape.num_panels() * PANEL;
    std::vector<Unit> units;
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
        if (context_lens[sequence] == 0) std::fill_n(out + sequence * shape.num_heads * shape.head_size, shape.num_heads * shape.head_size, T{});
        for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
            const int64_t position = context_lens[sequence] - 1;
            for (int64_t segment = first_visible(shape, position) / SEGMENT; segment * SEGMENT <= position; ++segment)
                units.push_back({sequence, kv_head, segment});
        }
    }
    Sums parts(int64_t(units.size()) * group, columns);
    parallel(int64_t(units.size()), [&](int64_t index) {
        const Unit& unit = units[index];
        const int64_t end = context_lens[unit.sequence], begin = first_visible(shape, end - 1);
        Rows<T> rows(shape, query + unit.sequence * query_stride, query_stride, 1, unit.kv_head, end - 1);
        Piece<T> piece(shape);
        const int64_t first = std::max(begin / PIECE * PIECE, unit.segment * SEGMENT);
        for (int64_t at = first; at < std::min(end, (unit.segment + 1) * SEGMENT); at += PIECE) {
            piece.pack(kv, tables + unit.sequence * table_stride, unit.kv_head, at, begin, end);
            rows.attend(piece, at);
        }
        for (int64_t head = 0; head < group; ++head) {
            const int64_t part = index * group + head;
            parts.largest[part] = rows.segment.largest[head];
            parts.powers[part] = rows.segment.powers[head];
            std::copy_n(rows.segment.values.data() + head * columns, columns, parts.values.data() + part * columns);
        }
    });
    for (size_t index = 0, next; index < units.size(); index = next) {
        for (next = index + 1; next < units.size() && units[next].is_of_same_rows(units[index]); ++next)
            for (int64_t head = 0; head < group; ++head) {
                const int64_t whole = int64_t(index) * group + head, part = int64_t(next) * group + head;
                merge(parts.largest[whole], parts.powers[whole], parts.values.data() + whole * columns, parts.largest[part],
                      parts.powers[part], parts.values.data() + part * columns, columns);
            }
        for (int64_t head = 0; head < group; ++head) {
            const int64_t whole = int64_t(index) * group + head, query_head = units[index].kv_head * group + head;
            write(shape, parts.values.data() + whole * columns, parts.powers[whole],
                  out + (units[index].sequence * shape.num_heads + query_head) * shape.head_size);
        }
    }
}

// The last tokens of each sequence. A unit is a few tokens with one KV head; it goes through all that they see.
template <class T>
void prefill(const Shape& shape, const T* query, int64_t query_stride, const T* kv, const int32_t* tables, int64_t table_stride,
             const int32_t* context_lens, const int32_t* cu_query_lens, int64_t num_sequences, T* out) {
    struct Unit {
        int64_t sequence, kv_head, first_token, num_tokens;
    };
    const int64_t group = shape.group(), columns = shape.num_panels() * PANEL;
    const int64_t per_unit = std::max<int64_t>(1, MAX_UNIT_ROWS / group);
    std::vector<Unit> units;
    for (int64_t sequence = num_sequences - 1; sequence >= 0; --sequence)
        for (int64_t end = cu_query_lens[sequence + 1], begin; end > cu_query_lens[sequence]; end = begin) {
            begin = std::max<int64_t>(cu_query_lens[sequence], end - per_unit);  // the last ones see most: they come first
            for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) units.push_back({sequence, kv_head, begin, end - begin});
        }
    const auto run = [&](const auto& run, const Unit& unit) -> void {
        const int64_t context_len = context_lens[unit.sequence];
        const int64_t position = context_len - cu_query_lens[unit.sequence + 1] + unit.first_token;
        const int64_t end = position + unit.num_tokens, num_rows = unit.num_tokens * group;
        Rows<T> rows(shape, query + unit.first_token * query_stride, query_stride, unit.num_tokens, unit.kv_head, position);
        Piece<T> piece(shape);
        Sums total(num_rows, columns);
        const int64_t begin = first_visible(shape, position);
        for (int64_t at = begin / PIECE * PIECE; at < end; at += PIECE) {
            piece.pack(kv, tables + unit.sequence * table_stride, unit.kv_head, at, begin, end);
            rows.attend(piece, at);
            if ((at + PIECE) % SEGMENT && at + PIECE < end) continue;
            for (int64_t row = 0; row < num_rows; ++row)
                merge(total.largest[row], total.powers[row], total.values.data() + row * columns, rows.segment.largest[row],
                      rows.segment.powers[row], rows.segment.values.data() + row * columns, columns);
            rows.segment.clear();
        }
        const auto is_number = [](float value) { return std::isfinite(value); };
        if (unit.num_tokens > 1 && !std::all_of(total.values.begin(), total.values.end(), is_number)) {
            // A later token's infinity, times the weight 0: each token with what it sees, and nothing else.
            for (int64_t token = 0; token < unit.num_tokens; ++token)
                run(run, Unit{unit.sequence, unit.kv_head, unit.first_token + token, 1});
            return;
        }
        for (int64_t row = 0; row < num_rows; ++row)
            write(shape, total.values.data() + row * columns, total.powers[row],
                  out + ((unit.first_token + row / group) * shape.num_heads + unit.kv_head * group + row % group) * shape.head_size);
    };
    parallel(int64_t(units.size()), [&](int64_t index) { run(run, units[index]); });
}

}  // namespace

// query [rows, num_heads, head_size], its rows query_stride elements apart; out [rows, num_heads, head_size]. The first num_decodes
// sequences have one row each; the rows of the others end at cu_query_lens [num_sequences + 1]. window: 0 for none.
extern "C" void baton_attention(int dtype, const void* query, int64_t query_stride, const void* kv, int64_t page_stride,
                                int64_t plane_stride, int64_t head_stride, int64_t block_size, const int32_t* tables,
                                int64_t table_stride, const int32_t* context_lens, const int32_t* cu_query_lens,
                                int64_t num_sequences, int64_t num_decodes, int64_t num_heads, int64_t num_kv_heads,
                                int64_t head_size, float scale, int64_t window, void* out) {
    const Shape shape{num_heads,  num_kv_heads, head_size, page_stride, plane_stride, head_stride,
                      block_size, scale,        window ? window : std::numeric_limits<int32_t>::max()};
    FOR_DTYPE(dtype, {
        const T *queries = (const T*)query, *pages = (const T*)kv;
        decode(shape, queries, query_stride, pages, tables, table_stride, context_lens, num_decodes, (T*)out);
        prefill(shape, queries, query_stride, pages, tables + num_decodes * table_stride, table_stride, context_lens + num_decodes,
                cu_query_lens + num_decodes, num_sequences - num_decodes, (T*)out);
    })
}
