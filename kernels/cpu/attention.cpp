// Attention over paged KV, of decoding tokens and of chunks of prompts alike.
//
// Keys are taken in pieces of 128 and segments of 1024, both counted from position 0. A row's softmax runs over the pieces
// of a segment in order, online (arXiv 1805.02867), and its segments are then merged in order. Which pieces a row takes depends on its
// position and window only: it gets the same bits alone and in a chunk, on one thread and on many.
// Sinks that are behind a row's window (arXiv 2309.17453) are a segment of their own, its first, which a query meets turned back.

#include <limits>

#include "dtypes.h"
#include "pieces.h"
#include "threads.h"

namespace {

constexpr int SEGMENT = 8 * PIECE;
constexpr int MAX_UNIT_ROWS = IN_TILES<bf16> ? 384 : 48, MIN_UNITS = 8;  // packing keys costs as much as the softmax of 48 rows
constexpr float RESCALE_THRESHOLD = 6;  // sums are rescaled only where a score exceeds the one they are relative to by more: powers stay below e^6
constexpr float LOG2_E = 0x1.715476p+0f;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// The state of rows in the middle of a softmax: the score that powers are relative to, at most RESCALE_THRESHOLD below the largest; the sum of powers;
// the sum of values, unnormalized.
struct Sums {
    int64_t columns = 0;
    bool is_empty = true;  // of keys: its memory may hold anything
    std::vector<float> largest, powers, values;

    void reshape(int64_t rows, int64_t columns_of_values) {
        is_empty = true;
        columns = columns_of_values;
        largest.resize(rows);
        powers.resize(rows);
        values.resize(rows * columns);
    }

    // Makes it the state of rows without keys.
    void start() {
        is_empty = false;
        std::fill(largest.begin(), largest.end(), NOTHING);
        std::fill(powers.begin(), powers.end(), 0.0f);
        std::fill(values.begin(), values.end(), 0.0f);
    }

    // Merges a later part of the keys of some rows, up to LANES. A part without keys has no powers, and changes nothing.
    void merge(int64_t first, const Sums& part, int count) {
        const Floats before = load_some(largest.data() + first, count), of_part = load_some(part.largest.data() + first, count);
        float now[LANES], kept[LANES], part_kept[LANES];
        store(now, max(before, of_part));
        store(kept, exponential(before - load(now)));
        store(part_kept, exponential(of_part - load(now)));
        for (int i = 0; i < count; ++i) {
            const int64_t row = first + i;
            if (part.powers[row] == 0) continue;
            float* sums = values.data() + row * columns;
            const float* others = part.values.data() + row * columns;
            if (powers[row] == 0) {  // as `take` has it of all rows
                std::copy_n(others, columns, sums);
                powers[row] = part.powers[row], largest[row] = part.largest[row];
                continue;
            }
            for (int64_t at = 0; at < columns; at += LANES)
                store(sums + at, fma(load(others + at), splat(part_kept[i]), load(sums + at) * splat(kept[i])));
            powers[row] = powers[row] * kept[i] + part.powers[row] * part_kept[i];
            largest[row] = now[i];
        }
    }

    // Merges a later part of the keys of all rows, and empties it.
    void take(Sums& part) {
        const int64_t num_rows = largest.size();
        if (is_empty)
            std::swap(*this, part);
        else
            for (int64_t row = 0; row < num_rows; row += LANES) merge(row, part, int(std::min<int64_t>(LANES, num_rows - row)));
        part.is_empty = true;
    }

