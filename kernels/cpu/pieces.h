// Pieces of paged KV, packed for `multiply`: keys as columns over the head, values as columns over the keys.
#pragma once

#include <limits>
#include <type_traits>
#include <vector>

#include "dtypes.h"
#include "tiles.h"

constexpr int PIECE = 4 * PANEL;

// The arguments of attention over one layer. `Attention` in backend.py has the same fields in the same order.
struct Attention {
    Layer pages;
    int64_t dtype;
    const void* query;  // [rows, num_heads, head_size], rows query_stride elements apart
    int64_t query_stride;
    void* out;  // [rows, num_heads, head_size]
    const int32_t* tables;  // block tables, table_stride elements apart
    int64_t table_stride;
    const int32_t *context_lens, *cu_query_lens;  // rows of a sequence end at cu_query_lens [num_sequences + 1]
    int64_t num_heads, num_kv_heads, head_size;
    int64_t window;  // tokens that a row sees, itself included
    int64_t num_sinks;  // first tokens that it sees beside its window
    const float *cosines, *sines;  // [rows, head_size / 2], by which queries are turned back before they meet those; null without any
    const float* sinks;  // learned scores [num_heads], null for none
    float scale, soft_cap;  // soft_cap: 0 for none

    int64_t group() const { return num_heads / num_kv_heads; }
    const float* sink(int64_t head) const { return sinks ? sinks + head : nullptr; }
    const int32_t* table(int64_t sequence) const { return tables + sequence * table_stride; }
    int64_t num_panels() const { return (head_size + PANEL - 1) / PANEL; }
    int64_t token_bytes() const {  // of a head's key, or value; with INT4, of a key and its part of the scales
        return pages.kept == INT4 ? pages.plane_stride / pages.block_size : pages.row_bytes + (pages.scales ? sizeof(bf16) : 0);
    }
    // The first position whose block is read as it is open, of a row or of rows of one block.
    int64_t open_from(int64_t position) const {
        return pages.kept == INT4 ? position / pages.block_size * pages.block_size : std::numeric_limits<int64_t>::max();
    }
};

// Two rows of `count` values become pairs, 32 columns at a time, zeros behind the last: as `in_order` takes them.
inline void interleave(const bf16* first, const bf16* second, int64_t count, bf16* out, int64_t panel_stride) {
    for (int64_t begin = 0; begin < count; begin += PANEL, out += panel_stride) {
        const int columns = int(std::min<int64_t>(PANEL, count - begin));
#if defined(__AVX512BF16__)
        const __mmask32 mask = __mmask32((uint64_t(1) << columns) - 1);
        const __m512i a = _mm512_maskz_loadu_epi16(mask, first + begin), b = _mm512_maskz_loadu_epi16(mask, second + begin);
        _mm512_storeu_si512(out, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(out + PANEL, _mm512_unpackhi_epi16(a, b));
#else
        if (columns < PANEL) std::fill(out + 2 * columns, out + 2 * PANEL, bf16{});
        for (int i = 0; i < columns; ++i) out[2 * i] = first[begin + i], out[2 * i + 1] = second[begin + i];
#endif
    }
}

// Puts the sums over a panel of values in the order of its columns. Interleaved ones lie four of each half in turn.
template <class F>
inline void in_order(Floats& first, Floats& second) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<F, bf16>) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512 a = first.v, b = second.v;
        first.v = _mm512_permutex2var_ps(a, low, b);
        second.v = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
    }
#endif
}

// The tokens of a piece: where the first KV head of each has its key, null for one that is not seen, and the key's scale. The
// key of another head lies head_stride behind it, a value one plane behind its key, and so do their scales. With INT4 the
// scale is the value's, and the key has those of its block's channels: null for a key in an open block, which has other strides.
struct Tokens {
    const char *keys[PIECE], *scales[PIECE], *channels[PIECE];
};

// Goes through the tokens of a sequence piece by piece.
class TokenCursor {
   public:
    // Begins at a position; first_visible to end - 1 are seen, from open_from on in an open block.
    TokenCursor(const Attention& call, const int32_t* block_table, int64_t position, int64_t first_visible, int64_t end, int64_t open_from)
        : call_(call), block_(block_table + position / call.pages.block_size), offset_(position % call.pages.block_size),
          num_hidden_(first_visible - position), num_left_(end - position), num_closed_(open_from - position) {}

