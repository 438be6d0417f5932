// What is done to each row on its own: norms, rotation with the write of K and V, the gate of a feed-forward layer.
// Each value is rounded to T where transformers rounds it, but for a rotation, which is rounded once.

#include <algorithm>
#include <limits>

#include "dtypes.h"
#include "threads.h"

namespace {

// out = residual + weight * row / sqrt(mean(row^2) + eps); `out` may be `row` or `residual`, which may be null. With a wide
// weight (W is float, T is not) the product is rounded once. Source: arXiv 1910.07467.
template <class T, class W>
void rms_norm(const T* row, const W* weight, float eps, int64_t columns, const T* residual, T* out) {
    Floats squares = splat(0);
    for_columns(columns, [&](int64_t column, int count) {
        const Floats value = load_some(row + column, count);
        squares = fma(value, value, squares);
    });
    const Floats scale = splat(1.0f / std::sqrt(sum(squares) / float(columns) + eps));
    for_columns(columns, [&](int64_t column, int count) {
        const Floats normal = rounded<W>(load_some(row + column, count) * scale);
        const Floats scaled = load_some(weight + column, count) * normal;
        store_some(out + column, residual ? load_some(residual + column, count) + rounded<T>(scaled) : scaled, count);
    });
}

// Rotates a head in place: element i with element i + half, by the angle of frequency i. Source: arXiv 2104.09864.
template <class T>
void rotate(T* head, const float* cosines, const float* sines, int64_t half) {
    for_columns(half, [&](int64_t i, int count) {
        const Floats first = load_some(head + i, count), second = load_some(head + half + i, count);
        const Floats cosine = load_some(cosines + i, count), sine = load_some(sines + i, count);
        store_some(head + i, first * cosine - second * sine, count);
        store_some(head + half + i, second * cosine + first * sine, count);
    });
}

// As kernels/backend.py numbers them.
enum Activation { SILU, GELU_TANH, CLAMPED_SWISH };

// activation(gate) * up. Each activation is gate * sigmoid(of): of the gate itself; of GELU's approximation by tanh (arXiv 1606.08415),
// 2 sqrt(2 / pi) (gate + 0.044715 gate^3); or of 1.702 gate, where gates end at 7, ups at 7 either way, and 1 is added to these.
template <class T, Activation ACTIVATION>
void gate(const T* gates, const T* ups, int64_t columns, T* out) {
    for_columns(columns, [&](int64_t column, int count) {
        Floats value = load_some(gates + column, count), up = load_some(ups + column, count);
        if constexpr (ACTIVATION == CLAMPED_SWISH) {
            const auto at_most_7 = [](Floats x) { return splat(0) - max(splat(-7), splat(0) - x); };  // max takes the second operand for NaN
            value = at_most_7(value);
            up = rounded<T>(max(splat(-7), at_most_7(up)) + splat(1));
        }
        Floats of = value;
        if constexpr (ACTIVATION == GELU_TANH) of = splat(1.5957691216f) * fma(splat(0.044715f) * value * value, value, value);
        if constexpr (ACTIVATION == CLAMPED_SWISH) of = splat(1.702f) * value;
        const Floats power = exponential(splat(0) - max(splat(-88), of));
        store_some(out + column, rounded<T>(value / (splat(1) + power)) * up, count);
    });
}

struct Heads {
    int64_t num_queries, num_kv, size;
};

// Rounds a head to codes, the largest of them `most`, and returns what they are to be multiplied by: NaN for a head with
// infinity or NaN.
template <class T, class K>
bf16 quantize(const T* head, int64_t size, float most, K* codes) {
    Floats largest_of = splat(0), zeros = splat(0);
    for_columns(size, [&](int64_t i, int count) {
        const Floats value = load_some(head + i, count);
        largest_of = max(largest_of, max(value, splat(0) - value));
        zeros = fma(value, splat(0), zeros);
    });
    bf16 scale;
    from_float(largest(largest_of) * (1 / most) + sum(zeros), &scale);
    const float divisor = to_float(scale) > 0 ? to_float(scale) : 1;
    for_columns(size, [&](int64_t i, int count) {
        float values[LANES];
        store(values, load_some(head + i, count) / splat(divisor));
        for (int j = 0; j < count; ++j) from_float(std::max(-most, std::min(most, values[j])), codes + i + j);
    });
    return scale;
}

// The extremes of some numbers, lane by lane, and what makes their scale NaN where one is infinity or NaN.
struct Extremes {
    Floats most = splat(-std::numeric_limits<float>::infinity()), most_negated = most, zeros = splat(0);