    // Writes a row that has had all its keys. A sink joins its softmax here, as a last key without a value.
    template <class T>
    void write(int64_t row, int64_t head_size, const float* sink, T* out) const {
        float kept = 1, divisor = powers[row];
        if (sink) {
            const float now = std::max(largest[row], *sink);
            kept = exponential(largest[row] - now);
            divisor = divisor * kept + exponential(*sink - now);
        }
        for (int64_t i = 0; i < head_size; i += PANEL) {
            const float* sums = values.data() + row * columns + i;
            Floats halves[] = {load(sums), load(sums + LANES)};
            in_order<Factor<T>>(halves[0], halves[1]);
            for (int64_t at = i; at < std::min(head_size, i + PANEL); at += LANES)
                store_some(out + at, halves[(at - i) / LANES] * splat(kept) / splat(divisor), int(std::min<int64_t>(LANES, head_size - at)));
        }
    }
};

// Attention of consecutive tokens of a sequence, with all query heads that share a KV head: row = token * group + head.
// Belongs to one thread, which keeps its memory.
template <class T>
class Rows {
    using F = Factor<T>;

   public:
    Sums segment;

    void begin(const Attention& call, int64_t first_row, int64_t num_tokens, int64_t kv_head, int64_t first_position) {
        group_ = call.group();
        head_size_ = call.head_size;
        depth_ = IN_TILES<F> ? whole_depth<F>(head_size_) : head_size_;
        soft_cap_ = call.soft_cap;
        scale_ = soft_cap_ ? call.scale / soft_cap_ : call.scale;
        window_ = {0, 1 - call.window, 1, std::numeric_limits<int64_t>::max()};
        sinks_ = {num_tokens * group_ * depth_, -UNBOUNDED, 1 - call.window, call.num_sinks};
        num_tokens_ = num_tokens;
        first_position_ = first_position;
        queries_.resize(num_tokens * group_ * depth_ * (call.num_sinks ? 2 : 1));
        scores_.resize(MAX_TILE_ROWS * PIECE);
        weights_.resize(MAX_TILE_ROWS * PIECE);
        segment.reshape(num_tokens * group_, call.num_panels() * PANEL);
        for (int64_t token = 0; token < num_tokens; ++token) {
            const T* query = (const T*)call.query + (first_row + token) * call.query_stride + kv_head * group_ * head_size_;
            F* own = queries_.data() + token * group_ * depth_;
            const int64_t angles = (first_row + token) * (head_size_ / 2);
            for (int64_t head = 0; head < group_; ++head, query += head_size_, own += depth_) {
                convert(query, own, head_size_);
                std::fill(own + head_size_, own + depth_, F{});
                if (!call.num_sinks) continue;
                turn_back(query, call.cosines + angles, call.sines + angles, own + sinks_.queries);
                std::fill(own + sinks_.queries + head_size_, own + sinks_.queries + depth_, F{});
            }
        }
    }

    // Goes through one piece of the window, or of the sinks, with the rows that see any of it.
    template <class Keys>
    void attend(Keys& piece, int64_t begin, Prefetcher& prefetcher) {
        attend(piece, begin, window_, prefetcher);
    }
    void attend_sinks(Piece<T>& piece, int64_t begin, Prefetcher& prefetcher) { attend(piece, begin, sinks_, prefetcher); }

   private:
    static constexpr int64_t UNBOUNDED = std::numeric_limits<int32_t>::max();
    static constexpr int MAX_TILE_ROWS = std::max(LANES, Piece<T>::MAX_TILE);  // `weigh` stores whole vectors of rows

    // Keys that rows see: the row at a position p those from p + begin to p + end - 1, below a limit. queries: where those for them are.
    struct Part {
        int64_t queries, begin, end, limit;
    };

    template <class Keys>
    void attend(Keys& piece, int64_t begin, const Part& part, Prefetcher& prefetcher) {
        if (segment.is_empty) segment.start();
        const int64_t first_token = std::max<int64_t>(0, begin + 1 - part.end - first_position_);
        const int64_t behind = begin + PIECE - part.begin - first_position_;  // tokens from here on see none of it
        const int64_t end = std::min(num_tokens_, behind) * group_;
        for (int64_t row = first_token * group_; row < end; row += Keys::MAX_TILE) {
            const int count = int(std::min<int64_t>(Keys::MAX_TILE, end - row));
            if constexpr (IN_TILES<F>)
                tile(count, piece, begin, row, part, prefetcher);
            else
                for_rows<Keys::MAX_TILE>(count, [&]<int ROWS>() { tile(std::integral_constant<int, ROWS>(), piece, begin, row, part, prefetcher); });
        }
    }