    void next(Tokens& tokens) {
        const Layer pages = call_.pages;  // a copy, as in baton_attention
        for (int64_t i = 0; i < PIECE; ++i) {
            const bool is_seen = num_left_-- > 0 && num_hidden_ <= 0, is_open = num_closed_-- <= 0;
            --num_hidden_;
            tokens.keys[i] = is_seen ? is_open ? open_key() : pages.kv + *block_ * pages.page_stride + offset_ * pages.row_bytes : nullptr;
            if (pages.scales && is_seen) tokens.scales[i] = pages.scales + *block_ * pages.page_stride + offset_ * sizeof(bf16);
            if (pages.kept == INT4 && is_seen)
                tokens.channels[i] = is_open ? nullptr : pages.kv + *block_ * pages.page_stride + pages.block_size * pages.row_bytes;
            if (++offset_ == pages.block_size) ++block_, offset_ = 0;
        }
    }

   private:
    const char* open_key() const {
        return call_.pages.open_block(*block_) + offset_ * (call_.pages.open_head_stride / call_.pages.block_size);
    }

    const Attention& call_;
    const int32_t* block_;
    int64_t offset_, num_hidden_, num_left_, num_closed_;
};

// Keys and values that come after those at work. They are brought nearer a few lines at a time and in the order in which
// they lie: a burst of lines would hold up the work.
class Prefetcher {
   public:
    // Begins with a piece: its tokens, with num_heads KV heads from first_head on. Scales lie behind the tokens of a block.
    void begin(const Attention& call, const Tokens& tokens, int64_t first_head, int64_t num_heads) {
        const int64_t tokens_per_run = std::min<int64_t>(PIECE, call.pages.block_size);
        run_bytes_ = tokens_per_run * call.token_bytes();
        runs_.clear();
        run_ = done_bytes_ = 0;
        for (int64_t token = 0; token < PIECE; token += tokens_per_run)
            for (int64_t plane = 0; plane < 2 && tokens.keys[token]; ++plane)
                for (int64_t head = first_head; head < first_head + num_heads; ++head)
                    runs_.push_back(tokens.keys[token] + plane * call.pages.plane_stride + head * call.pages.head_stride);
    }

    void bring(int64_t num_bytes) {
        while (num_bytes > 0 && run_ < int64_t(runs_.size())) {
            const int64_t end = std::min(run_bytes_, done_bytes_ + num_bytes);
            prefetch(runs_[run_] + done_bytes_, end - done_bytes_);
            num_bytes -= end - done_bytes_;
            if ((done_bytes_ = end) >= run_bytes_) ++run_, done_bytes_ = 0;
        }
    }

   private:
    std::vector<const char*> runs_;
    int64_t run_bytes_ = 0, run_ = 0, done_bytes_ = 0;
};

// Turns codes of a head, the first half of it in the low bits of `half` bytes and the second in the high ones, into factors.
// Multiplied by the scales of their channels, if there are any.
template <class F>
inline void widen_int4(const uint8_t* codes, int64_t half, const float* scales, F* out) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int count = int(std::min<int64_t>(LANES, half - i));
        int8_t low[LANES] = {}, high[LANES] = {};
        for (int j = 0; j < count; ++j) low[j] = int8_t((codes[i + j] & 15) - 8), high[j] = int8_t((codes[i + j] >> 4) - 8);
        const Floats first = load(low), second = load(high);
        store_some(out + i, scales ? first * load_some(scales + i, count) : first, count);
        store_some(out + half + i, scales ? second * load_some(scales + half + i, count) : second, count);
    }
}

