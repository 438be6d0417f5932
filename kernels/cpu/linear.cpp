// Linear layers: rows times packed weights of their dtype. Those of fewer bits: packed.cpp.

#include <type_traits>

#include "dtypes.h"
#include "linear.h"
#include "threads.h"

namespace {

constexpr int64_t CHUNK_BYTES = 16 << 10;  // of a panel, half of a nearest cache

constexpr int64_t num_panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

template <class T>
int64_t num_steps(int64_t depth) {
    return whole_depth<T>(depth) / Product<T>::DEPTH;
}

// weight [columns, depth] -> panels, zeros where columns or depth end.
template <class T>
void pack(const T* weight, int64_t columns, int64_t depth, T* packed) {
    constexpr int D = Product<T>::DEPTH;
    const int64_t steps = num_steps<T>(depth);
    parallel(num_panels(columns), [&](int64_t panel) {
        T* out = packed + panel * steps * PANEL * D;
        for (int64_t step = 0; step < steps; ++step)
            for (int column = 0; column < PANEL; ++column)
                for (int part = 0; part < D; ++part, ++out) {
                    const int64_t row = panel * PANEL + column, k = step * D + part;
                    *out = row < columns && k < depth ? weight[row * depth + k] : T{};
                }
    });
}

template <class T>
void unpack_rows(const T* packed, const int64_t* ids, int64_t num_ids, int64_t depth, float scale, T* out) {
    constexpr int D = Product<T>::DEPTH;
    for (int64_t i = 0; i < num_ids; ++i) {
        const T* panel = packed + ids[i] / PANEL * num_steps<T>(depth) * PANEL * D;
        for (int64_t k = 0; k < depth; ++k) from_float(to_float(panel[(k / D * PANEL + ids[i] % PANEL) * D + k % D]) * scale, out + i * depth + k);
    }
}

// out [rows, columns] = input [rows, depth] . weight^T, + bias [columns], + residual [rows, columns], as `finish` says.
template <class T, class Out>
struct Linear {
    static constexpr int D = Product<T>::DEPTH, MAX_SHARES = 4;
    static constexpr int64_t CHUNK_DEPTH = IN_TILES<T> ? TILED_DEPTH : CHUNK_BYTES / (PANEL * sizeof(T));
    static constexpr int64_t CACHED_DEPTH = BLOCK_BYTES / int64_t(BLOCK_ROWS * sizeof(T)) / CHUNK_DEPTH * CHUNK_DEPTH;  // of BLOCK_ROWS rows in tiles
    RowTiles<T> rows;
    const T* packed;
    const T* bias;
    const T* residual;
    Out* out;
    int64_t num_rows, columns, depth, steps;

    // Columns from first_panel on, for all rows.
    template <int ROWS, int PANELS>
    void tile(int64_t row, int64_t first_panel) const {
        Floats sums[ROWS][2 * PANELS];
        for (auto& of_row : sums)
            for (Floats& sum : of_row) sum = splat(0);
        const int64_t panel_stride = steps * PANEL * D;
        multiply<T, ROWS, PANELS>(rows.tile(row), rows.row_stride(), rows.step_stride(ROWS), packed + first_panel * panel_stride, panel_stride, steps, sums);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < 2 * PANELS; ++v) put(sums[r][v], row + r, first_panel * PANEL + v * LANES);
    }

    void put(Floats value, int64_t row, int64_t column) const {
        const int count = int(std::min<int64_t>(LANES, columns - column));
        const int64_t at = rows.product(row) * columns + column;
        if (count > 0) finish(value, count, bias ? bias + column : nullptr, residual ? residual + at : nullptr, out + at);
    }

    // Rows from begin to end - 1 with some panels, at most PANELS_PER_UNIT.
    void panels(int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) const {
        if constexpr (IN_TILES<T>) {
            Tiles<T> tiles;
            if (num_rows >= MIN_TILED && num_rows <= 2 * TILE_ROWS) return few_in_tiles(tiles, first_panel, last_panel);
            for (int64_t in_block = rows_of_block(), row = begin; row < end; row += in_block)
                block_in_tiles(tiles, row, std::min(end, row + in_block), first_panel, last_panel);
        } else if (ROWS_BY_CHUNK && num_rows >= ROWS_BY_CHUNK) {
            panels_in_chunks(first_panel, last_panel);
        } else {
            for (int64_t row = 0; row < num_rows; row += rows.at_once())
                for_rows(rows.rows_in_tile(row), [&]<int ROWS>() {
                    for_panels<ROWS>(last_panel - first_panel, [&]<int PANELS>(int64_t panel) { tile<ROWS, PANELS>(row, first_panel + panel); });
                });
        }
    }

