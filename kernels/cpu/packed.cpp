// Linear layers of packed weights: each is widened once, in registers for few rows and else into a tile, and then multiplied and
// summed as a plain weight is, so that the bits are those of the widened matrix.

#include "linear.h"
#include "packed.h"

namespace {

// Rows up to which weights are widened in registers; 0 where that is slower than a tile. Each count is compiled for each format.
#if defined(BATON_BLOCKS)
template <class F, class R, CodeType CODES>
constexpr int FEW = CODES == CodeType::E4M3 && IN_TILES<F> ? 0 : 1;  // to chains such codes would be subnormal numbers
#elif defined(__AVX512F__)
template <class F, class R, CodeType CODES>
constexpr int FEW = std::is_same_v<F, bf16> ? 8 : 1;
#elif defined(__AVX2__)
template <class F, class R, CodeType CODES>
constexpr int FEW = std::is_same_v<R, f16> ? 0 : 2;
#else
template <class F, class R, CodeType CODES>
constexpr int FEW = 0;
#endif

// Calls function.template operator()<R, CODES>() for a format, R being to what weights are rounded.
template <class T, class Function>
void for_format(const Format& format, const Function& function) {
    const auto with = [&]<class R>() {
        switch (format.codes) {
            case CodeType::U4: return function.template operator()<R, CodeType::U4>();
            case CodeType::U5: return function.template operator()<R, CodeType::U5>();
            case CodeType::U6: return function.template operator()<R, CodeType::U6>();
            case CodeType::S8: return function.template operator()<R, CodeType::S8>();
            case CodeType::E4M3: return function.template operator()<R, CodeType::E4M3>();
            case CodeType::TABLE4: return function.template operator()<R, CodeType::TABLE4>();
        }
    };
    if constexpr (std::is_same_v<T, float>)
        switch (format.source_dtype) {
            case 1: return with.template operator()<bf16>();
            case 2: return with.template operator()<f16>();
        }
    with.template operator()<T>();
}

struct NoTile {  // where all rows are multiplied at once
    template <class Weights>
    void keep(const Weights&) {}
};

// Weights in the nearest cache, as `multiply` takes them.
template <class F>
struct Tile {
    F* next;

    void keep(const typename Product<F>::Weights& weights) {
        Product<F>::keep(weights, next);
        next += PANEL * Product<F>::DEPTH;
    }
};

// Adds to sums[row][column] the products of a few rows, or of none, with the next `depth` of a panel, straight from its codes.
template <class F, class R, CodeType CODES, int ROWS, class Kept>
__attribute__((noinline)) void add_few(Groups& from, const F* rows, int64_t row_stride, int64_t step_stride, int64_t depth, Kept kept, float* sums) {
    using P = Product<F>;
    Floats of[ROWS + 1][2];
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half) of[row][half] = load(sums + row * PANEL + half * LANES);
    Groups groups = from;  // in registers
    const int group = groups.format().group;
    GroupScales scales;
    for (int64_t k = 0; k < depth; k += group) {
        const char* codes = groups.next(scales);
        widen<F, R, CODES>(codes, group, scales, [&](int, const typename P::Weights& weights) __attribute__((always_inline)) {
            if constexpr (ROWS > 0) {
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; ++row) {
                    const auto value = P::row(rows + row * row_stride, step_stride);
                    of[row][0] = P::add(of[row][0], value, weights, 0);
                    of[row][1] = P::add(of[row][1], value, weights, 1);
                }
                rows += step_stride;
            }
            kept.keep(weights);
        });
    }
    from = groups;
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half) store(sums + row * PANEL + half * LANES, of[row][half]);
}

