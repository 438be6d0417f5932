// Products of bf16 in the order of AMX: blocks of 32 of the depth, each summed as one `tdpbf16ps` does, by it or by its sums.
//
// A block adds to a sum C: C + (the sum of its 16 products at even places + the sum of those at odd ones), each of the two from 0 on, in
// order, by fused multiply-adds in float32 to which subnormal numbers are zeros. Source: the operation of TDPBF16PS in Intel's manual.
// AVX-512 and AVX2 take the same sums (BATON_BLOCKS without AMX), and so does a last row behind tiles. Half a panel of products.h, 16 steps
// of it, is the second operand of a tile product as it lies, and rows one behind the other are the first. Attention takes its queries and weights of
// values so, over pieces of keys.
#pragma once

#include "products.h"

constexpr int BLOCK_DEPTH = 32, TILE_ROWS = 16;
constexpr int64_t TILED_DEPTH = 288;  // of a chunk of a panel, 18 KiB of the nearest cache

#if defined(__AMX_BF16__)
constexpr int MIN_TILED = 1;  // rows of a product that are multiplied in tiles: where chains stand in for them, one row is faster as `add_row` takes it
#else
constexpr int MIN_TILED = 2;
#endif

#if defined(BATON_BLOCKS)
template <class F>
constexpr bool IN_TILES = std::is_same_v<F, bf16>;
#else
template <class F>
constexpr bool IN_TILES = false;
#endif

// Rows that are multiplied at once, at most.
template <class F>
constexpr int ROWS_AT_ONCE = IN_TILES<F> ? 2 * TILE_ROWS : MAX_ROWS;

// A depth in whole steps of F, or in whole blocks.
template <class F>
constexpr int64_t whole_depth(int64_t depth) {
    constexpr int64_t UNIT = IN_TILES<F> ? BLOCK_DEPTH : Product<F>::DEPTH;
    return (depth + UNIT - 1) / UNIT * UNIT;
}

template <class F>
struct Tiles {
    void add(auto&&...);  // where IN_TILES holds
    template <bool>
    void add_panels(auto&&...);
    void release();
};

#if defined(BATON_BLOCKS)

// What `ldtilecfg` reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

// Subnormal numbers are zeros to the thread until the object's end, as they always are to tiles. No load or store crosses either end, nor thus
// a sum of what was loaded behind the first and is stored before the last: to compilers arithmetic does not depend on this register.
class WithoutSubnormals {
   public:
    WithoutSubnormals() { set(before_ | 0x8040); }
    ~WithoutSubnormals() { set(before_); }

   private:
    static void set(unsigned mode) {
        asm volatile("" ::: "memory");
        _mm_setcsr(mode);
        asm volatile("" ::: "memory");
    }

    const unsigned before_ = _mm_getcsr();
};

// The first and the second numbers of sixteen pairs.
inline Floats evens(const bf16* pairs) { return as_floats(shifted(load_ints(pairs), 16)); }
inline Floats odds(const bf16* pairs) { return as_floats(load_ints(pairs) & int(0xffff0000)); }

inline void widen_block(const bf16* from, float* to) {
    for (int i = 0; i < BLOCK_DEPTH; i += LANES) store(to + i, load(from + i));
}

#if defined(__AMX_BF16__)

// The instructions. Compilers' own are macros, some of which do not tell that memory is read.
struct TileRegisters {
    struct Mode {};  // tiles ignore MXCSR

    static void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    static void release_tiles() { asm volatile("tilerelease"); }
    template <int TILE>
    static void load_tile(const void* p, int64_t stride_bytes) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(TILE) : "memory");
    }
    template <int TILE>
    static void zero_tile(const void*, int64_t) {
        asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
    }
    template <int TILE>
    static void store_tile(void* p, int64_t stride_bytes) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(TILE) : "memory");
    }
    template <int SUMS, int ROWS, int COLUMNS>
    static void multiply_tiles() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
    }
};

#else

// Adds to sums the products of rows with a block of sixteen columns, pairs `stride` apart: for each sum two chains.
template <int ROWS>
__attribute__((noinline)) void add_block(const float (*rows)[BLOCK_DEPTH], const bf16* columns, int64_t stride, float* sums, int64_t sum_stride) {
    Floats even[ROWS], odd[ROWS];
    for (int row = 0; row < ROWS; ++row) even[row] = odd[row] = splat(0);
    for (int k = 0; k < BLOCK_DEPTH; k += 2, columns += stride) {
        const Floats first = evens(columns);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) even[row] = fma(splat(rows[row][k]), first, even[row]);
        const Floats second = odds(columns);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) odd[row] = fma(splat(rows[row][k + 1]), second, odd[row]);
    }
    for (int row = 0; row < ROWS; ++row, sums += sum_stride) store(sums, load(sums) + (even[row] + odd[row]));
}

// The same where there are no tiles. Sums and columns are where they were loaded from, and are read and written there; rows are widened.
class TileRegisters {
   public:
    using Mode = WithoutSubnormals;