// The scales of sixteen tokens of eight-bit codes, from the one at `first` on: of their keys and of their values, 0 for one that is not seen.
inline void read_scales(const Tokens& tokens, int64_t first, int64_t head_offset, int64_t plane_stride, float* of_keys, float* of_values) {
    const int64_t last = first + LANES - 1;
    const bool are_seen = tokens.keys[first] && tokens.keys[last];
    if (are_seen && tokens.scales[last] - tokens.scales[first] == (LANES - 1) * int64_t(sizeof(bf16))) {  // of one block
        const char* scales = tokens.scales[first] + head_offset;
        store(of_keys + first, load((const bf16*)scales));
        store(of_values + first, load((const bf16*)(scales + plane_stride)));
        return;
    }
    for (int64_t i = first; i <= last; ++i) {
        const char* scale = tokens.keys[i] ? tokens.scales[i] + head_offset : nullptr;
        of_keys[i] = scale ? to_float(*(const bf16*)scale) : 0;
        of_values[i] = scale ? to_float(*(const bf16*)(scale + plane_stride)) : 0;
    }
}

// Up to PIECE keys and their values, of one KV head. Belongs to one thread, which keeps its memory.
template <class T>
class Piece {
    using F = Factor<T>;
    static constexpr int DEPTH = Product<F>::DEPTH;
#if defined(__AVX512BF16__)
    static constexpr bool TURNS_CODES = std::is_same_v<F, bf16>;
#else
    static constexpr bool TURNS_CODES = false;
#endif

   public:
    static constexpr int MAX_TILE = IN_TILES<F> ? 4 * TILE_ROWS : MAX_ROWS;  // rows: products and softmax of one tile would wait for each other

    // Packs the first num_tokens of a piece, or all if there are fewer, and brings nearer as much of what comes next. Tokens that are not seen become
    // zeros, for even the weight 0 would not keep an infinity out of a sum. Tiles get whole blocks of tokens.
    void pack(const Attention& call, const Tokens& tokens, int64_t num_tokens, int64_t kv_head, Prefetcher& prefetcher) {
        reshape(call);
        if constexpr (IN_TILES<F>) num_tokens = whole_depth<F>(num_tokens);
        if (kept_ == INT8)
            pack_as<int8_t>(tokens, num_tokens, kv_head * call.pages.head_stride, prefetcher);
        else if (kept_ == FP8)
            pack_as<fp8>(tokens, num_tokens, kv_head * call.pages.head_stride, prefetcher);
        else if (kept_ == INT4)
            pack_int4(call, tokens, num_tokens, kv_head, prefetcher);
        else
            pack_as<T>(tokens, num_tokens, kv_head * call.pages.head_stride, prefetcher);
    }

    int64_t num_keys() const { return num_keys_; }  // a multiple of LANES
    const float* key_scales() const { return kept_ == INT8 || kept_ == FP8 ? key_scales_ : nullptr; }  // of num_keys() keys, 0 for one that is not seen
    const float* value_scales() const { return kept_ ? value_scales_ : nullptr; }