#if defined(BATON_BLOCKS)
// The same for one row in blocks (tiles.h), which end inside a group or behind it.
template <class F, class R, CodeType CODES>
__attribute__((noinline)) void add_one(Groups& from, const F* row, int64_t depth, float* sums) {
    using P = Product<F>;
    const WithoutSubnormals mode;
    alignas(64) float wide[CHUNK<F>];
    for (int64_t k = 0; k < depth; k += BLOCK_DEPTH) widen_block(row + k, wide + k);
    Floats chains[2][2] = {{splat(0), splat(0)}, {splat(0), splat(0)}};  // of even and odd places, of each half of the panel
    const auto end_block = [&]() __attribute__((always_inline)) {
        for (int half = 0; half < 2; ++half) {
            store(sums + half * LANES, load(sums + half * LANES) + (chains[half][0] + chains[half][1]));
            chains[half][0] = chains[half][1] = splat(0);
        }
    };
    Groups groups = from;  // in registers
    const int group = groups.format().group;
    GroupScales scales;
    for (int64_t k = 0; k < depth; k += group) {
        const char* codes = groups.next(scales);
        const int first = k & 16;  // place in a block, which only a group of 16 does not begin
        widen<F, R, CODES>(codes, group, scales, [&](int step, const typename P::Weights& weights) __attribute__((always_inline)) {
            const float* pair = wide + k + 2 * step;
            for (int half = 0; half < 2; ++half) {
                chains[half][0] = fma(splat(pair[0]), P::first(weights, half), chains[half][0]);
                chains[half][1] = fma(splat(pair[1]), P::second(weights, half), chains[half][1]);
            }
            if ((first + 2 * step) % BLOCK_DEPTH == BLOCK_DEPTH - 2) end_block();
        });
    }
    if (depth % BLOCK_DEPTH) end_block();
    from = groups;
}
#else
template <class F, class R, CodeType CODES>
void add_one(auto&&...);  // where IN_TILES holds
#endif

// out [rows, columns] = input [rows, depth] . weight^T, + bias [columns], + residual [rows, columns], as `Linear` in linear.cpp.
template <class T, class Out>
struct PackedLinear {
    using F = Factor<T>;
    RowTiles<T, F> rows;
    Packed matrix;
    const T* bias;
    const T* residual;
    Out* out;
    int64_t num_rows, columns, depth;

    // Units of one block of rows lie together, so that a thread stays with it.
    void run() const {
        if (!num_rows) return;
        const int64_t in_block = rows.rows_of_block(matrix.padded_depth()), num_panels = matrix.num_panels();
        parallel((num_rows + in_block - 1) / in_block * num_panels, [&](int64_t unit) {
            const int64_t begin = unit / num_panels * in_block;
            block(matrix.panels()[unit % num_panels], begin, std::min(num_rows, begin + in_block));
        });
    }

    void one(const Panel& panel) const {
        const int64_t in_block = rows.rows_of_block(matrix.padded_depth());
        for (int64_t row = 0; row < num_rows; row += in_block) block(panel, row, std::min(num_rows, row + in_block));
    }

    void block(const Panel& panel, int64_t begin, int64_t end) const {
        for_format<T>(panel.format, [&]<class R, CodeType CODES>() {
            if (num_rows <= FEW<F, R, CODES>)
                few<R, CODES>(panel);
            else
                many<R, CODES>(panel, begin, end);
        });
    }

    template <class R, CodeType CODES>
    void few(const Panel& panel) const {
        float sums[MAX_ROWS * PANEL] = {};
        Groups groups(matrix, panel);
        if constexpr (IN_TILES<F>) {
            for (int64_t k = 0; k < depth; k += CHUNK<F>) add_one<F, R, CODES>(groups, rows.tile(0) + k, padded_chunk(groups, k), sums);
        } else {
            add_rows<R, CODES>(groups, 0, int(num_rows), 0, depth, NoTile{}, sums);
        }
        for (int64_t row = 0; row < num_rows; ++row) put(panel, sums + row * PANEL, row);
    }

    // Each chunk is widened while the rows of the last tile are multiplied, if they are few: the others find it in the nearest cache.
    template <class R, CodeType CODES>
    void many(const Panel& panel, int64_t begin, int64_t end) const {
        alignas(64) thread_local F tile[CHUNK<F> * PANEL];
        alignas(64) thread_local float sums[BLOCK_ROWS * PANEL];
        Groups groups(matrix, panel);
        Tiles<F> tiles;
        if (!IN_TILES<F>) std::fill(sums, sums + (end - begin) * PANEL, 0.0f);
        const int64_t rest = (end - begin) % rows.at_once(), whole = !IN_TILES<F> && rest <= FEW<F, R, CODES> ? end - rest : end;
        for (int64_t k = 0; k < depth; k += CHUNK<F>) {
            const int64_t padded = padded_chunk(groups, k);
            add_rows<R, CODES>(groups, whole, int(end - whole), k, padded, Tile<F>{tile}, sums + (whole - begin) * PANEL);
            if constexpr (IN_TILES<F>) {
                std::fill(tile + padded * PANEL, tile + whole_depth<F>(padded) * PANEL, F{});
                tiles.add(rows, begin, end, k, tile, whole_depth<F>(padded), sums, Nothing{});
            } else {
                add_in_registers<F>(rows, begin, whole, k, tile, padded, sums, [](int64_t) { return Nothing{}; });
            }
        }
        for (int64_t row = begin; row < end; ++row) put(panel, sums + (row - begin) * PANEL, row);
    }

