// Linear layers: rows times packed weights, which have the dtype of the rows or eight bits.

#include <type_traits>
#include <vector>

#include "dtypes.h"
#include "products.h"
#include "threads.h"

namespace {

constexpr int64_t num_panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

template <class T>
int64_t num_steps(int64_t depth) {
    return (depth + Product<T>::DEPTH - 1) / Product<T>::DEPTH;
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

constexpr int GROUP = 64;  // weights of a column that share a scale

constexpr int64_t num_groups(int64_t depth) { return (depth + GROUP - 1) / GROUP; }

// weight [columns, depth] -> panels of bytes, and scales [panel][group][column], so that weight = byte * scale.
template <class T>
void pack_int8(const T* weight, int64_t columns, int64_t depth, int8_t* packed, float* scales) {
    constexpr int D = Product<T>::DEPTH;
    const int64_t steps = num_steps<T>(depth), groups = num_groups(depth);
    parallel(num_panels(columns), [&](int64_t panel) {
        for (int64_t group = 0; group < groups; ++group)
            for (int column = 0; column < PANEL; ++column) {
                const int64_t row = panel * PANEL + column, end = std::min(depth, (group + 1) * GROUP);
                float largest = 0;
                for (int64_t k = group * GROUP; k < end && row < columns; ++k)
                    largest = std::max(largest, std::abs(to_float(weight[row * depth + k])));
                scales[(panel * groups + group) * PANEL + column] = largest / 127;
                for (int64_t k = group * GROUP; k < std::min(steps * D, (group + 1) * GROUP); ++k) {
                    const float value = row < columns && k < depth ? to_float(weight[row * depth + k]) : 0;
                    packed[((panel * steps + k / D) * D + k % D) * PANEL + column] =
                        int8_t(largest > 0 ? std::nearbyint(value / largest * 127) : 0);
                }
            }
    });
}

template <class T>
void unpack_rows(const T* packed, const float*, const int64_t* ids, int64_t num_ids, int64_t depth, T* out) {
    constexpr int D = Product<T>::DEPTH;
    for (int64_t i = 0; i < num_ids; ++i) {
        const T* panel = packed + ids[i] / PANEL * num_steps<T>(depth) * PANEL * D;
        for (int64_t k = 0; k < depth; ++k) out[i * depth + k] = panel[(k / D * PANEL + ids[i] % PANEL) * D + k % D];
    }
}

template <class T>
void unpack_rows(const int8_t* packed, const float* scales, const int64_t* ids, int64_t num_ids, int64_t depth, T* out) {
    constexpr int D = Product<T>::DEPTH;
    for (int64_t i = 0; i < num_ids; ++i) {
        const int64_t panel = ids[i] / PANEL, column = ids[i] % PANEL;
        const int8_t* bytes = packed + panel * num_steps<T>(depth) * PANEL * D;
        for (int64_t k = 0; k < depth; ++k)
            from_float(to_float(bytes[k * PANEL + column]) * scales[(panel * num_groups(depth) + k / GROUP) * PANEL + column], out + i * depth + k);
    }
}

// Rows as the product wants them, in tiles of up to MAX_ROWS: tile[step][row][depth of a step]. Rows that lie far apart would
// push one another out of the nearest cache. A few rows are taken as they are where their dtype and depth fit.
template <class T>
class Rows {
    using Row = typename Product<T>::Row;
    static constexpr int D = Product<T>::DEPTH, FEW = 4;

   public:
    Rows(const T* input, int64_t count, int64_t depth)
        : steps_(num_steps<T>(depth)), depth_(depth), count_(count), fits_(std::is_same_v<T, Row> && depth % D == 0), input_(input) {
        if (is_as_it_was()) return;
        thread_local std::vector<Row> tiles;
        const int64_t num_tiles = (count + MAX_ROWS - 1) / MAX_ROWS;
        if (int64_t(tiles.size()) < num_tiles * tile_size()) tiles.resize(num_tiles * tile_size());
        tiles_ = tiles.data();
        parallel(num_tiles, [&](int64_t tile) { pack(tile); });
    }

    const Row* tile(int64_t row) const { return is_as_it_was() ? (const Row*)(input_ + row * depth_) : tiles_ + row / MAX_ROWS * tile_size(); }
    int64_t row_stride() const { return is_as_it_was() ? depth_ : D; }
    int64_t step_stride(int num_rows) const { return is_as_it_was() ? D : num_rows * D; }
    int rows_in_tile(int64_t row) const { return int(std::min<int64_t>(MAX_ROWS, count_ - row)); }

   private:
    bool is_as_it_was() const { return fits_ && count_ <= FEW; }
    int64_t tile_size() const { return (steps_ * MAX_ROWS + LANES) * D; }  // the last step is written with all lanes

    void pack(int64_t tile) {
        static_assert(sizeof(Row) * D == sizeof(uint32_t));
        thread_local std::vector<Row> copies;
        const int num_rows = rows_in_tile(tile * MAX_ROWS);
        const uint32_t* rows[LANES];
        if (!fits_) copies.assign(MAX_ROWS * steps_ * D, Row{});
        for (int row = 0; row < num_rows; ++row) {
            const T* from = input_ + (tile * MAX_ROWS + row) * depth_;
            if (!fits_) convert(from, copies.data() + row * steps_ * D, depth_);
            rows[row] = fits_ ? (const uint32_t*)from : (const uint32_t*)(copies.data() + row * steps_ * D);
        }
        for (int row = num_rows; row < LANES; ++row) rows[row] = rows[0];  // lanes that the next step overwrites
        transpose(rows, steps_, (uint32_t*)(tiles_ + tile * tile_size()), num_rows);
    }

    const int64_t steps_, depth_, count_;
    const bool fits_;
    const T* input_;
    Row* tiles_ = nullptr;
};

// out [rows, columns] = input [rows, depth] . weight^T, + bias [columns], + residual [rows, columns], each sum rounded to
// T, as it would be on its own. `Out` is T, or float for logits, which keep the bits that they have. `W` is T, or int8_t with scales.
template <class T, class W, class Out>
struct Linear {
    static constexpr int D = Product<T>::DEPTH;
    Rows<T> rows;
    const W* packed;
    const float* scales;
    const T* bias;
    const T* residual;
    Out* out;
    int64_t num_rows, columns, depth, steps;

    // Columns from first_panel on, for all rows.
    template <int ROWS, int PANELS>
    void tile(int64_t row, int64_t first_panel) const {
        Floats sums[ROWS][2 * PANELS];
        clear(sums);
        if constexpr (std::is_same_v<W, T>)
            add<ROWS, PANELS>(row, first_panel, 0, steps, sums);
        else
            for (int64_t group = 0; group < num_groups(depth); ++group) add_group<ROWS, PANELS>(row, first_panel, group, sums);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < 2 * PANELS; ++v) finish(sums[r][v], row + r, first_panel * PANEL + v * LANES);
    }

    template <int ROWS, int PANELS>
    void add(int64_t row, int64_t first_panel, int64_t first_step, int64_t count, Floats (&sums)[ROWS][2 * PANELS]) const {
        const int64_t step_stride = rows.step_stride(ROWS), panel_stride = steps * PANEL * D;
        multiply<T, ROWS, PANELS>(rows.tile(row) + first_step * step_stride, rows.row_stride(), step_stride,
                                  packed + first_panel * panel_stride + first_step * PANEL * D, panel_stride, count, sums);
    }

    template <int ROWS, int PANELS>
    void add_group(int64_t row, int64_t first_panel, int64_t group, Floats (&sums)[ROWS][2 * PANELS]) const {
        constexpr int64_t STEPS = GROUP / D;
        Floats of_group[ROWS][2 * PANELS];
        clear(of_group);
        add<ROWS, PANELS>(row, first_panel, group * STEPS, std::min(STEPS, steps - group * STEPS), of_group);
        for (int v = 0; v < 2 * PANELS; ++v) {
            const Floats scale = load(scales + ((first_panel + v / 2) * num_groups(depth) + group) * PANEL + v % 2 * LANES);
            for (int r = 0; r < ROWS; ++r) sums[r][v] = fma(of_group[r][v], scale, sums[r][v]);
        }
    }

    template <int ROWS, int VECTORS>
    static void clear(Floats (&sums)[ROWS][VECTORS]) {
        for (auto& of_row : sums)
            for (Floats& sum : of_row) sum = splat(0);
    }

    void finish(Floats value, int64_t row, int64_t column) const {
        const int count = int(std::min<int64_t>(LANES, columns - column));
        if (count <= 0) return;
        if (bias) value = rounded<T>(value) + load_some(bias + column, count);
        if (residual) value = rounded<T>(value) + load_some(residual + row * columns + column, count);
        store_some(out + row * columns + column, value, count);
    }

    void panels(int64_t first_panel, int64_t last_panel) const {
        for (int64_t row = 0; row < num_rows; row += MAX_ROWS) {
            for_rows(rows.rows_in_tile(row), [&]<int ROWS>() {
                for_panels<ROWS>(last_panel - first_panel, [&]<int PANELS>(int64_t panel) { tile<ROWS, PANELS>(row, first_panel + panel); });
            });
        }
    }

    void run() const {
        constexpr int64_t PER_UNIT = 4;
        const int64_t total = num_panels(columns);
        parallel((total + PER_UNIT - 1) / PER_UNIT, [&](int64_t unit) {
            panels(unit * PER_UNIT, std::min(total, (unit + 1) * PER_UNIT));
        });
    }
};

template <class T, class Out>
void linear(const void* input, const void* packed, const float* scales, const void* bias, const void* residual, void* out,
            int64_t num_rows, int64_t columns, int64_t depth) {
    const auto run = [&]<class W>(const W* weights) {
        Linear<T, W, Out>{Rows<T>((const T*)input, num_rows, depth), weights, scales, (const T*)bias, (const T*)residual, (Out*)out,
                          num_rows, columns, depth, num_steps<T>(depth)}
            .run();
    };
    scales ? run((const int8_t*)packed) : run((const T*)packed);
}

}  // namespace