    // Rotates a head by the negative of angles.
    void turn_back(const T* head, const float* cosines, const float* sines, F* out) {
        const int64_t half = head_size_ / 2;
        for (int64_t i = 0; i < half; i += LANES) {
            const int count = int(std::min<int64_t>(LANES, half - i));
            const Floats first = load_some(head + i, count), second = load_some(head + half + i, count);
            const Floats cosine = load_some(cosines + i, count), sine = load_some(sines + i, count);
            store_some(out + i, first * cosine + second * sine, count);
            store_some(out + half + i, second * cosine - first * sine, count);
        }
    }

    // The number of rows is a constant where they are multiplied in registers.
    template <class NumRows, class Keys>
    void tile(NumRows num_rows, Keys& piece, int64_t begin, int64_t row, const Part& part, Prefetcher& prefetcher) {
        piece.multiply_keys(num_rows, queries_.data() + part.queries + row * depth_, depth_, scores_.data(), prefetcher);
        if (piece.key_scales()) scale(num_rows, piece.num_keys(), piece.key_scales());
        if (soft_cap_) cap(num_rows, piece.num_keys());
        if (is_cut(num_rows, row, begin, part, piece.num_keys()))
            for (int r = 0; r < num_rows; ++r) hide(scores_.data() + r * PIECE, part, position(row + r), begin, piece.num_keys());
        alignas(64) float kept[MAX_TILE_ROWS];
        if (piece.num_keys() == PIECE)
            weigh(num_rows, row, std::integral_constant<int, PIECE>(), piece.value_scales(), kept);
        else
            weigh(num_rows, row, int(piece.num_keys()), piece.value_scales(), kept);
        piece.add_values(num_rows, weights_.data(), kept, segment.columns, segment.values.data() + row * segment.columns, prefetcher);
    }

    int64_t position(int64_t row) const { return first_position_ + row / group_; }

    // Multiplies the scores of rows by the scales of their keys.
    void scale(int num_rows, int64_t num_keys, const float* scales) {
        for (int r = 0; r < num_rows; ++r)
            for (float *score = scores_.data() + r * PIECE, *end = score + num_keys; score < end; score += LANES)
                store(score, load(score) * load(scales + (score - end + num_keys)));
    }

    // Caps the scores of rows, and leaves them in units of the cap.
    void cap(int num_rows, int64_t num_keys) {
        for (int r = 0; r < num_rows; ++r)
            for (float *score = scores_.data() + r * PIECE, *end = score + num_keys; score < end; score += LANES)
                store(score, tanh(load(score) * splat(scale_)));
    }

    // Turns the scores of rows into weights, multiplied by the scales of the values, and writes to
    // `kept` the factor of each row's earlier sums. The number of keys is a constant for a full piece: its loops are then unrolled.
    template <class NumRows, class Count>
    void weigh(NumRows num_rows, int64_t row, Count num_keys, const float* scales, float* kept) {
        const float factor = soft_cap_ ? soft_cap_ : scale_;
        for (int first = 0; first < num_rows; first += LANES) {
            const int count = std::min<int>(LANES, num_rows - first);
            Floats tops[LANES], sums[LANES];
            for (int r = 0; r < count; ++r) {
                const float* scores = scores_.data() + (first + r) * PIECE;
                tops[r] = load(scores);
                for (int i = LANES; i < num_keys; i += LANES) tops[r] = max(tops[r], load(scores + i));
            }
            const Floats before = load_some(segment.largest.data() + row + first, count);
            alignas(64) float now[LANES];
            store(now, largest_each(tops, count) * splat(factor));
            for (int r = 0; r < count; ++r) {
                const float so_far = segment.largest[row + first + r];
                now[r] = now[r] > so_far + RESCALE_THRESHOLD ? now[r] : so_far;
            }
            for (int r = 0; r < count; ++r) {
                const float* scores = scores_.data() + (first + r) * PIECE;
                F* weights = weights_.data() + (first + r) * PIECE;
                sums[r] = scales ? weigh_row<true>(scores, now[r], factor, num_keys, scales, weights)
                                 : weigh_row<false>(scores, now[r], factor, num_keys, scales, weights);
            }
            store(kept + first, exponential(before - load(now)));
            for (int r = first; r < first + count; ++r) kept[r] = segment.largest[row + r] == NOTHING ? 1 : kept[r];  // zeros need no factor
            const Floats powers = fma(load_some(segment.powers.data() + row + first, count), load(kept + first), sum_each(sums, count));
            store_some(segment.powers.data() + row + first, powers, count);
            store_some(segment.largest.data() + row + first, load(now), count);
        }
    }