    // scores[row][key] = the products of queries, depth apart, with the keys.
    template <int ROWS>
    void multiply_keys(std::integral_constant<int, ROWS>, const F* queries, int64_t depth, float* scores, Prefetcher&) {
        for_panels<ROWS>((num_keys_ + PANEL - 1) / PANEL, [&]<int PANELS>(int64_t panel) {
            Floats sums[ROWS][2 * PANELS];
            for (auto& of_row : sums)
                for (Floats& sum : of_row) sum = splat(0);
            multiply<F, ROWS, PANELS>(queries, depth, DEPTH, keys_.data() + panel * key_panel_stride(), key_panel_stride(), key_steps(), sums);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < 2 * PANELS; ++v) store(scores + r * PIECE + panel * PANEL + v * LANES, sums[r][v]);
        });
    }

    // sums[row], columns apart, = kept[row] * sums[row] + the products of weights with the values.
    template <int ROWS>
    void add_values(std::integral_constant<int, ROWS>, const F* weights, const float* kept, int64_t columns, float* all, Prefetcher&) {
        for_panels<ROWS>(columns / PANEL, [&]<int PANELS>(int64_t panel) {
            Floats sums[ROWS][2 * PANELS];
            float* values = all + panel * PANEL;
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < 2 * PANELS; ++v) sums[r][v] = load(values + r * columns + v * LANES) * splat(kept[r]);
            multiply<F, ROWS, PANELS>(weights, PIECE, DEPTH, values_.data() + panel * value_panel_stride(), value_panel_stride(), num_keys_ / DEPTH, sums);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < 2 * PANELS; ++v) store(values + r * columns + v * LANES, sums[r][v]);
        });
    }

    // The same in tiles, which stay shaped until they are released.
    void multiply_keys(int num_rows, const F* queries, int64_t depth, float* scores, Prefetcher&) {
        tiles_.template add_panels<true>(queries, depth, BLOCK_DEPTH, num_rows, keys_.data(), key_panel_stride(), num_keys_ / PANEL, depth / BLOCK_DEPTH,
                                         scores, PIECE);
    }
    void add_values(int num_rows, const F* weights, const float* kept, int64_t columns, float* all, Prefetcher&) {
        for (int r = 0; r < num_rows; ++r)
            if (kept[r] != 1)
                for (float *value = all + r * columns, *end = value + columns; value < end; value += LANES) store(value, load(value) * splat(kept[r]));
        tiles_.template add_panels<false>(weights, PIECE, BLOCK_DEPTH, num_rows, values_.data(), value_panel_stride(), columns / PANEL,
                                          num_keys_ / BLOCK_DEPTH, all, columns);
    }
    void release() {
        if constexpr (IN_TILES<F>) tiles_.release();
    }

   private:
    int64_t key_steps() const { return head_size_ / DEPTH; }
    int64_t key_panel_stride() const { return whole_depth<F>(head_size_) * PANEL; }
    static constexpr int64_t value_panel_stride() { return PIECE * PANEL; }

    void reshape(const Attention& call) {
        plane_stride_ = call.pages.plane_stride;
        kept_ = call.pages.kept;
        if (call.head_size == head_size_) return;
        head_size_ = call.head_size;
        columns_ = call.num_panels() * PANEL;
        keys_.assign(PIECE / PANEL * key_panel_stride(), F{});
        values_.assign(PIECE * columns_, F{});
        rows_.assign((LANES + 1) * columns_, F{});
        channels_.assign(columns_, 0);
    }

    // As above, from pages of K.
    template <class K>
    void pack_as(const Tokens& tokens, int64_t num_tokens, int64_t head_offset, Prefetcher& prefetcher) {
        for (num_keys_ = 0; num_keys_ < std::min<int64_t>(PIECE, num_tokens); num_keys_ += LANES) {
            add<K>(tokens.keys + num_keys_, head_offset, prefetcher);
            if constexpr (!std::is_same_v<K, T>) read_scales(tokens, num_keys_, head_offset, plane_stride_, key_scales_, value_scales_);
        }
    }

    // From pages of INT4: keys with their scales, values without, whose scales multiply their weights.
    void pack_int4(const Attention& call, const Tokens& tokens, int64_t num_tokens, int64_t kv_head, Prefetcher& prefetcher) {
        const int64_t offset = kv_head * call.pages.head_stride, token_bytes = call.token_bytes();
        const F* rows[LANES];
        for (num_keys_ = 0; num_keys_ < std::min<int64_t>(PIECE, num_tokens); num_keys_ += LANES) {
            const char *const *keys = tokens.keys + num_keys_, *const *channels = tokens.channels + num_keys_;
            const bool are_of_one_block = keys[0] && keys[LANES - 1] && channels[0] && channels[0] == channels[LANES - 1];
            if (TURNS_CODES && are_of_one_block && head_size_ % (2 * PANEL) == 0) {
                add_codes((const uint8_t*)keys[0] + offset, (const bf16*)(channels[0] + offset), token_bytes, prefetcher);
            } else {
                for (int64_t i = 0; i < LANES; ++i) rows[i] = read_int4(call, keys[i], channels[i], kv_head, 0, i);
                turn_keys(rows);
                prefetcher.bring(LANES * token_bytes);
                for (int64_t i = 0; i < LANES; ++i) rows[i] = read_int4(call, keys[i], channels[i], kv_head, 1, i);
                put_values(rows, token_bytes, prefetcher);
            }
            for (int64_t i = 0; i < LANES; ++i)
                value_scales_[num_keys_ + i] = !keys[i] ? 0 : !channels[i] ? 1 : to_float(*(const bf16*)(tokens.scales[num_keys_ + i] + offset));
        }
    }

    // A token's head of INT4 as factors: of the compute dtype in an open block, else its codes, for keys with their scales.
    const F* read_int4(const Attention& call, const char* key, const char* channels, int64_t kv_head, int64_t plane, int64_t row) {
        if (!key || !channels) return read<T>(key, kv_head * call.pages.open_head_stride + plane * call.pages.open_plane_stride, row);
        const int64_t offset = kv_head * call.pages.head_stride;
        if (!plane) convert((const bf16*)(channels + offset), channels_.data(), head_size_);
        F* out = rows_.data() + row * columns_;
        widen_int4((const uint8_t*)key + offset + plane * plane_stride_, head_size_ / 2, plane ? nullptr : channels_.data(), out);
        return out;
    }

    // Packs sixteen more tokens. Not inlined: with the readings of all codes in one function, that of int8 takes 1.3 times as long.
    template <class K>
    __attribute__((noinline)) void add(const char* const* tokens, int64_t head_offset, Prefetcher& prefetcher) {
        const F* rows[LANES];
        if (TURNS_CODES && std::is_same_v<K, int8_t> && head_size_ % (2 * PANEL) == 0) {
            turn_int8(tokens, head_offset);
        } else {
            for (int64_t i = 0; i < LANES; ++i) rows[i] = read<K>(tokens[i], head_offset, i);
            turn_keys(rows);
        }
        prefetcher.bring(LANES * head_size_ * sizeof(K));
        for (int64_t i = 0; i < LANES; ++i) rows[i] = read<K>(tokens[i], head_offset + plane_stride_, i);
        put_values(rows, head_size_ * sizeof(K), prefetcher);
    }

    void turn_keys(const F* const* rows) {
        F* columns = keys_.data() + num_keys_ / PANEL * key_panel_stride();
        transpose((const uint32_t* const*)rows, key_steps(), (uint32_t*)columns + num_keys_ % PANEL, PANEL);
    }

    // Turns keys of INT8 as codes, four at a time, which is half of the exchanges. A code as a float has the lower half of its bits 0.
    void turn_int8(const char* const* tokens, int64_t head_offset) {
#if defined(__AVX512BF16__)
        turned_.resize(head_size_ / 4 * LANES);
        unseen_.assign(head_size_ / 4, 0);
        uint32_t* columns = (uint32_t*)(keys_.data() + num_keys_ / PANEL * key_panel_stride()) + num_keys_ % PANEL;
        const uint32_t* rows[LANES];
        for (int64_t i = 0; i < LANES; ++i) rows[i] = tokens[i] ? (const uint32_t*)(tokens[i] + head_offset) : unseen_.data();
        transpose(rows, head_size_ / 4, turned_.data(), LANES);
        for (int64_t four = 0; four < head_size_ / 4; ++four) {
            const __m512i bytes = _mm512_loadu_si512(turned_.data() + four * LANES);
            const __m512i codes[] = {_mm512_slli_epi32(bytes, 24), _mm512_slli_epi32(bytes, 16), _mm512_slli_epi32(bytes, 8), bytes};
            for (int pair = 0; pair < 2; ++pair) {
                const __m512 first = _mm512_cvtepi32_ps(_mm512_srai_epi32(codes[2 * pair], 24));
                const __m512 second = _mm512_cvtepi32_ps(_mm512_srai_epi32(codes[2 * pair + 1], 24));
                const __m512i low = _mm512_srli_epi32((__m512i)first, 16);
                _mm512_storeu_si512(columns + (2 * four + pair) * PANEL, _mm512_mask_blend_epi16(0xaaaaaaaa, low, (__m512i)second));
            }
        }
#endif
    }

    void put_values(const F* const* rows, int64_t token_bytes, Prefetcher& prefetcher) {
        for (int64_t i = 0; i < LANES; i += DEPTH) {
            pack_values(rows + i, values_.data() + (num_keys_ + i) * PANEL);
            prefetcher.bring(DEPTH * token_bytes);
        }
    }

    // Packs sixteen more tokens of one block of INT4 with a quarter of the exchanges: keys are turned as codes, and each is looked
    // up among the sixteen numbers that its channel has; so are values, among -8 to 7.
    void add_codes(const uint8_t* codes, const bf16* scales, int64_t token_bytes, Prefetcher& prefetcher) {
#if defined(__AVX512BF16__)
        const int64_t half = head_size_ / 2;
        convert(scales, channels_.data(), head_size_);
        const __m512 all = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        uint32_t* columns = (uint32_t*)(keys_.data() + num_keys_ / PANEL * key_panel_stride()) + num_keys_ % PANEL;
        turned_.resize(half / 4 * LANES);
        const uint32_t* rows[LANES];
        for (int64_t i = 0; i < LANES; ++i) rows[i] = (const uint32_t*)(codes + i * half);
        transpose(rows, half / 4, turned_.data(), LANES);
        for (int64_t four = 0; four < half; four += 4) {
            const __m512i bytes = _mm512_loadu_si512(turned_.data() + four / 4 * LANES);
            for (int pair = 0; pair < 4; ++pair) {  // of the first half, or of the second, whose codes lie four bits higher
                const int64_t channel = four + pair % 2 * 2 + pair / 2 * half;
                const __m512i two = _mm512_and_si512(_mm512_srli_epi32(bytes, pair % 2 * 16 + pair / 2 * 4), _mm512_set1_epi32(0x0f0f));
                const __m512i at = _mm512_or_si512(_mm512_or_si512(two, _mm512_slli_epi32(two, 8)), _mm512_set1_epi32(0x00100000));
                const __m512 first = _mm512_mul_ps(all, _mm512_set1_ps(channels_[channel])), second = _mm512_mul_ps(all, _mm512_set1_ps(channels_[channel + 1]));
                _mm512_storeu_si512(columns + channel / 2 * PANEL, _mm512_permutexvar_epi16(at, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
            }
        }
        prefetcher.bring(LANES * token_bytes);
        codes += plane_stride_;
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(all, all), low = _mm512_set1_epi16(15);
        for (int64_t i = 0; i < LANES; i += DEPTH, codes += DEPTH * half) {
            for (int64_t at = 0; at < half; at += PANEL) {
                const __m512i first = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(codes + at)));
                const __m512i second = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(codes + half + at)));
                const __m512i pairs[] = {_mm512_unpacklo_epi16(first, second), _mm512_unpackhi_epi16(first, second)};  // as in `interleave`
                F* out = values_.data() + (num_keys_ + i) * PANEL + at / PANEL * value_panel_stride();
                for (int j = 0; j < 2; ++j) {
                    _mm512_storeu_si512(out + j * PANEL, _mm512_permutexvar_epi16(_mm512_and_si512(pairs[j], low), table));
                    _mm512_storeu_si512(out + half / PANEL * value_panel_stride() + j * PANEL, _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs[j], 4), table));
                }
            }
            prefetcher.bring(DEPTH * token_bytes);
        }
