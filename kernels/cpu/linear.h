// What linear layers of plain and of packed weights share: rows as products take them, and what becomes of a sum.
#pragma once

#include <type_traits>
#include <vector>

#include "products.h"
#include "threads.h"
#include "tiles.h"

constexpr int64_t BLOCK_ROWS = IN_TILES<bf16> ? 288 : 576;  // rows whose sums are kept beside a chunk of a panel, at most
constexpr int64_t BLOCK_BYTES = 1 << 20;  // of a block of rows in tiles, which then stay in a second cache of 2 MiB while panels pass
constexpr int64_t MIN_BLOCK_ROWS = 128;  // of packed weights, however deep

// Rows of a product, and the rows of the input that they are made of: all in their order, or those in `places`, `fan` of one row of the input.
struct Picked {
    const int32_t* places = nullptr;
    int64_t fan = 1;

    int64_t product(int64_t row) const { return places ? places[row] : row; }
    int64_t input(int64_t row) const { return product(row) / fan; }
};

// Rows of T as Row, in tiles of up to ROWS_AT_ONCE: tile[step][row][depth of a step, or of a block], zeros from `depth` to `padded`. Rows that lie
// far apart would push one another out of the nearest cache. A few rows lie one behind the other: where they were, if they fit.
template <class T, class Row = typename Product<T>::Row>
class RowTiles {
    static constexpr int D = IN_TILES<Row> ? BLOCK_DEPTH : sizeof(uint32_t) / sizeof(Row), MAX_ROWS = ROWS_AT_ONCE<Row>, FEW = 4;

   public:
    // Of all rows, packed.
    RowTiles(const T* input, int64_t count, int64_t depth, int64_t padded) : RowTiles(input, count, depth, padded, {}) {
        thread_local std::vector<Row, Aligned<Row>> room;
        if (int64_t(room.size()) < room_size()) room.resize(room_size());
        place(room.data());
        parallel(num_packs(), [&](int64_t index) { pack(index); });
    }

    // Of `count` picked rows, which the caller packs into a room.
    RowTiles(const T* input, int64_t count, int64_t depth, int64_t padded, Picked picked)
        : steps_(padded / D), depth_(depth), count_(count), picked_(picked), fits_(std::is_same_v<T, Row> && depth == padded), input_(input) {
        stay_ = are_few() && fits_ && (count <= 1 || !picked.places);
        if (stay_) tiles_ = (Row*)(input + (count ? picked.input(0) : 0) * depth);
    }

    int64_t room_size() const { return stay_ ? 0 : are_few() ? count_ * steps_ * D : num_packs() * tile_size(); }
    int64_t num_packs() const { return stay_ ? 0 : are_few() ? 1 : (count_ + at_once_ - 1) / at_once_; }
    void place(Row* room) {
        if (!stay_) tiles_ = room;
    }
    void pack(int64_t index) const {
        const int64_t stride = steps_ * D;
        if (are_few()) {
            for (int64_t row = 0; row < count_; ++row) copy(row, tiles_ + row * stride);
            return;
        }
        const int num_rows = rows_in_tile(index * at_once_);
        thread_local std::vector<Row> copies;
        if (!fits_ && int64_t(copies.size()) < num_rows * stride) copies.resize(num_rows * stride);
        const Row* rows[std::max(LANES, MAX_ROWS)];
        for (int row = 0; row < num_rows; ++row)
            rows[row] = fits_ ? (const Row*)from(index * at_once_ + row) : copy(index * at_once_ + row, copies.data() + row * stride);
        Row* out = tiles_ + index * tile_size();
        if constexpr (IN_TILES<Row>) {
            for (int64_t k = 0; k < stride; k += D)
                for (int row = 0; row < num_rows; ++row) out = std::copy_n(rows[row] + k, D, out);
        } else {
            std::fill(rows + num_rows, rows + LANES, rows[0]);  // lanes behind the last row are overwritten by the next step
            transpose((const uint32_t* const*)rows, steps_, (uint32_t*)out, num_rows);
        }
    }

    int64_t count() const { return count_; }
    int64_t product(int64_t row) const { return picked_.product(row); }
    const Row* tile(int64_t row) const { return are_few() ? tiles_ + row * steps_ * D : tiles_ + row / at_once_ * tile_size(); }
    int64_t row_stride() const { return are_few() ? steps_ * D : D; }
    int64_t step_stride(int num_rows) const { return are_few() ? D : num_rows * D; }
    int64_t at_once() const { return at_once_; }
    int rows_in_tile(int64_t row) const { return int(std::min(at_once_, count_ - row)); }

    // Rows that pass a panel together: all blocks have about as many. In tiles `depth` of them fits into BLOCK_BYTES, if MIN_BLOCK_ROWS do.
    int64_t rows_of_block(int64_t depth) const {
        const int64_t row_bytes = std::max<int64_t>(1, depth * sizeof(Row));
        const int64_t fitting = IN_TILES<Row> ? std::clamp(BLOCK_BYTES / row_bytes, MIN_BLOCK_ROWS, BLOCK_ROWS) : BLOCK_ROWS;
        const int64_t per_block = fitting / at_once_, num_tiles = std::max<int64_t>(1, (count_ + at_once_ - 1) / at_once_);
        const int64_t num_blocks = (num_tiles + per_block - 1) / per_block;
        return (num_tiles + num_blocks - 1) / num_blocks * at_once_;
    }