    void shape_tiles(const TileShapes& shapes) { std::copy_n(shapes.rows, 8, num_rows_of_); }
    void release_tiles() {}
    template <int TILE>
    void load_tile(const void* p, int64_t stride_bytes) {
        if constexpr (TILE == FIRST_ROWS || TILE == FIRST_ROWS + 1)
            for (int row = 0; row < num_rows_of_[TILE]; ++row) widen_block((const bf16*)((const char*)p + row * stride_bytes), rows_[TILE - FIRST_ROWS][row]);
        else
            places_[TILE] = {(char*)p, stride_bytes};
    }
    template <int TILE>
    void zero_tile(float* p, int64_t stride_bytes) {
        load_tile<TILE>(p, stride_bytes);
        for (int row = 0; row < num_rows_of_[TILE]; ++row) store((float*)((char*)p + row * stride_bytes), splat(0));
    }
    template <int TILE>
    void store_tile(void*, int64_t) {}
    template <int SUMS, int ROWS, int COLUMNS>
    void multiply_tiles() {
        const auto [sums, sum_bytes] = places_[SUMS];
        const auto [columns, pair_bytes] = places_[COLUMNS];
        for (int row = 0; row < num_rows_of_[SUMS]; row += CHAIN_ROWS)
            for_rows<CHAIN_ROWS>(std::min(CHAIN_ROWS, num_rows_of_[SUMS] - row), [&]<int COUNT>() {
                add_block<COUNT>(rows_[ROWS - FIRST_ROWS] + row, (const bf16*)columns, pair_bytes / sizeof(bf16), (float*)(sums + row * sum_bytes), sum_bytes / sizeof(float));
            });
    }

   private:
    static constexpr int FIRST_ROWS = 4;
#if defined(__AVX512F__)
    static constexpr int CHAIN_ROWS = 8;  // 16 chains of 32 registers
#else
    static constexpr int CHAIN_ROWS = 3;  // 12 registers of chains of 16
#endif
    struct Place {
        char* at;
        int64_t stride_bytes;
    };
    int num_rows_of_[8];
    Place places_[8];
    alignas(64) float rows_[2][TILE_ROWS][BLOCK_DEPTH];
};

#endif

// Adds to sums[column], or to zeros, the products of one row with blocks of a panel: in each a chain of even places, and one of odd places.
template <bool TO_ZEROS, class Beside>
__attribute__((noinline)) void add_row(const bf16* row, int64_t block_stride, const bf16* panel, int64_t num_blocks, float* sums, const Beside& ahead) {
    const WithoutSubnormals mode;
    alignas(64) float wide[BLOCK_DEPTH];
    if (TO_ZEROS) std::fill_n(sums, PANEL, 0.0f);
    for (int64_t block = 0; block < num_blocks; ++block, row += block_stride) {
        widen_block(row, wide);
        ahead(block * BLOCK_DEPTH, BLOCK_DEPTH);
        Floats even[2] = {splat(0), splat(0)}, odd[2] = {splat(0), splat(0)};
        for (int k = 0; k < BLOCK_DEPTH; k += 2, panel += 2 * PANEL)
            for (int half = 0; half < 2; ++half) {
                even[half] = fma(splat(wide[k]), evens(panel + half * PANEL), even[half]);
                odd[half] = fma(splat(wide[k + 1]), odds(panel + half * PANEL), odd[half]);
            }
        for (int half = 0; half < 2; ++half) store(sums + half * LANES, load(sums + half * LANES) + (even[half] + odd[half]));
    }
}

// The tile registers of a thread, in shapes for a number of rows. Given up by `release` or at the object's end: a library beside us shapes them
// for itself. Tiles 0 to 3 are sums, of both halves of a panel for the first rows, then for the others, or for another panel; 4 and 5 rows; 6 and 7 a
// panel's halves.
template <>
struct Tiles<bf16> : private TileRegisters {
   public:
    ~Tiles() { release(); }

    void release() {
        if (num_rows_) release_tiles();
        num_rows_ = num_others_ = 0;
    }

    // Adds to sums[row - begin][column], which begin at zeros for k = 0, the products of rows with `depth` of a panel, which is at k of theirs.
    // `Rows` is a RowTiles. ahead: what is brought nearer beside each tile of rows.
    template <class Rows, class Beside>
    void add(const Rows& rows, int64_t begin, int64_t end, int64_t k, const bf16* panel, int64_t depth, float* sums, const Beside& ahead) {
        for (int64_t row = begin; row < end; row += ROWS_AT_ONCE<bf16>, sums += ROWS_AT_ONCE<bf16> * PANEL) {
            const int count = rows.rows_in_tile(row);
            const int64_t block_stride = rows.step_stride(count);
            const bf16* first = rows.tile(row) + k / BLOCK_DEPTH * block_stride;
            if (k == 0)
                add<true>(first, rows.row_stride(), block_stride, count, panel, depth / BLOCK_DEPTH, sums, ahead);
            else
                add<false>(first, rows.row_stride(), block_stride, count, panel, depth / BLOCK_DEPTH, sums, ahead);
        }
    }