// The number of elements of weight [columns, depth] once packed.
extern "C" int64_t baton_packed_size(int dtype, int64_t columns, int64_t depth) {
    int64_t size = 0;
    FOR_DTYPE(dtype, size = num_panels(columns) * PANEL * num_steps<T>(depth) * Product<T>::DEPTH)
    return size;
}

extern "C" void baton_pack(int dtype, const void* weight, int64_t columns, int64_t depth, void* packed) {
    FOR_DTYPE(dtype, pack((const T*)weight, columns, depth, (T*)packed))
}

// To int8: as many bytes, and a float32 scale for each column of a panel and each 64 of the depth.
extern "C" void baton_pack_int8(int dtype, const void* weight, int64_t columns, int64_t depth, int8_t* packed, float* scales) {
    FOR_DTYPE(dtype, pack_int8((const T*)weight, columns, depth, packed, scales))
}

// out [num_ids, depth] = the rows `ids` of a packed weight; scales: of int8, or null.
extern "C" void baton_unpack_rows(int dtype, const void* packed, const float* scales, const int64_t* ids, int64_t num_ids, int64_t depth,
                                  void* out) {
    FOR_DTYPE(dtype, scales ? unpack_rows((const int8_t*)packed, scales, ids, num_ids, depth, (T*)out)
                            : unpack_rows((const T*)packed, scales, ids, num_ids, depth, (T*)out))
}

extern "C" void baton_linear(int dtype, const void* input, const void* packed, const float* scales, const void* bias,
                             const void* residual, void* out, int64_t num_rows, int64_t columns, int64_t depth) {
    FOR_DTYPE(dtype, linear<T, T>(input, packed, scales, bias, residual, out, num_rows, columns, depth))
}

// The same with float32 out, for the head.
extern "C" void baton_linear_to_float(int dtype, const void* input, const void* packed, const float* scales, float* out,
                                      int64_t num_rows, int64_t columns, int64_t depth) {
    FOR_DTYPE(dtype, linear<T, float>(input, packed, scales, nullptr, nullptr, out, num_rows, columns, depth))
}

RECORDABLE(baton_unpack_rows)
RECORDABLE(baton_linear)
RECORDABLE(baton_linear_to_float)