    // The depth of the chunk at k, in whole groups.
    int64_t padded_chunk(const Groups& groups, int64_t k) const {
        return std::min<int64_t>(CHUNK<F>, groups.format().num_groups(depth - k) * groups.format().group);
    }

    // `add_few` of `count` rows from `row` on, at k of the depth.
    template <class R, CodeType CODES, class Kept>
    void add_rows(Groups& groups, int64_t row, int count, int64_t k, int64_t length, Kept kept, float* sums) const {
        if (count == 0) return add_few<F, R, CODES, 0>(groups, nullptr, 0, 0, length, kept, sums);
        if constexpr (!IN_TILES<F>)
            for_rows<FEW<F, R, CODES>>(count, [&]<int ROWS>() {
                const int64_t step_stride = rows.step_stride(ROWS);
                add_few<F, R, CODES, ROWS>(groups, rows.tile(row) + k / Product<F>::DEPTH * step_stride, rows.row_stride(), step_stride, length, kept, sums);
            });
    }

    void put(const Panel& panel, const float* sums, int64_t row) const {
        const int64_t column = panel.first_column, at = rows.product(row) * columns + column;
        finish_panel(sums, panel.num_columns, bias ? bias + column : nullptr, residual ? residual + at : nullptr, out + at);
    }
};

template <class T, class Out>
void packed_linear(const void* input, const void* packed, const void* bias, const void* residual, void* out, int64_t num_rows,
                   int64_t columns, int64_t depth) {
    const Packed matrix{(const char*)packed};
    PackedLinear<T, Out>{{(const T*)input, num_rows, depth, whole_depth<Factor<T>>(matrix.padded_depth())}, matrix, (const T*)bias, (const T*)residual, (Out*)out,
                         num_rows, columns, depth}
        .run();
}

// The weights of one column, rounded to T and then multiplied.
template <class T>
void unpack_column(Packed matrix, int64_t id, int64_t depth, float scale, T* out) {
    const Panel* after = std::upper_bound(matrix.panels(), matrix.panels() + matrix.num_panels(), id,
                                          [](int64_t column, const Panel& panel) { return column < panel.first_column; });
    const Panel& panel = after[-1];
    const int column = int(id - panel.first_column), group = panel.format.group;
    for_format<T>(panel.format, [&]<class R, CodeType CODES>() {
        Groups groups(matrix, panel);
        GroupScales scales;
        for (int64_t k = 0; k < depth; k += group) {
            const char* codes = groups.next(scales);
            widen<float, R, CODES>(codes, group, scales, [&](int step, const typename Product<float>::Weights& weights) {
                float values[LANES];
                store(values, weights.of[column / LANES]);
                if (k + step >= depth) return;
                from_float(values[column % LANES], out + k + step);
                from_float(to_float(out[k + step]) * scale, out + k + step);
            });
        }
    });
}

// Writes codes of a group as `widen` reads them. codes: of `num_columns` columns, `stride` apart, of which `count` are given.
void pack_codes(const Format& format, const uint8_t* codes, int64_t stride, int num_columns, int64_t count, char* out) {
    constexpr int D = PACKED_DEPTH, NUM_LANES = PANEL * D;
    const int bits = int(format.bits()), in_word = 32 / bits;
    std::memset(out, 0, format.code_bytes());
    for (int column = 0; column < num_columns; ++column)
        for (int k = 0; k < count; ++k) {
            const uint32_t code = codes[column * stride + k], lane = column * D + k % D, at = k % WORD_DEPTH / D;
            if (bits == 8) {
                out[k / D * NUM_LANES + lane] = char(code);
                continue;
            }
            uint32_t* words = (uint32_t*)(out + k / WORD_DEPTH * NUM_LANES * bits);
            const auto add_to_rest = [&](uint32_t value) {
                value <<= (at - in_word) * bits;
                for (int byte = 0; byte < bits - 4; ++byte) ((uint8_t*)(words + NUM_LANES))[lane * (bits - 4) + byte] |= value >> 8 * byte;
            };
            if (at < in_word)
                words[lane] |= code << at * bits;
            else if (at < CODES_IN_WORD - 1)
                add_to_rest(code);
            else {
                words[lane] |= code << 30;
                add_to_rest(code >> 2);
            }
        }
}