    int64_t rows_of_block() const { return rows.rows_of_block(std::min(steps * D, CACHED_DEPTH)); }

    // A chunk of a panel stays in the nearest cache while a block of rows passes, with its sums.
    void panels_in_chunks(int64_t first_panel, int64_t last_panel) const {
        alignas(64) thread_local float sums[BLOCK_ROWS * PANEL];
        const int64_t padded = steps * D, at_once = rows.at_once(), in_block = rows_of_block();
        for (int64_t panel = first_panel; panel < last_panel; ++panel)
            for (int64_t begin = 0, end; begin < num_rows; begin = end) {
                end = std::min(num_rows, begin + in_block);
                std::fill(sums, sums + (end - begin) * PANEL, 0.0f);
                for (int64_t k = 0; k < padded; k += CHUNK_DEPTH) {
                    const T* chunk = packed + (panel * padded + k) * PANEL;
                    const int64_t length = std::min<int64_t>(CHUNK_DEPTH, padded - k);
                    add_in_registers<T>(rows, begin, end, k, chunk, length, sums, [&](int64_t row) {
                        return behind_chunk(chunk, length, (row - begin) / at_once, (end - begin) / at_once);
                    });
                }
                put_panel(sums, PANEL, begin, end, panel);
            }
    }

    // A block of rows with the panels of a unit: of the rows CACHED_DEPTH stays in the second cache while all panels pass.
    void block_in_tiles(Tiles<T>& tiles, int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) const {
        alignas(64) thread_local float sums[PlainMatrix<T>::PANELS_PER_UNIT][BLOCK_ROWS * PANEL];
        const int64_t padded = steps * D;
        for (int64_t first = 0; first < padded; first += CACHED_DEPTH)
            for (int64_t panel = first_panel; panel < last_panel; ++panel)
                for (int64_t k = first, behind = std::min(padded, first + CACHED_DEPTH); k < behind; k += CHUNK_DEPTH)
                    chunk_in_tiles(tiles, begin, end, panel, k, std::min<int64_t>(CHUNK_DEPTH, behind - k), sums[panel - first_panel]);
    }

    // A chunk of a panel, which stays in the nearest cache while the rows pass. The last one writes each tile's sums while the next tile is at work.
    void chunk_in_tiles(Tiles<T>& tiles, int64_t begin, int64_t end, int64_t panel, int64_t k, int64_t length, float* sums) const {
        const int64_t at_once = rows.at_once(), last_tile = begin + (end - begin - 1) / at_once * at_once;
        const T* chunk = packed + (panel * steps * D + k) * PANEL;
        const auto sums_of = [&](int64_t row) { return sums + (row - begin) * PANEL; };
        const bool is_last = k + length == steps * D;
        for (int64_t row = begin; row < end; row += at_once) {
            const Ahead ahead = behind_chunk(chunk, length, (row - begin) / at_once, (end - begin) / at_once);
            tiles.add(rows, row, std::min(end, row + at_once), k, chunk, length, sums_of(row), ahead);
            if (is_last && row > begin) put_panel(sums_of(row - at_once), PANEL, row - at_once, row, panel);
        }
        if (is_last) put_panel(sums_of(last_tile), PANEL, last_tile, end, panel);
    }

    // Up to 32 rows: two panels side by side, for two streams from memory are faster than one. More than 16 rows pass chunks, which their second tile
    // finds in the nearest cache.
    void few_in_tiles(Tiles<T>& tiles, int64_t first_panel, int64_t last_panel) const {
        constexpr int64_t STRIDE = PlainMatrix<T>::PANELS_PER_UNIT * PANEL;
        alignas(64) float sums[2 * TILE_ROWS * STRIDE];
        const int64_t padded = steps * D, block_stride = rows.step_stride(num_rows), chunk_depth = num_rows <= TILE_ROWS ? padded : CHUNK_DEPTH;
        std::fill_n(sums, num_rows * STRIDE, 0.0f);
        for (int64_t k = 0; k < padded; k += chunk_depth)
            tiles.template add_panels<false>(rows.tile(0) + k / BLOCK_DEPTH * block_stride, rows.row_stride(), block_stride, int(num_rows),
                                             packed + (first_panel * padded + k) * PANEL, padded * PANEL, last_panel - first_panel,
                                             std::min(chunk_depth, padded - k) / BLOCK_DEPTH, sums, STRIDE);
        for (int64_t panel = first_panel; panel < last_panel; ++panel) put_panel(sums + (panel - first_panel) * PANEL, STRIDE, 0, num_rows, panel);
    }