#endif
    }

    void pack_values(const F* const* rows, bf16* out) { interleave(rows[0], rows[1], head_size_, out, value_panel_stride()); }

    void pack_values(const F* const* rows, float* out) {
        for (int64_t begin = 0; begin < head_size_; begin += PANEL, out += value_panel_stride())
            std::memcpy(out, rows[0] + begin, std::min<int64_t>(PANEL, head_size_ - begin) * sizeof(float));
    }

    // A token's head as factors: where it lies if it has their dtype, else widened, scales left out, into one of our rows; zeros for no token.
    template <class K>
    const F* read(const char* token, int64_t offset, int64_t row) {
        if (!token) return rows_.data() + LANES * columns_;
        if constexpr (std::is_same_v<K, F>)
            return (const F*)(token + offset);
        else {
            convert((const K*)(token + offset), rows_.data() + row * columns_, head_size_);
            return rows_.data() + row * columns_;
        }
    }

    int64_t head_size_ = 0, columns_ = 0, plane_stride_ = 0, num_keys_ = 0;
    Kept kept_ = PLAIN;
    Tiles<F> tiles_;
    float key_scales_[PIECE], value_scales_[PIECE];
    std::vector<F, Aligned<F>> keys_, values_, rows_;
    std::vector<float, Aligned<float>> channels_;
    std::vector<uint32_t, Aligned<uint32_t>> turned_, unseen_;
};