    void add(Floats value) {
        most = max(most, value);
        most_negated = max(most_negated, splat(0) - value);
        zeros = fma(value, splat(0), zeros);
    }
};

// The scale of int4 codes, of which the number of the largest magnitude becomes -8.
inline bf16 int4_scale(float most, float most_negated, float zero) {
    bf16 scale;
    from_float((most > most_negated ? most : 0 - most_negated) * -0.125f + zero, &scale);
    return scale;
}

inline float divisor_of(bf16 scale) { return to_float(scale) != 0 ? to_float(scale) : 1; }

// Divides a row and packs its codes, the first half in the low bits and the second in the high ones. divisors(i, count): of
// the numbers from the i-th on.
template <class T, class Divisors>
void pack_int4(const T* row, int64_t size, const Divisors& divisors, uint8_t* out) {
    const int64_t half = size / 2;
    const auto divide = [&](int64_t i, int count, float* codes) {  // max takes the second operand for NaN
        const Floats at_least = max(load_some(row + i, count) / divisors(i, count), splat(-8));
        store(codes, splat(8) + round(splat(0) - max(splat(0) - at_least, splat(-7))));
    };
    for_columns(half, [&](int64_t i, int count) {
        float low[LANES], high[LANES];
        divide(i, count, low);
        divide(half + i, count, high);
        for (int j = 0; j < count; ++j) out[i + j] = uint8_t(int(low[j]) | int(high[j]) << 4);
    });
}

// Quantizes the keys of a full block, channel by channel, and its values, token by token, both [block_size, size].
template <class T>
void close_head(const T* keys, const T* values, int64_t size, const Layer& pages, char* here, bf16* value_scales) {
    bf16* key_scales = (bf16*)(here + pages.block_size * pages.row_bytes);
    for_columns(size, [&](int64_t channel, int count) {
        Extremes found;
        for (int64_t token = 0; token < pages.block_size; ++token) found.add(load_some(keys + token * size + channel, count));
        float most[LANES], most_negated[LANES], zeros[LANES];
        store(most, found.most), store(most_negated, found.most_negated), store(zeros, found.zeros);
        for (int i = 0; i < count; ++i) key_scales[channel + i] = int4_scale(most[i], most_negated[i], zeros[i]);
    });
    const auto of_channels = [&](int64_t channel, int count) {
        float divisors[LANES] = {};
        for (int i = 0; i < count; ++i) divisors[i] = divisor_of(key_scales[channel + i]);
        return load(divisors);
    };
    for (int64_t token = 0; token < pages.block_size; ++token) {
        const T* value = values + token * size;
        Extremes found;
        for_columns(size, [&](int64_t i, int count) { found.add(load_some(value + i, count)); });
        value_scales[token] = int4_scale(largest(found.most), largest(found.most_negated), sum(found.zeros));
        const Floats divisor = splat(divisor_of(value_scales[token]));
        pack_int4(keys + token * size, size, of_channels, (uint8_t*)here + token * pages.row_bytes);
        pack_int4(value, size, [&](int64_t, int) { return divisor; }, (uint8_t*)here + pages.plane_stride + token * pages.row_bytes);
    }
}

// Quantizes the open block whose last slot this is into its page.
template <class T>
void close_block(const Heads& heads, const Layer& pages, int64_t slot) {
    const char* from = pages.open_block(slot / pages.block_size);
    const int64_t page = slot / pages.block_size * pages.page_stride;
    for (int64_t head = 0; head < heads.num_kv; ++head) {
        const char* keys = from + head * pages.open_head_stride;
        const int64_t here = page + head * pages.head_stride;
        close_head((const T*)keys, (const T*)(keys + pages.open_plane_stride), heads.size, pages, pages.kv + here, (bf16*)(pages.scales + here));
    }
}

// A token's row of queries, keys and values: queries are rotated in place, keys and values go to the token's slot.
template <class T>
void rotate_and_write(T* row, const void* query_norm, const void* key_norm, bool is_wide, float eps, const float* cosines,
                      const float* sines, Heads heads, const Layer& pages, int64_t slot) {
    for (int64_t head = 0; head < heads.num_queries + heads.num_kv; ++head) {
        T* here = row + head * heads.size;
        const void* norm = head < heads.num_queries ? query_norm : key_norm;
        if (norm && is_wide)
            rms_norm<T, float>(here, (const float*)norm, eps, heads.size, nullptr, here);
        else if (norm)
            rms_norm<T, T>(here, (const T*)norm, eps, heads.size, nullptr, here);
        rotate(here, cosines, sines, heads.size / 2);
    }
    if (slot < 0) return;
    const int64_t page = slot / pages.block_size * pages.page_stride, offset = slot % pages.block_size;
    char* const open_block = pages.kept == INT4 ? pages.open_block(slot / pages.block_size) : nullptr;
    const T* keys = row + heads.num_queries * heads.size;
    for (int64_t head = 0; head < heads.num_kv; ++head)
        for (int64_t plane = 0; plane < 2; ++plane) {
            const int64_t block = page + plane * pages.plane_stride + head * pages.head_stride;
            const T* from = keys + (plane * heads.num_kv + head) * heads.size;
            char* to = pages.kv + block + offset * pages.row_bytes;
            bf16* scale = (bf16*)(pages.scales + block) + offset;
            if (pages.kept == INT8)
                *scale = quantize(from, heads.size, 127, (int8_t*)to);
            else if (pages.kept == FP8)
                *scale = quantize(from, heads.size, 448, (fp8*)to);
            else if (pages.kept == INT4)
                std::memcpy(open_block + plane * pages.open_plane_stride + head * pages.open_head_stride + offset * heads.size * sizeof(T), from, heads.size * sizeof(T));
            else
                std::memcpy(to, from, heads.size * sizeof(T));
        }
}

}  // namespace