    // Writes the sums of rows, `stride` apart.
    void put_panel(const float* sums, int64_t stride, int64_t begin, int64_t end, int64_t panel) const {
        const int64_t column = panel * PANEL;
        for (int64_t row = begin; row < end; ++row, sums += stride) {
            const int64_t at = rows.product(row) * columns + column;
            finish_panel(sums, int(std::min<int64_t>(PANEL, columns - column)), bias ? bias + column : nullptr, residual ? residual + at : nullptr, out + at);
        }
    }

    // The memory behind a chunk, mostly the next one: each of the first tiles of rows brings a share.
    static Ahead behind_chunk(const T* chunk, int64_t chunk_depth, int64_t share, int64_t num_tiles) {
        const int64_t num_shares = std::clamp<int64_t>(num_tiles, 1, MAX_SHARES), num_bytes = chunk_depth * PANEL * sizeof(T);
        if (share >= num_shares) return {(const char*)chunk, 0};
        return {(const char*)chunk + num_bytes + num_bytes * share / num_shares, PANEL * D * int64_t(sizeof(T)) / (2 * num_shares)};
    }

    // Units of one block of rows lie together, so that a thread stays with it.
    void run() const {
        if (!num_rows) return;
        constexpr int64_t PER_UNIT = PlainMatrix<T>::PANELS_PER_UNIT;
        const int64_t total = num_panels(columns), num_groups = (total + PER_UNIT - 1) / PER_UNIT, in_block = IN_TILES<T> ? rows_of_block() : num_rows;
        parallel((num_rows + in_block - 1) / in_block * num_groups, [&](int64_t unit) {
            const int64_t begin = unit / num_groups * in_block, first = unit % num_groups * PER_UNIT;
            panels(begin, std::min(num_rows, begin + in_block), first, std::min(total, first + PER_UNIT));
        });
    }
};

template <class T, class Out>
void linear(const void* input, const void* packed, const void* bias, const void* residual, void* out, int64_t num_rows, int64_t columns,
            int64_t depth) {
    const int64_t steps = num_steps<T>(depth);
    Linear<T, Out>{{(const T*)input, num_rows, depth, steps * Product<T>::DEPTH}, (const T*)packed, (const T*)bias, (const T*)residual,
                   (Out*)out, num_rows, columns, depth, steps}
        .run();
}

}  // namespace

template <class T>
int64_t PlainMatrix<T>::num_panels() const {
    return ::num_panels(columns);
}
template <class T>
int64_t PlainMatrix<T>::padded_depth() const {
    return num_steps<T>(depth) * Product<T>::DEPTH;
}
template <class T>
void PlainMatrix<T>::multiply(const RowTiles<T, Row>& rows, const T* bias, T* out, int64_t first, int64_t last) const {
    Linear<T, T>{rows, (const T*)data, bias, nullptr, out, rows.count(), columns, depth, num_steps<T>(depth)}.panels(0, rows.count(), first, last);
}
template struct PlainMatrix<float>;
template struct PlainMatrix<bf16>;
template struct PlainMatrix<f16>;

// The number of elements of weight [columns, depth] once packed.
extern "C" int64_t baton_packed_size(int dtype, int64_t columns, int64_t depth) {
    int64_t size = 0;
    FOR_DTYPE(dtype, size = num_panels(columns) * PANEL * num_steps<T>(depth) * Product<T>::DEPTH)
    return size;
}

extern "C" void baton_pack(int dtype, const void* weight, int64_t columns, int64_t depth, void* packed) {
    FOR_DTYPE(dtype, pack((const T*)weight, columns, depth, (T*)packed))
}

// out [num_ids, depth] = the rows `ids` of a packed weight, times `scale`.
extern "C" void baton_unpack_rows(int dtype, const void* packed, const int64_t* ids, int64_t num_ids, int64_t depth, float scale, void* out) {
    FOR_DTYPE(dtype, unpack_rows((const T*)packed, ids, num_ids, depth, scale, (T*)out))
}

extern "C" void baton_linear(int dtype, const void* input, const void* packed, const void* bias, const void* residual, void* out,
                             int64_t num_rows, int64_t columns, int64_t depth) {
    FOR_DTYPE(dtype, linear<T, T>(input, packed, bias, residual, out, num_rows, columns, depth))
}

// The same with float32 out, for the head.
extern "C" void baton_linear_to_float(int dtype, const void* input, const void* packed, float* out, int64_t num_rows, int64_t columns,
                                      int64_t depth) {
    FOR_DTYPE(dtype, linear<T, float>(input, packed, nullptr, nullptr, out, num_rows, columns, depth))
}

RECORDABLE(baton_unpack_rows)
RECORDABLE(baton_linear)
RECORDABLE(baton_linear_to_float)