    // Writes the weights of a row, relative to the score `now`; returns their sums by lane.
    template <bool HAS_SCALES, class Count>
    static Floats weigh_row(const float* scores, float now, float factor, Count num_keys, const float* scales, F* weights) {
        Floats all = splat(0);
        const auto power = [&](int i) __attribute__((always_inline)) {
            Floats value;
            if constexpr (std::is_same_v<F, bf16>)
                value = power_of_two((load(scores + i) * splat(factor) - splat(now)) * splat(LOG2_E));  // 1 for a score that is `now`, however large
            else
                value = exponential(load(scores + i) * splat(factor) - splat(now));
            all = all + value;
            if constexpr (HAS_SCALES) value = value * load(scales + i);
            return value;
        };
        int i = 0;
        for (; i + PANEL <= num_keys; i += PANEL) {
            const Floats first = power(i);
            store_panel(weights + i, first, power(i + LANES));
        }
        if (i < num_keys) store(weights + i, power(i));
        return all;
    }

    // Tells whether a piece has keys that some of the rows do not see.
    bool is_cut(int num_rows, int64_t row, int64_t begin, const Part& part, int64_t num_keys) const {
        return std::min(position(row) + part.end, part.limit) < begin + num_keys || position(row + num_rows - 1) + part.begin > begin;
    }

    // Hides the keys that the row at a position does not see of a part.
    void hide(float* scores, const Part& part, int64_t position, int64_t begin, int64_t num_keys) const {
        const int64_t end = std::min(position + part.end, part.limit);
        for (int64_t key = std::max<int64_t>(0, end - begin); key < num_keys; ++key) scores[key] = NOTHING;
        for (int64_t key = 0; key < std::min(num_keys, position + part.begin - begin); ++key) scores[key] = NOTHING;
    }

    int64_t group_, head_size_, depth_, num_tokens_, first_position_;  // depth_: of queries, zeros behind the head
    Part window_, sinks_;
    float scale_, soft_cap_;
    std::vector<F, Aligned<F>> queries_, weights_;
    std::vector<float, Aligned<float>> scores_;
};

inline int64_t first_visible(const Attention& call, int64_t position) { return std::max<int64_t>(0, position - call.window + 1); }

// Merges the sinks that the last of some rows has behind its window into their sums, as each row sees them.
template <class T>
void take_sinks(const Attention& call, const int32_t* table, int64_t last_position, int64_t first_head, int64_t num_heads, Rows<T>* rows,
                Piece<T>& piece, Sums* totals) {
    const int64_t end = std::min(call.num_sinks, first_visible(call, last_position));
    if (!end) return;
    TokenCursor cursor(call, table, 0, 0, end, call.open_from(last_position));
    Tokens tokens;
    Prefetcher nothing;
    for (int64_t begin = 0; begin < end; begin += PIECE) {
        cursor.next(tokens);
        for (int64_t head = 0; head < num_heads; ++head) {
            piece.pack(call, tokens, end - begin, first_head + head, nothing);
            rows[head].attend_sinks(piece, begin, nothing);
        }
    }
    for (int64_t head = 0; head < num_heads; ++head) totals[head].take(rows[head].segment);
}

// The calling thread's object of a type.
template <class T>
T& own() {
    thread_local T object;
    return object;
}

// Part of a decoding sequence's work: its positions from begin to end - 1, with some KV heads.
struct Share {
    int64_t sequence, begin, end, first_head, num_heads;
    int64_t part;  // of all segments that are merged later, the place of this one; -1 for all of a sequence