// input, out [rows, columns], their rows `stride` and `out_stride` apart; weight [columns], of float32 if it is wide;
// residual [rows, columns] or null.
extern "C" void baton_rms_norm(int dtype, const void* input, int64_t stride, const void* weight, int is_wide, float eps,
                               const void* residual, int64_t num_rows, int64_t columns, void* out, int64_t out_stride) {
    FOR_DTYPE(dtype, for_each_row(num_rows, [&](int64_t row) {
                  const T* from = (const T*)input + row * stride;
                  const T* added = residual ? (const T*)residual + row * columns : nullptr;
                  T* to = (T*)out + row * out_stride;
                  if (is_wide)
                      rms_norm<T, float>(from, (const float*)weight, eps, columns, added, to);
                  else
                      rms_norm<T, T>(from, (const T*)weight, eps, columns, added, to);
              }))
}

// gate_up [tokens * num_of_token, 2 * columns] -> out [tokens * num_of_token, columns].
extern "C" void baton_gate(int dtype, int activation, const void* gate_up, int64_t num_tokens, int64_t num_of_token, int64_t columns, void* out) {
    FOR_DTYPE(dtype, for_each_row(num_tokens * num_of_token, [&](int64_t row) {
                  const T* gates = (const T*)gate_up + row * 2 * columns;
                  const auto run = activation == SILU ? gate<T, SILU> : activation == GELU_TANH ? gate<T, GELU_TANH> : gate<T, CLAMPED_SWISH>;
                  run(gates, gates + columns, columns, (T*)out + row * columns);
              }))
}

// numbers [rows, columns], in place: each becomes cap * tanh(number / cap).
extern "C" void baton_soft_cap(float* numbers, float cap, int64_t num_rows, int64_t columns) {
    for_each_row(num_rows, [&](int64_t row) {
        float* here = numbers + row * columns;
        for_columns(columns, [&](int64_t column, int count) {
            store_some(here + column, splat(cap) * tanh(load_some(here + column, count) / splat(cap)), count);
        });
    });
}

// qkv [rows, (num_queries + 2 * num_kv) * head_size], changed in place; query_norm, key_norm [head_size] or null, of float32 if wide;
// cosines, sines [rows, head_size / 2], `angle_stride` apart; slots [rows], -1 for no write. With INT4 a block whose last slot is written is then quantized.
extern "C" void baton_rotate_and_write(int dtype, void* qkv, const void* query_norm, const void* key_norm, int is_wide, float eps,
                                       const float* cosines, const float* sines, int64_t angle_stride, int64_t num_rows,
                                       int64_t num_queries, int64_t num_kv, int64_t head_size, const Layer* layer, const int64_t* slots) {
    const Heads heads{num_queries, num_kv, head_size};
    const Layer& pages = *layer;
    const int64_t columns = (num_queries + 2 * num_kv) * head_size;
    FOR_DTYPE(dtype, {
        for_each_row(num_rows, [&](int64_t row) {
            rotate_and_write((T*)qkv + row * columns, query_norm, key_norm, is_wide, eps,
                             cosines + row * angle_stride, sines + row * angle_stride, heads, pages, slots[row]);
        });
        if (pages.kept == INT4)
            for_each_row(num_rows, [&](int64_t row) {
                if (slots[row] >= 0 && (slots[row] + 1) % pages.block_size == 0) close_block<T>(heads, pages, slots[row]);
            });
    })
}

RECORDABLE(baton_rms_norm)
RECORDABLE(baton_gate)
RECORDABLE(baton_soft_cap)
RECORDABLE(baton_rotate_and_write)