// What `count` columns of a panel have at one place of the depth, `stride` bytes apart, zeros behind them.
char* pack_scales(const char* values, int64_t stride, int64_t size, int count, char* out) {
    std::memset(out, 0, PANEL * size);
    for (int column = 0; column < count; ++column) std::memcpy(out + column * size, values + column * stride, size);
    return out + PANEL * size;
}

}  // namespace

template <class T>
int64_t PackedMatrix<T>::num_panels() const {
    return Packed{(const char*)data}.num_panels();
}
template <class T>
int64_t PackedMatrix<T>::padded_depth() const {
    return whole_depth<Row>(Packed{(const char*)data}.padded_depth());
}
template <class T>
void PackedMatrix<T>::multiply(const RowTiles<T, Row>& rows, const T* bias, T* out, int64_t first, int64_t last) const {
    const Packed matrix{(const char*)data};
    const PackedLinear<T, T> product{rows, matrix, bias, nullptr, out, rows.count(), columns, depth};
    for (int64_t panel = first; panel < last; ++panel) product.one(matrix.panels()[panel]);
}
template struct PackedMatrix<float>;
template struct PackedMatrix<bf16>;
template struct PackedMatrix<f16>;

// The parts of a matrix of codes, each contiguous: codes [columns, depth], scales and offsets [columns, blocks], factors [columns, groups],
// table [16] of int8; null for those that the format has not. `Coded` in packed.py has the same fields in the same order.
struct Coded {
    const char *codes, *scales, *offsets, *scale_factors, *offset_factors, *table;
};

extern "C" int64_t baton_panel_bytes(const Format* format, int64_t depth) { return format->panel_bytes(depth); }

// Writes the panels of codes one behind the other.
extern "C" void baton_pack_codes(const Format* format, const Coded* parts, int64_t columns, int64_t depth, char* packed) {
    const int64_t blocks = format->num_blocks(depth), groups = format->num_groups(depth), scale_bytes = format->scale_dtype ? 2 : 4;
    parallel((columns + PANEL - 1) / PANEL, [&](int64_t panel) {
        const int64_t first = panel * PANEL;
        const int count = int(std::min<int64_t>(PANEL, columns - first));
        char* out = packed + panel * format->panel_bytes(depth);
        const auto put = [&](const char* values, int64_t per_column, int64_t index, int64_t size) {
            if (values) out = pack_scales(values + (first * per_column + index) * size, per_column * size, size, count, out);
        };
        if (parts->table) std::memcpy(out, parts->table, LANES);
        out += format->table_bytes();
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t k = group * format->group;
            if (k % format->block == 0) {
                put(parts->scales, blocks, k / format->block, scale_bytes);
                put(parts->offsets, blocks, k / format->block, scale_bytes);
            }
            put(parts->scale_factors, groups, group, 1);
            put(parts->offset_factors, groups, group, 1);
            pack_codes(*format, (const uint8_t*)parts->codes + first * depth + k, depth, count, std::min<int64_t>(format->group, depth - k), out);
            out += format->code_bytes();
        }
    });
}

extern "C" void baton_packed_linear(int dtype, const void* input, const void* packed, const void* bias, const void* residual, void* out,
                                    int64_t num_rows, int64_t columns, int64_t depth) {
    FOR_DTYPE(dtype, packed_linear<T, T>(input, packed, bias, residual, out, num_rows, columns, depth))
}

// The same with float32 out, for the head.
extern "C" void baton_packed_linear_to_float(int dtype, const void* input, const void* packed, float* out, int64_t num_rows,
                                             int64_t columns, int64_t depth) {
    FOR_DTYPE(dtype, packed_linear<T, float>(input, packed, nullptr, nullptr, out, num_rows, columns, depth))
}

// out [num_ids, depth] = the columns `ids` of a packed matrix, as `baton_unpack_rows` says.
extern "C" void baton_packed_unpack_rows(int dtype, const void* packed, const int64_t* ids, int64_t num_ids, int64_t depth, float scale, void* out) {
    FOR_DTYPE(dtype, parallel(num_ids, [&](int64_t i) { unpack_column(Packed{(const char*)packed}, ids[i], depth, scale, (T*)out + i * depth); }))
}

RECORDABLE(baton_packed_linear)
RECORDABLE(baton_packed_linear_to_float)
RECORDABLE(baton_packed_unpack_rows)