    int64_t position(const Attention& call) const { return call.context_lens[sequence] - 1; }
    bool is_first(const Attention& call) const { return begin / SEGMENT == first_visible(call, position(call)) / SEGMENT; }

    TokenCursor cursor(const Attention& call) const {
        return TokenCursor(call, call.table(sequence), begin, first_visible(call, position(call)), end, call.open_from(position(call)));
    }

    // Brings the first piece nearer.
    void prefetch_first(const Attention& call, Tokens& tokens, Prefetcher& prefetcher) const {
        cursor(call).next(tokens);
        prefetcher.begin(call, tokens, first_head, num_heads);
    }
};

inline int64_t num_segments(const Attention& call, int64_t sequence) {
    const int64_t position = call.context_lens[sequence] - 1;
    return position < 0 ? 0 : position / SEGMENT + 1 - first_visible(call, position) / SEGMENT;
}

// Where the row of a query head goes.
template <class T>
T* out_of(const Attention& call, int64_t row, int64_t head) {
    return (T*)call.out + (row * call.num_heads + head) * call.head_size;
}

// Shares out sequences of one token: each whole, or by segments where it is much of the work; with all KV heads, for they lie
// beside one another, or with one, where threads would have too little to share. A sequence without tokens has no share.
std::vector<Share> share_out(const Attention& call, int64_t num_sequences) {
    std::vector<Share> shares;
    int64_t total = 0, num_parts = 0;
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence) total += num_segments(call, sequence);
    const int64_t heads_per_share = total < MIN_UNITS ? 1 : call.num_kv_heads;
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
        const int64_t count = num_segments(call, sequence), end = call.context_lens[sequence], visible = first_visible(call, end - 1);
        const bool is_whole = count <= 1 || count * MIN_UNITS <= total;
        const int64_t segments_per_share = is_whole ? count : 1;
        for (int64_t i = 0; i < count; i += segments_per_share) {
            const int64_t begin = (visible / SEGMENT + i) * SEGMENT, behind = begin + segments_per_share * SEGMENT;
            for (int64_t head = 0; head < call.num_kv_heads; head += heads_per_share)
                shares.push_back({sequence, std::max(begin, visible / PIECE * PIECE), std::min(end, behind), head, heads_per_share,
                                  is_whole ? -1 : num_parts + i});
        }
        if (!is_whole) num_parts += count;
    }
    return shares;
}

// Writes the query heads of a KV head, which a row has had all keys of.
template <class T>
void write_group(const Attention& call, const Sums& sums, int64_t row, int64_t kv_head) {
    for (int64_t i = 0, head = kv_head * call.group(); i < call.group(); ++i, ++head)
        sums.write(i, call.head_size, call.sink(head), out_of<T>(call, row, head));
}

// Attends with a piece of a share, in the way that suits its pages and the number of rows. Tiles want packed ones.
template <class T>
void attend_piece(const Attention& call, const Tokens& tokens, int64_t begin, int64_t end, int64_t kv_head, Rows<T>& rows, Prefetcher& prefetcher) {
#if defined(__AVX512BF16__)
    const auto unpacked = [&]<class K>() {
        Unpacked<K>& piece = own<Unpacked<K>>();
        piece.take(call, tokens, end - begin, kv_head);
        rows.attend(piece, begin, prefetcher);
    };
    if constexpr (std::is_same_v<T, bf16> && !IN_TILES<T>)
        if (call.pages.kept != INT4 && Unpacked<T>::takes(call)) {
            if (call.pages.kept == INT8) return unpacked.template operator()<int8_t>();
            if (call.pages.kept == FP8) return unpacked.template operator()<fp8>();
            return unpacked.template operator()<T>();
        }
#endif
    Piece<T>& piece = own<Piece<T>>();
    piece.pack(call, tokens, end - begin, kv_head, prefetcher);
    rows.attend(piece, begin, prefetcher);
}

