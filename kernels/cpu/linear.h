// What linear layers of plain and of packed weights share: rows as products take them, and what becomes of a sum.
#pragma once

#include <type_traits>
#include <vector>

#include "products.h"
#include "threads.h"
#include "tiles.h"

constexpr int64_t BLOCK_ROWS = 576;  // rows whose sums are kept beside a chunk of a panel: a multiple of ROWS_AT_ONCE

// Rows of T as Row, in tiles of up to ROWS_AT_ONCE: tile[step][row][depth of a step, or of a block], zeros from `depth` to `padded`. Rows that lie
// far apart would push one another out of the nearest cache. A few rows lie one behind the other: where they were, if they fit.
template <class T, class Row = typename Product<T>::Row>
class RowTiles {
    static constexpr int D = IN_TILES<Row> ? BLOCK_DEPTH : sizeof(uint32_t) / sizeof(Row), MAX_ROWS = ROWS_AT_ONCE<Row>, FEW = 4;

   public:
    RowTiles(const T* input, int64_t count, int64_t depth, int64_t padded)
        : steps_(padded / D), depth_(depth), count_(count), fits_(std::is_same_v<T, Row> && depth == padded), input_(input) {
        if (are_few()) {
            few_ = one_by_one(input, count);
            return;
        }
        thread_local std::vector<Row, Aligned<Row>> tiles;
        const int64_t num_tiles = (count + MAX_ROWS - 1) / MAX_ROWS;
        if (int64_t(tiles.size()) < num_tiles * tile_size()) tiles.resize(num_tiles * tile_size());
        tiles_ = tiles.data();
        parallel(num_tiles, [&](int64_t tile) { pack(tile); });
    }

    const Row* tile(int64_t row) const { return are_few() ? few_ + row * steps_ * D : tiles_ + row / MAX_ROWS * tile_size(); }
    int64_t row_stride() const { return are_few() ? steps_ * D : D; }
    int64_t step_stride(int num_rows) const { return are_few() ? D : num_rows * D; }
    int rows_in_tile(int64_t row) const { return int(std::min<int64_t>(MAX_ROWS, count_ - row)); }

   private:
    bool are_few() const { return count_ <= FEW; }
    int64_t tile_size() const { return (steps_ * MAX_ROWS + LANES) * D; }  // the last step may be written with all lanes

    const Row* one_by_one(const T* from, int64_t count) const {
        if (fits_) return (const Row*)from;
        thread_local std::vector<Row, Aligned<Row>> copies;
        const int64_t stride = steps_ * D;
        if (int64_t(copies.size()) < count * stride) copies.resize(count * stride);
        for (int64_t row = 0; row < count; ++row) {
            convert(from + row * depth_, copies.data() + row * stride, depth_);
            std::fill(copies.data() + row * stride + depth_, copies.data() + (row + 1) * stride, Row{});
        }
        return copies.data();
    }

    void pack(int64_t tile) {
        const int num_rows = rows_in_tile(tile * MAX_ROWS);
        const Row* packed = one_by_one(input_ + tile * MAX_ROWS * depth_, num_rows);
        Row* out = tiles_ + tile * tile_size();
        if constexpr (IN_TILES<Row>) {
            for (int64_t step = 0; step < steps_; ++step)
                for (int row = 0; row < num_rows; ++row) out = std::copy_n(packed + (row * steps_ + step) * D, D, out);
        } else {
            const uint32_t* rows[LANES];
            for (int row = 0; row < LANES; ++row)  // lanes behind the last row are overwritten by the next step
                rows[row] = (const uint32_t*)(packed + (row < num_rows ? row : 0) * steps_ * D);
            transpose(rows, steps_, (uint32_t*)out, num_rows);
        }
    }

    const int64_t steps_, depth_, count_;
    const bool fits_;
    const T* input_;
    const Row* few_ = nullptr;
    Row* tiles_ = nullptr;
};

// Writes `count` sums to `out`: rounded to T, + bias, + residual, each rounded to T, as it would be on its own. `Out` is T, or float for
// logits, which keep the bits that they have.
template <class T, class Out>
inline void finish(Floats value, int count, const T* bias, const T* residual, Out* out) {
    if (bias) value = rounded<T>(value) + load_some(bias, count);
    if (residual) value = rounded<T>(value) + load_some(residual, count);
    store_some(out, value, count);
}