#if defined(__AVX512BF16__)
// Up to PIECE keys and their values, of one KV head, as K, for few rows: turned and widened in registers while they are multiplied, in the order
// of `Piece`. Packed ones would be written and read again for the same work. Codes are turned as they are, four dimensions in a word.
template <class K>
class Unpacked {
   public:
    static constexpr int MAX_TILE = 4;

    Unpacked() {
        for (int i = 0; HAS_SCALES && i < 128; ++i) {
            const uint8_t byte = uint8_t(i);
            K code;
            std::memcpy(&code, &byte, 1);
            const uint32_t bits = float_to_bits(to_float(code));
            low_bytes_[i] = uint8_t(bits >> 16), high_bytes_[i] = uint8_t(bits >> 24);
        }
    }

    static bool takes(const Attention& call) { return call.group() <= MAX_TILE && call.head_size % (2 * PANEL) == 0; }

    // Takes the first num_tokens of a piece, or all if there are fewer. Sixteen that are not all seen, or not of one block, are copied, zeros
    // for those that are not seen.
    void take(const Attention& call, const Tokens& tokens, int64_t num_tokens, int64_t kv_head) {
        const int64_t offset = kv_head * call.pages.head_stride, plane_stride = call.pages.plane_stride;
        head_size_ = call.head_size;
        for (num_keys_ = 0; num_keys_ < std::min<int64_t>(PIECE, num_tokens); num_keys_ += LANES) {
            const char* const* first = tokens.keys + num_keys_;
            Rows& keys = keys_[num_keys_ / LANES];
            Rows& values = values_[num_keys_ / LANES];
            keys.first = (const K*)(*first + offset);
            values.first = (const K*)(*first + offset + plane_stride);
            if (call.pages.block_size % LANES || !first[0] || !first[LANES - 1]) {
                keys.copy(first, offset, head_size_);
                values.copy(first, offset + plane_stride, head_size_);
            }
            if constexpr (HAS_SCALES) read_scales(tokens, num_keys_, offset, plane_stride, key_scales_, value_scales_);
        }
    }