// Attends with a share: a whole sequence goes to `out`, a segment to parts [segment][KV head]. next: the share after it, null for none.
template <class T>
void attend_share(const Attention& call, const Share& share, const Share* next_share, std::vector<Sums>& parts) {
    auto& rows = own<std::vector<Rows<T>>>();
    auto& piece = own<Piece<T>>();
    auto& prefetcher = own<Prefetcher>();
    auto& totals = own<std::vector<Sums>>();
    if (int64_t(rows.size()) < share.num_heads) rows.resize(share.num_heads);
    if (int64_t(totals.size()) < share.num_heads) totals.resize(share.num_heads);  // it serves all dtypes, rows are of one
    for (int64_t head = 0; head < share.num_heads; ++head) {
        rows[head].begin(call, share.sequence, 1, share.first_head + head, share.position(call));
        totals[head].reshape(call.group(), rows[head].segment.columns);
    }
    if (share.is_first(call))
        take_sinks(call, call.table(share.sequence), share.position(call), share.first_head, share.num_heads, rows.data(), piece, totals.data());
    Tokens both[2], *tokens = both, *next = both + 1;
    TokenCursor cursor = share.cursor(call);
    cursor.next(*tokens);
    for (int64_t begin = share.begin; begin < share.end; begin += PIECE) {
        if (begin + PIECE < share.end) {
            cursor.next(*next);
            prefetcher.begin(call, *next, share.first_head, share.num_heads);
        } else if (next_share) {
            next_share->prefetch_first(call, *next, prefetcher);
        }
        for (int64_t head = 0; head < share.num_heads; ++head)
            attend_piece(call, *tokens, begin, share.end, share.first_head + head, rows[head], prefetcher);
        std::swap(tokens, next);
        if ((begin + PIECE) % SEGMENT && begin + PIECE < share.end) continue;
        for (int64_t head = 0; head < share.num_heads; ++head) totals[head].take(rows[head].segment);
    }
    piece.release();
    for (int64_t head = 0; head < share.num_heads; ++head)
        if (share.part >= 0)
            parts[share.part * call.num_kv_heads + share.first_head + head] = totals[head];
        else
            write_group<T>(call, totals[head], share.sequence, share.first_head + head);
}

// Merges the segments of a sequence, in order, and writes its row: of the KV heads of its first share.
template <class T>
void merge_parts(const Attention& call, const Share& first, std::vector<Sums>& parts) {
    const int64_t count = num_segments(call, first.sequence);
    for (int64_t head = first.first_head; head < first.first_head + first.num_heads; ++head) {
        Sums& whole = parts[first.part * call.num_kv_heads + head];
        for (int64_t later = 1; later < count; ++later) whole.take(parts[(first.part + later) * call.num_kv_heads + head]);
        write_group<T>(call, whole, first.sequence, head);
    }
}

// One token a sequence.
template <class T>
void decode(const Attention& call, int64_t num_sequences) {
    const std::vector<Share> shares = share_out(call, num_sequences);
    const int64_t num_shares = shares.size();
    int64_t num_parts = 0;
    for (const Share& share : shares) num_parts = std::max(num_parts, share.part + 1);
    std::vector<Sums> parts(num_parts * call.num_kv_heads);  // [segment][KV head]
    parallel(num_shares, [&](int64_t i) { attend_share<T>(call, shares[i], i + 1 < num_shares ? &shares[i + 1] : nullptr, parts); });
    for (const Share& share : shares)
        if (share.part >= 0 && share.is_first(call)) merge_parts<T>(call, share, parts);
    for (int64_t sequence = 0; sequence < num_sequences; ++sequence)
        if (!call.context_lens[sequence]) std::fill_n(out_of<T>(call, sequence, 0), call.num_heads * call.head_size, T{});
}

