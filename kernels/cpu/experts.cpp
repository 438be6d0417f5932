// A mixture of experts: the choice of each row's experts, products of rows with the matrices of their own, and the sums of these.
// Source: arXiv 2101.03961. Rows of an expert are multiplied as `linear` multiplies them, so that a row has the bits that it has alone.

#include <limits>
#include <vector>

#include "dtypes.h"
#include "linear.h"
#include "threads.h"

namespace {

// As kernels/routing.py numbers them.
enum Gating { OF_ALL, OF_ALL_NORMED, OF_CHOSEN };

// NaN ranks last.
inline float rank(float logit) { return logit == logit ? logit : -std::numeric_limits<float>::infinity(); }

// Lists the experts with the largest logits, in descending order; of equal logits the first expert's counts as larger.
void choose(const float* logits, int64_t num_experts, int64_t num_chosen, int32_t* chosen) {
    int64_t count = 0;
    for (int64_t i = 0; i < num_experts; ++i) {
        const float value = rank(logits[i]);
        int64_t place = count;
        while (place > 0 && value > rank(logits[chosen[place - 1]])) --place;
        if (place == num_chosen) continue;
        count = std::min(count + 1, num_chosen);
        std::copy_backward(chosen + place, chosen + count - 1, chosen + count);
        chosen[place] = int32_t(i);
    }
}

// The sum of e^(logit - largest), always over the same tree.
float sum_of_powers(const float* logits, int64_t count, float largest) {
    Floats total = splat(0);
    for_columns(count, [&](int64_t first, int lanes) {
        float powers[LANES];
        store(powers, exponential(load_some(logits + first, lanes) - splat(largest)));
        std::fill(powers + lanes, powers + LANES, 0.0f);
        total = total + load(powers);
    });
    return sum(total);
}

template <class T>
void route(const T* row, int64_t num_experts, int64_t num_chosen, Gating kind, int32_t* experts, float* shares) {
    thread_local std::vector<float> wide;
    wide.resize(num_experts);
    convert(row, wide.data(), num_experts);
    const float* logits = wide.data();
    choose(logits, num_experts, num_chosen, experts);
    const float largest = logits[experts[0]];
    std::sort(experts, experts + num_chosen);
    for (int64_t j = 0; j < num_chosen; ++j) shares[j] = exponential(logits[experts[j]] - largest);
    const auto divide = [&](float by) {
        for (int64_t j = 0; j < num_chosen; ++j) shares[j] /= by;
    };
    const auto of_chosen = [&] {
        float total = 0;
        for (int64_t j = 0; j < num_chosen; ++j) total += shares[j];
        return total;
    };
    if (kind != OF_CHOSEN) divide(sum_of_powers(logits, num_experts, largest));
    if (kind != OF_ALL) divide(of_chosen());
}

// Adds up a token's rows in their order, then the residual; rounds once.
template <class T>
void combine(const T* rows, const float* shares, int64_t num_chosen, int64_t columns, const T* residual, T* out) {
    for_columns(columns, [&](int64_t column, int count) {
        Floats total = splat(0);
        for (int64_t j = 0; j < num_chosen; ++j) total = total + splat(shares[j]) * load_some(rows + j * columns + column, count);
        store_some(out + column, residual ? load_some(residual + column, count) + total : total, count);
    });
}

// An expert's matrix. `Experts.table` in backend.py has the same fields in the same order.
struct Expert {
    const void* data;
    int64_t is_packed;
};

// The arguments of a product. experts [num_rows]: of rows of the product, `fan` of each row of the input.
template <class T>
struct ExpertLinear {
    const T* input;
    const Expert* table;
    const T* bias;
    const int32_t* experts;
    T* out;
    int64_t num_rows, num_experts, fan, columns, depth;

    void run() const {
        const auto sorted = sort();
        multiply<PlainMatrix<T>>(sorted, false);
        multiply<PackedMatrix<T>>(sorted, true);
    }

   private:
    // Rows of the product by expert, in their order: those of expert e are places[starts[e]] to places[starts[e + 1] - 1].
    struct Sorted {
        std::vector<int32_t> places;
        std::vector<int64_t> starts;
    };