    int64_t num_keys() const { return num_keys_; }
    const float* key_scales() const { return HAS_SCALES ? key_scales_ : nullptr; }
    const float* value_scales() const { return HAS_SCALES ? value_scales_ : nullptr; }

    // As those of `Piece`; what comes next is brought nearer meanwhile.
    template <int ROWS>
    void multiply_keys(std::integral_constant<int, ROWS>, const bf16* queries, int64_t depth, float* scores, Prefetcher& prefetcher) {
        int64_t key = 0;
        for (; key + 2 * LANES <= num_keys_; key += 2 * LANES) multiply_sets<ROWS, 2>(key, queries, depth, scores, prefetcher);
        if (key < num_keys_) multiply_sets<ROWS, 1>(key, queries, depth, scores, prefetcher);
    }

    template <int ROWS>
    void add_values(std::integral_constant<int, ROWS>, const bf16* weights, const float* kept, int64_t columns, float* all, Prefetcher& prefetcher) {
        for (int64_t column = 0; column < columns; column += 2 * PANEL) {
            __m512 sums[ROWS][4];
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < 4; ++v) sums[r][v] = (load(all + r * columns + column + v * LANES) * splat(kept[r])).v;
            for (int64_t key = 0; key < num_keys_; key += 2) {
                prefetcher.bring(4 * PANEL * sizeof(K));
                __m512i first[2], second[2];
                const K* row = values_[key / LANES].first + key % LANES * head_size_ + column;
                widen(row, first);
                widen(row + head_size_, second);
                __m512i pairs[4];
                for (int panel = 0; panel < 2; ++panel) {  // as in `interleave`
                    pairs[2 * panel] = _mm512_unpacklo_epi16(first[panel], second[panel]);
                    pairs[2 * panel + 1] = _mm512_unpackhi_epi16(first[panel], second[panel]);
                }
                for (int r = 0; r < ROWS; ++r) {
                    const __m512bh weight = Product<bf16>::row(weights + r * PIECE + key);
                    for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weight, (__m512bh)pairs[v]);
                }
            }
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < 4; ++v) _mm512_storeu_ps(all + r * columns + column + v * LANES, sums[r][v]);
        }
    }

   private:
    static constexpr bool HAS_SCALES = !std::is_same_v<K, bf16>;

    // Sixteen rows, one behind the other.
    struct Rows {
        const K* first;
        std::vector<K> copied;

        void copy(const char* const* tokens, int64_t offset, int64_t size) {
            copied.assign(LANES * size, K{});
            for (int64_t i = 0; i < LANES; ++i)
                if (tokens[i]) std::memcpy(copied.data() + i * size, tokens[i] + offset, size * sizeof(K));
            first = copied.data();
        }
    };

    // The bytes of 64 codes as bfloat16, which is exact. Looked up by the magnitude, which has seven bits; -128 is never written.
    void look_up(__m512i codes, __m512i& low, __m512i& high) const {
        const __m512i magnitudes = std::is_same_v<K, int8_t> ? _mm512_abs_epi8(codes) : codes;
        const auto found = [&](const uint8_t* table) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), magnitudes, _mm512_load_si512(table + 64));
        };
        low = found(low_bytes_);
        high = _mm512_ternarylogic_epi32(found(high_bytes_), codes, _mm512_set1_epi8(char(0x80)), 0xf8);
    }

    // Two vectors of 32 numbers.
    void widen(const bf16* p, __m512i (&out)[2]) const {
        for (int i = 0; i < 2; ++i) out[i] = _mm512_loadu_si512(p + i * PANEL);
    }
    template <class Code>
    void widen(const Code* p, __m512i (&out)[2]) const {
        const __m512i in_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // for each half of a lane to hold what follows in its vector
        __m512i low, high;
        look_up(_mm512_permutexvar_epi64(in_order, _mm512_loadu_si512(p)), low, high);
        out[0] = _mm512_unpacklo_epi8(low, high);
        out[1] = _mm512_unpackhi_epi8(low, high);
    }

    // Two sets of sixteen keys take turns: the sums of one would wait for themselves.
    template <int ROWS, int SETS>
    void multiply_sets(int64_t key, const bf16* queries, int64_t depth, float* scores, Prefetcher& prefetcher) const {
        __m512 sums[SETS][ROWS];
        for (auto& of_set : sums)
            for (__m512& sum : of_set) sum = _mm512_setzero_ps();
        constexpr int NUM_IN_WORD = sizeof(uint32_t) / sizeof(K);
        const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i first = _mm512_add_epi32(_mm512_set1_epi32(0x41014000), _mm512_mullo_epi32(_mm512_set1_epi32(0x04040404), numbers));
        const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(2));
        for (int64_t column = 0; column < head_size_; column += LANES * NUM_IN_WORD) {
            __m512i words[SETS][LANES];
            for (int set = 0; set < SETS; ++set) {
                prefetcher.bring(LANES * LANES * sizeof(uint32_t));
                for (int i = 0; i < LANES; ++i) words[set][i] = _mm512_loadu_si512(keys_[key / LANES + set].first + i * head_size_ + column);
                turn(words[set]);
            }
            const bf16* at = queries + column;
            for (int word = 0; word < LANES; ++word) {
                const auto add = [&](__m512i (&pairs)[SETS]) __attribute__((always_inline)) {
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        const __m512bh query = Product<bf16>::row(at + r * depth);
#pragma GCC unroll 4
                        for (int set = 0; set < SETS; ++set) sums[set][r] = _mm512_dpbf16_ps(sums[set][r], query, (__m512bh)pairs[set]);
                    }
                    at += 2;
                };
                __m512i pairs[SETS], next[SETS];
#pragma GCC unroll 4
                for (int set = 0; set < SETS; ++set)
                    if constexpr (HAS_SCALES) {  // turned as codes: four of them are two pairs
                        __m512i low, high;
                        look_up(words[set][word], low, high);
                        pairs[set] = _mm512_permutex2var_epi8(low, first, high);
                        next[set] = _mm512_permutex2var_epi8(low, second, high);
                    } else {
                        pairs[set] = words[set][word];
                    }
                add(pairs);
                if constexpr (HAS_SCALES) add(next);
            }
        }
        for (int set = 0; set < SETS; ++set)
            for (int r = 0; r < ROWS; ++r) store(scores + r * PIECE + key + set * LANES, Floats{sums[set][r]});
    }

    int64_t head_size_ = 0, num_keys_ = 0;
    alignas(64) uint8_t low_bytes_[128], high_bytes_[128];
    Rows keys_[PIECE / LANES], values_[PIECE / LANES];
    float key_scales_[PIECE], value_scales_[PIECE];
};
#endif
