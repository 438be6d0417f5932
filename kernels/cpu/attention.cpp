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

inline void convert(const void* from, bf16* to, int64_t count) { std::memcpy(to, from, count * sizeof(bf16)); }
template <class T>
inline void convert(const T* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// The keys and values of one piece, packed for `multiply`: keys as columns over the head, values as columns over the keys.
template <class T>
class Piece {
    using F = Factor<T>;
    static constexpr int DEPTH = Product<F>::DEPTH;

   public:
    explicit Piece(const Shape& shape)
        : shape_(shape),
          keys_((shape.head_size + 1) / DEPTH * DEPTH * PIECE),
          values_(PIECE * shape.num_panels() * PANEL),
          row_(shape.num_panels() * PANEL) {}

    // Packs positions begin to begin + PIECE - 1 of a sequence; those from `end` on become zeros.
    void pack(const T* kv, const int32_t* block_table, int64_t kv_head, int64_t begin, int64_t end) {
        for (int64_t key = 0; key < PIECE; ++key) {
            const int64_t position = begin + key;
            if (position >= end) {
                pack_key(key, nullptr);
                pack_value(key, nullptr);
                continue;
            }
            const T* token = kv + block_table[position / shape_.block_size] * shape_.page_stride + kv_head * shape_.head_stride +
                             position % shape_.block_size * shape_.head_size;
            pack_key(key, token);
            pack_value(key, token + shape_.plane_stride);
        }
    }

    const F* keys() const { return keys_.data(); }
    const F* values() const { return values_.data(); }
    int64_t key_steps() const { return (shape_.head_size + DEPTH - 1) / DEPTH; }
    int64_t key_panel_stride() const { return key_steps() * PANEL * DEPTH; }
    static constexpr int64_t value_panel_stride() { return PIECE * PANEL; }

   private:
    void pack_key(int64_t key, const T* from) {
        const F* row = read(from);
        F* out = keys_.data() + key / PANEL * key_panel_stride() + key % PANEL * DEPTH;
        for (int64_t step = 0; step < key_steps(); ++step, out += PANEL * DEPTH)
            std::memcpy(out, row + step * DEPTH, DEPTH * sizeof(F));
    }

    void pack_value(int64_t key, const T* from) {
        const F* row = read(from);
        for (int64_t panel = 0; panel < shape_.num_panels(); ++panel) {
            F* out = values_.data() + panel * value_panel_stride() + key / DEPTH * PANEL * DEPTH + key % DEPTH;
            for (int column = 0; column < PANEL; ++column) out[column * DEPTH] = row[panel * PANEL + column];
        }
    }

    const F* read(const T* from) {
        if (from)
            convert(from, row_.data(), shape_.head_size);
        else
            std::fill(row_.begin(), row_.end(), F{});
        return row_.data();
    }

    const Shape& shape_;
    std::vector<F> keys_, values_, row_;
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
          depth_((shape.head_size + 1) / 2 * 2),
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
        float kept[ROWS];
        for (int r = 0; r < ROWS; ++r) kept[r] = weigh(r, row + r, begin);
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

    // Turns a row's scores into weights; returns the factor of what was summed before.
    float weigh(int r, int64_t row, int64_t begin) {
        float* scores = scores_.data() + r * PIECE;
        const int64_t position = first_position_ + row / shape_.group();
        for (int64_t key = std::max<int64_t>(0, position + 1 - begin); key < PIECE; ++key) scores[key] = NOTHING;
        for (int64_t key = 0; key < std::min<int64_t>(PIECE, position - shape_.window + 1 - begin); ++key) scores[key] = NOTHING;
        Floats top = load(scores);
        for (int i = LANES; i < PIECE; i += LANES) top = max(top, load(scores + i));
        const float before = segment.largest[row], now = std::max(before, largest(top));
        Floats powers = splat(0);
        for (int i = 0; i < PIECE; i += LANES) {
            const Floats power = exponential(load(scores + i) - splat(now));
            powers = powers + power;
            store(weights_.data() + r * PIECE + i, power);
        }
        const float kept = before == NOTHING ? 0 : exponential(before - now);
        segment.largest[row] = now;
        segment.powers[row] = segment.powers[row] * kept + sum(powers);
        return kept;
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
    for (int64_t i = 0; i < shape.head_size; ++i) from_float(values[i] / powers, out + i);
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
            piece.pack(kv, tables + unit.sequence * table_stride, unit.kv_head, at, end);
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
    parallel(int64_t(units.size()), [&](int64_t index) {
        const Unit& unit = units[index];
        const int64_t context_len = context_lens[unit.sequence];
        const int64_t position = context_len - cu_query_lens[unit.sequence + 1] + unit.first_token;
        const int64_t end = position + unit.num_tokens, num_rows = unit.num_tokens * group;
        Rows<T> rows(shape, query + unit.first_token * query_stride, query_stride, unit.num_tokens, unit.kv_head, position);
        Piece<T> piece(shape);
        Sums total(num_rows, columns);
        for (int64_t at = first_visible(shape, position) / PIECE * PIECE; at < end; at += PIECE) {
            piece.pack(kv, tables + unit.sequence * table_stride, unit.kv_head, at, end);
            rows.attend(piece, at);
            if ((at + PIECE) % SEGMENT && at + PIECE < end) continue;
            for (int64_t row = 0; row < num_rows; ++row)
                merge(total.largest[row], total.powers[row], total.values.data() + row * columns, rows.segment.largest[row],
                      rows.segment.powers[row], rows.segment.values.data() + row * columns, columns);
            rows.segment.clear();
        }
        for (int64_t row = 0; row < num_rows; ++row)
            write(shape, total.values.data() + row * columns, total.powers[row],
                  out + ((unit.first_token + row / group) * shape.num_heads + unit.kv_head * group + row % group) * shape.head_size);
    });
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