// The last tokens of each sequence from first_sequence on. A unit is a few tokens with one KV head; it goes through all that they see.
template <class T>
void prefill(const Attention& call, int64_t first_sequence, int64_t num_sequences) {
    struct Unit {
        int64_t sequence, kv_head, first_token, num_tokens;
    };
    const int64_t group = call.group(), per_unit = std::max<int64_t>(1, MAX_UNIT_ROWS / group);
    const int32_t* starts = call.cu_query_lens;
    std::vector<Unit> units;
    for (int64_t sequence = num_sequences - 1; sequence >= first_sequence; --sequence)
        for (int64_t end = starts[sequence + 1], begin; end > starts[sequence]; end = begin) {
            begin = std::max<int64_t>(starts[sequence], end - per_unit);  // the last ones see most: they come first
            const int64_t to_position = call.context_lens[sequence] - starts[sequence + 1];
            if (call.pages.kept == INT4) begin = std::max(begin, call.open_from(end - 1 + to_position) - to_position);  // of one block
            for (int64_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) units.push_back({sequence, kv_head, begin, end - begin});
        }
    const auto run = [&](const auto& run, const Unit& unit) -> void {
        Rows<T>& rows = own<Rows<T>>();
        Piece<T>& piece = own<Piece<T>>();
        Prefetcher& prefetcher = own<Prefetcher>();
        Sums& total = own<Sums>();
        const int64_t position = call.context_lens[unit.sequence] - starts[unit.sequence + 1] + unit.first_token;
        const int64_t end = position + unit.num_tokens, num_rows = unit.num_tokens * group;
        rows.begin(call, unit.first_token, unit.num_tokens, unit.kv_head, position);
        total.reshape(num_rows, rows.segment.columns);
        take_sinks(call, call.table(unit.sequence), end - 1, unit.kv_head, 1, &rows, piece, &total);
        const int64_t begin = first_visible(call, position);
        const int64_t first = begin / PIECE * PIECE;
        TokenCursor cursor(call, call.table(unit.sequence), first, begin, end, call.open_from(end - 1));
        Tokens tokens, next;
        cursor.next(tokens);
        for (int64_t at = first; at < end; at += PIECE) {
            cursor.next(next);
            prefetcher.begin(call, next, unit.kv_head, 1);
            piece.pack(call, tokens, end - at, unit.kv_head, prefetcher);
            rows.attend(piece, at, prefetcher);
            tokens = next;
            if ((at + PIECE) % SEGMENT && at + PIECE < end) continue;
            total.take(rows.segment);
        }
        piece.release();
        const auto is_number = [](float value) { return std::isfinite(value); };
        if (unit.num_tokens > 1 && !std::all_of(total.values.begin(), total.values.end(), is_number)) {
            // A later token's infinity, times the weight 0: each token with what it sees, and nothing else.
            for (int64_t token = 0; token < unit.num_tokens; ++token)
                run(run, Unit{unit.sequence, unit.kv_head, unit.first_token + token, 1});
            return;
        }
        for (int64_t row = 0; row < num_rows; ++row)
            total.write(row, call.head_size, call.sink(unit.kv_head * group + row % group),
                        out_of<T>(call, unit.first_token + row / group, unit.kv_head * group + row % group));
    };
    parallel(int64_t(units.size()), [&](int64_t index) { run(run, units[index]); });
}

}  // namespace

// The first num_decodes sequences have one row each; the rows of the others end at cu_query_lens.
extern "C" void baton_attention(const Attention* arguments, int64_t num_sequences, int64_t num_decodes) {
    const Attention call = *arguments;  // a copy, which no store can change: its fields may stay in registers
    FOR_DTYPE(call.dtype, {
        decode<T>(call, num_decodes);
        prefill<T>(call, num_decodes, num_sequences);
    })
}

// What a caller's own struct must have.
extern "C" int64_t baton_attention_bytes() { return sizeof(Attention); }

RECORDABLE(baton_attention)