   private:
    bool are_few() const { return count_ <= FEW; }
    int64_t tile_size() const { return (steps_ * at_once_ + LANES) * D; }  // the last step may be written with all lanes
    const T* from(int64_t row) const { return input_ + picked_.input(row) * depth_; }

    const Row* copy(int64_t row, Row* to) const {
        convert(from(row), to, depth_);
        std::fill(to + depth_, to + steps_ * D, Row{});
        return to;
    }

    // Few registers want tiles of about the same number of rows: a row alone would take the time of two.
    static int64_t rows_at_once(int64_t count) {
        if (MAX_ROWS >= 12) return MAX_ROWS;
        const int64_t num_tiles = std::max<int64_t>(1, (count + MAX_ROWS - 1) / MAX_ROWS);
        return std::max<int64_t>(1, (count + num_tiles - 1) / num_tiles);
    }

    const int64_t steps_, depth_, count_, at_once_ = rows_at_once(count_);
    const Picked picked_;
    const bool fits_;
    bool stay_;
    const T* input_;
    Row* tiles_ = nullptr;
};

// Adds to kept[row][column] the products of rows with a chunk.
template <class F, int ROWS, class Beside>
__attribute__((noinline)) void add_chunk(const typename Product<F>::Row* rows, int64_t row_stride, int64_t step_stride, const F* chunk, int64_t num_steps,
                                         const Beside& ahead, float* kept) {
    Floats sums[ROWS][2];
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half) sums[row][half] = load(kept + row * PANEL + half * LANES);
    multiply<F, ROWS, 1>(rows, row_stride, step_stride, chunk, 0, num_steps, sums, ahead);
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half) store(kept + row * PANEL + half * LANES, sums[row][half]);
}

// Adds to sums[row - begin][column] the products of rows with `depth` of a panel, which is at k of theirs. ahead(row): what is brought nearer meanwhile.
template <class F, class Rows, class OfRow>
void add_in_registers(const Rows& rows, int64_t begin, int64_t end, int64_t k, const F* chunk, int64_t depth, float* sums, const OfRow& ahead) {
    using P = Product<F>;
    for (int64_t row = begin; row < end; row += rows.at_once())
        for_rows(int(std::min(rows.at_once(), end - row)), [&]<int ROWS>() {
            const int64_t step_stride = rows.step_stride(ROWS);
            const auto* first = rows.tile(row) + k / P::DEPTH * P::ROW_STEPS * step_stride;
            add_chunk<F, ROWS>(first, rows.row_stride(), step_stride, chunk, depth / P::DEPTH, ahead(row), sums + (row - begin) * PANEL);
        });
}

// A matrix of plain weights, packed by linear.cpp, or of codes, packed by packed.cpp, as products with picked rows take it.
// `multiply` writes the columns of the panels from first to last - 1, with the bits of the whole product.
template <class T>
struct PlainMatrix {
    using Row = typename Product<T>::Row;
    static constexpr int64_t PANELS_PER_UNIT = 4;
    const void* data;
    int64_t columns, depth;

    int64_t num_panels() const;
    int64_t padded_depth() const;
    void multiply(const RowTiles<T, Row>& rows, const T* bias, T* out, int64_t first, int64_t last) const;
};

template <class T>
struct PackedMatrix {
    using Row = Factor<T>;
    static constexpr int64_t PANELS_PER_UNIT = 1;
    const void* data;
    int64_t columns, depth;

    int64_t num_panels() const;
    int64_t padded_depth() const;
    void multiply(const RowTiles<T, Row>& rows, const T* bias, T* out, int64_t first, int64_t last) const;
};

// Writes `count` sums to `out`: rounded to T, + bias, + residual, each rounded to T, as it would be on its own. `Out` is T, or float for
// logits, which keep the bits that they have.
template <class T, class Out>
inline void finish(Floats value, int count, const T* bias, const T* residual, Out* out) {
    if (bias) value = rounded<T>(value) + load_some(bias, count);
    if (residual) value = rounded<T>(value) + load_some(residual, count);
    store_some(out, value, count);
}

// The same for the sums of a panel, of which `count` columns are written.
template <class T, class Out>
inline void finish_panel(const float* sums, int count, const T* bias, const T* residual, Out* out) {
    if (count < PANEL) {
        for (int i = 0; i < count; i += LANES)
            finish(load(sums + i), std::min(LANES, count - i), bias ? bias + i : nullptr, residual ? residual + i : nullptr, out + i);
        return;
    }
    Floats halves[2] = {load(sums), load(sums + LANES)};
    for (int half = 0; half < 2; ++half) {
        if (bias) halves[half] = rounded<T>(halves[half]) + load(bias + half * LANES);
        if (residual) halves[half] = rounded<T>(halves[half]) + load(residual + half * LANES);
    }
    store_panel(out, halves[0], halves[1]);
}