    Sorted sort() const {
        Sorted sorted{std::vector<int32_t>(num_rows), std::vector<int64_t>(num_experts + 2)};
        int64_t* ends = sorted.starts.data() + 1;
        for (int64_t row = 0; row < num_rows; ++row) ++ends[experts[row] + 1];
        for (int64_t e = 0; e < num_experts; ++e) ends[e + 1] += ends[e];
        for (int64_t row = 0; row < num_rows; ++row) sorted.places[ends[experts[row]]++] = int32_t(row);
        return sorted;
    }

    // Packs the rows of all experts, then multiplies a few panels of one expert in each unit.
    template <class Matrix>
    void multiply(const Sorted& sorted, bool is_packed) const {
        using Row = typename Matrix::Row;
        struct Group {
            int64_t expert;
            Matrix matrix;
            RowTiles<T, Row> rows;
        };
        struct Unit {
            const Group* group;
            int64_t first;
        };
        thread_local std::vector<Row, Aligned<Row>> room;
        std::vector<Group> groups;
        std::vector<Unit> packs, units;
        groups.reserve(std::min(num_rows, num_experts));
        int64_t room_size = 0;
        for (int64_t e = 0; e < num_experts; ++e) {
            const int64_t start = sorted.starts[e], count = sorted.starts[e + 1] - start;
            if (count == 0 || bool(table[e].is_packed) != is_packed) continue;
            const Matrix matrix{table[e].data, columns, depth};
            groups.push_back({e, matrix, {input, count, depth, matrix.padded_depth(), {sorted.places.data() + start, fan}}});
            room_size += groups.back().rows.room_size();
        }
        if (int64_t(room.size()) < room_size) room.resize(room_size);
        Row* next = room.data();
        for (Group& group : groups) {
            group.rows.place(next);
            next += group.rows.room_size();
            for (int64_t i = 0; i < group.rows.num_packs(); ++i) packs.push_back({&group, i});
            for (int64_t i = 0; i < group.matrix.num_panels(); i += Matrix::PANELS_PER_UNIT) units.push_back({&group, i});
        }
        parallel(packs.size(), [&](int64_t i) { packs[i].group->rows.pack(packs[i].first); });
        parallel(units.size(), [&](int64_t i) {
            const auto [group, first] = units[i];
            const int64_t last = std::min(group->matrix.num_panels(), first + Matrix::PANELS_PER_UNIT);
            group->matrix.multiply(group->rows, bias ? bias + group->expert * columns : nullptr, out, first, last);
        });
    }
};

}  // namespace

// logits [rows, num_experts] -> experts, shares [rows, num_chosen], experts ascending in each row.
extern "C" void baton_route(int dtype, int shares, const void* logits, int64_t num_rows, int64_t num_experts, int64_t num_chosen, int32_t* experts,
                            float* of_experts) {
    FOR_DTYPE(dtype, for_each_row(num_rows, [&](int64_t row) {
                  route((const T*)logits + row * num_experts, num_experts, num_chosen, Gating(shares), experts + row * num_chosen, of_experts + row * num_chosen);
              }))
}

// out [rows * num_chosen, columns] = input . weight^T + bias of each row's expert; input [rows * num_chosen / fan, depth], bias [num_experts, columns].
extern "C" void baton_expert_linear(int dtype, const void* input, const Expert* table, const void* bias, const int32_t* experts, void* out, int64_t num_rows,
                                    int64_t num_chosen, int64_t num_experts, int64_t fan, int64_t columns, int64_t depth) {
    FOR_DTYPE(dtype, ExpertLinear<T>{(const T*)input, table, (const T*)bias, experts, (T*)out, num_rows * num_chosen, num_experts, fan, columns, depth}.run())
}

// out [rows, columns] = residual + the sum of share * row over `num_chosen` of rows [rows * num_chosen, columns]; residual may be null, or out.
extern "C" void baton_combine(int dtype, const void* rows, const float* shares, const void* residual, int64_t num_rows, int64_t num_chosen, int64_t columns,
                              void* out) {
    FOR_DTYPE(dtype, for_each_row(num_rows, [&](int64_t row) {
                  const T* added = residual ? (const T*)residual + row * columns : nullptr;
                  combine((const T*)rows + row * num_chosen * columns, shares + row * num_chosen, num_chosen, columns, added, (T*)out + row * columns);
              }))
}

RECORDABLE(baton_route)
RECORDABLE(baton_expert_linear)
RECORDABLE(baton_combine)