    // Adds to sums[row][column], sum_stride apart, or to zeros, the products of rows with panels, panel_stride apart, two at a time.
    template <bool TO_ZEROS>
    void add_panels(const bf16* rows, int64_t row_stride, int64_t block_stride, int num_rows, const bf16* panels, int64_t panel_stride, int64_t num_panels,
                    int64_t num_blocks, float* sums, int64_t sum_stride) {
        for (; num_rows > 0; num_rows -= TILE_ROWS, rows += TILE_ROWS * row_stride, sums += TILE_ROWS * sum_stride) {
            shape(std::min(TILE_ROWS, num_rows), std::min(TILE_ROWS, num_rows));
            int64_t panel = 0;
            for (; panel + 1 < num_panels; panel += 2)
                multiply<1, 2, TO_ZEROS>(rows, row_stride, block_stride, panels + panel * panel_stride, panel_stride, num_blocks, sums + panel * PANEL, sum_stride);
            if (panel < num_panels)
                multiply<1, 1, TO_ZEROS>(rows, row_stride, block_stride, panels + panel * panel_stride, 0, num_blocks, sums + panel * PANEL, sum_stride);
        }
    }

   private:
    template <bool TO_ZEROS, class Beside>
    void add(const bf16* rows, int64_t row_stride, int64_t block_stride, int count, const bf16* panel, int64_t num_blocks, float* sums, const Beside& ahead) {
        if (count == 1) return add_row<TO_ZEROS>(rows, block_stride, panel, num_blocks, sums, ahead);
        const int first = std::min(TILE_ROWS, count);
        shape(first, count - first);
        if (count <= TILE_ROWS)
            multiply<1, 1, TO_ZEROS>(rows, row_stride, block_stride, panel, 0, num_blocks, sums, PANEL, ahead);
        else
            multiply<2, 1, TO_ZEROS>(rows, row_stride, block_stride, panel, 0, num_blocks, sums, PANEL, ahead);
    }

    // num_others: rows of tiles 2, 3 and 5.
    void shape(int num_rows, int num_others) {
        if (num_rows == num_rows_ && num_others == num_others_) return;
        num_rows_ = num_rows, num_others_ = num_others;
        const int rows[] = {num_rows, num_rows, num_others, num_others, num_rows, num_others, TILE_ROWS, TILE_ROWS};
        TileShapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            shapes.rows[tile] = uint8_t(rows[tile]);
            shapes.row_bytes[tile] = rows[tile] ? 64 : 0;
        }
        shape_tiles(shapes);
    }

    // Of two tiles of rows with one panel, or of one with one or two panels.
    template <int ROW_TILES, int PANELS, bool TO_ZEROS, class Beside = Nothing>
    __attribute__((noinline)) void multiply(const bf16* rows, int64_t row_stride, int64_t block_stride, const bf16* panel, int64_t panel_stride,
                                            int64_t num_blocks, float* sums, int64_t sum_stride, const Beside& ahead = {}) {
        constexpr int64_t STRIDE = PANEL * sizeof(float);  // of a panel's steps
        const Mode mode;
        const int64_t row_bytes = row_stride * sizeof(bf16), sum_bytes = sum_stride * sizeof(float);
        float* others = sums + (ROW_TILES == 2 ? TILE_ROWS * sum_stride : PANEL);
        begin_sums<TO_ZEROS, 0>(sums, sum_bytes);
        if constexpr (ROW_TILES * PANELS == 2) begin_sums<TO_ZEROS, 2>(others, sum_bytes);
        for (int64_t block = 0; block < num_blocks; ++block, rows += block_stride, panel += BLOCK_DEPTH * PANEL) {
            ahead(block * BLOCK_DEPTH, BLOCK_DEPTH);
            load_tile<6>(panel, STRIDE), load_tile<7>(panel + PANEL, STRIDE);
            load_tile<4>(rows, row_bytes);
            multiply_tiles<0, 4, 6>(), multiply_tiles<1, 4, 7>();
            if constexpr (ROW_TILES == 2) {
                load_tile<5>(rows + TILE_ROWS * row_stride, row_bytes);
                multiply_tiles<2, 5, 6>(), multiply_tiles<3, 5, 7>();
            } else if constexpr (PANELS == 2) {
                load_tile<6>(panel + panel_stride, STRIDE), load_tile<7>(panel + panel_stride + PANEL, STRIDE);
                multiply_tiles<2, 4, 6>(), multiply_tiles<3, 4, 7>();
            }
        }
        store_tile<0>(sums, sum_bytes), store_tile<1>(sums + LANES, sum_bytes);
        if constexpr (ROW_TILES * PANELS == 2) store_tile<2>(others, sum_bytes), store_tile<3>(others + LANES, sum_bytes);
    }

    template <bool TO_ZEROS, int TILE>
    void begin_sums(float* sums, int64_t sum_bytes) {
        if constexpr (TO_ZEROS)
            zero_tile<TILE>(sums, sum_bytes), zero_tile<TILE + 1>(sums + LANES, sum_bytes);
        else
            load_tile<TILE>(sums, sum_bytes), load_tile<TILE + 1>(sums + LANES, sum_bytes);
    }

    int num_rows_ = 0, num_others_ = 0;
};

#endif
