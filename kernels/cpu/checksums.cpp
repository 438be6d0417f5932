// The sums of a payload, which kernels/cpu/checksums.py defines.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t CHUNK_WORDS = 512, PIECE_CHUNKS = 16, ROW_WORDS = 8, ROWS = CHUNK_WORDS / ROW_WORDS;

// The keys of the low and the high half of each word of a chunk.
using Keys = uint32_t[2 * CHUNK_WORDS];

struct Sums {
    uint64_t first = 0, second = 0;

    void add(uint64_t word, int64_t place, const Keys& keys) {
        const uint64_t product = uint64_t(uint32_t(word) + keys[2 * place]) * uint32_t(uint32_t(word >> 32) + keys[2 * place + 1]);
        first += product;
        second += uint64_t(ROWS - place / ROW_WORDS) * product + word;
    }
};

// A row is added to the first sums, and these to the second, so that its products count once for each row from it on.
Sums sum_chunk(const uint8_t* words, int64_t num_words, const Keys& keys) {
    Sums sums;
    int64_t row = 0;
#if defined(__AVX512F__)
    __m512i first = _mm512_setzero_si512(), second = first;
    for (; (row + 1) * ROW_WORDS <= num_words; ++row) {
        const __m512i here = _mm512_loadu_si512(words + 64 * row);
        const __m512i halves = _mm512_add_epi32(here, _mm512_loadu_si512(keys + 2 * ROW_WORDS * row));
        first = _mm512_add_epi64(first, _mm512_mul_epu32(halves, _mm512_srli_epi64(halves, 32)));
        second = _mm512_add_epi64(second, _mm512_add_epi64(first, here));
    }
    sums.first = _mm512_reduce_add_epi64(first);
    sums.second = _mm512_reduce_add_epi64(second);
#elif defined(__AVX2__)
    const auto load = [](const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); };
    __m256i first[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, second = first[0];
    for (; (row + 1) * ROW_WORDS <= num_words; ++row)
        for (int half = 0; half < 2; ++half) {
            const __m256i here = load(words + 64 * row + 32 * half);
            const __m256i halves = _mm256_add_epi32(here, load(keys + 2 * ROW_WORDS * row + ROW_WORDS * half));
            first[half] = _mm256_add_epi64(first[half], _mm256_mul_epu32(halves, _mm256_srli_epi64(halves, 32)));
            second = _mm256_add_epi64(second, _mm256_add_epi64(first[half], here));
        }
    uint64_t lanes[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(first[0], first[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes + 4), second);
    for (int lane = 0; lane < 4; ++lane) sums.first += lanes[lane], sums.second += lanes[4 + lane];
#endif
    sums.second += uint64_t(ROWS - row) * sums.first;
    for (int64_t place = row * ROW_WORDS; place < num_words; ++place) {
        uint64_t word;
        std::memcpy(&word, words + 8 * place, 8);
        sums.add(word, place, keys);
    }
    return sums;
}

}  // namespace

// keys: of a chunk, then of a piece. sums: two for each piece of the payload.
extern "C" void baton_sum_pieces(const uint8_t* payload, int64_t num_words, const Keys* keys, uint64_t* sums) {
    for (int64_t piece = 0; piece * PIECE_CHUNKS * CHUNK_WORDS < num_words; ++piece) {
        Sums both;
        for (int64_t place = 0; place < PIECE_CHUNKS; ++place) {
            const int64_t first = (piece * PIECE_CHUNKS + place) * CHUNK_WORDS;
            if (first >= num_words) break;
            const Sums chunk = sum_chunk(payload + 8 * first, std::min(CHUNK_WORDS, num_words - first), keys[0]);
            both.add(chunk.first, place, keys[1]);
            both.add(chunk.second, PIECE_CHUNKS + place, keys[1]);
        }
        sums[2 * piece] = both.first;
        sums[2 * piece + 1] = both.second;
    }
}
