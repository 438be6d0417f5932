// Sixteen floats at a time, on every instruction set: AVX-512, AVX2 as two halves, or plain loops.
//
// All kernels are written over these, so that a sum is taken in the same order on all of them. The compiler may neither
// contract nor reorder (-ffp-contract=off, no -ffast-math): the numbers are those that are written here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

struct fp8 {  // e4m3: no infinity; its NaN is never written
    uint8_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(int8_t value) { return value; }

inline float to_float(bf16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

#if defined(__F16C__)
inline float to_float(f16 value) { return _cvtsh_ss(value.bits); }
#else
inline float to_float(f16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, magnitude = value.bits & 0x7fff;
    if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // infinity, NaN
    // A float with the exponent of a half, times 2^112, is the half: exactly, subnormal ones too.
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}
#endif

// A float with the exponent of an fp8, times 2^120, is the fp8: exactly, subnormal ones too.
inline float to_float(fp8 value) { return bits_to_float(uint32_t(value.bits & 0x80) << 24 | uint32_t(value.bits & 0x7f) << 20) * 0x1p120f; }

// Rounds to the nearest, ties to even.
inline void from_float(float value, float* out) { *out = value; }

inline void from_float(float value, bf16* out) {
    const uint32_t bits = float_to_bits(value);
    out->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__F16C__)
inline void from_float(float value, f16* out) { out->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
inline void from_float(float value, f16* out) {
    const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        out->bits = 0x7e00;
    } else if (magnitude >= 0x477ff000) {
        out->bits = uint16_t(sign | 0x7c00);  // rounds to infinity
    } else if (magnitude < 0x38800000) {      // subnormal: adding 0.5 leaves the right bits at the end, rounded
        out->bits = uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
    } else {
        out->bits = uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
    }
}
#endif

// At most 127, or 448, either way.
inline void from_float(float value, int8_t* out) { *out = int8_t(std::nearbyint(value)); }

inline void from_float(float value, fp8* out) {
    const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x3c000000 + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0x1p14f) - 0x46800000;  // its last bit stands for 2^-9
    out->bits = uint8_t(bits >> 24 & 0x80 | (magnitude < 0x3c800000 ? subnormal : normal));
}

#if defined(__AVX512F__)

struct Floats {
    __m512 v;
};

inline Floats splat(float value) { return {_mm512_set1_ps(value)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Floats load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Floats load(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline Floats load(const fp8* p) {  // a half with the bits of an fp8, times 2^8, is the fp8: exactly, subnormal ones too
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(short(0xbf80)))), _mm512_set1_ps(256))};
}
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16* p, Floats a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
inline void store(f16* p, Floats a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Floats scale_by_power(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }


struct Ints {
    __m512i v;
};

inline Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Ints shifted(Ints a, int left) { return {left < 0 ? _mm512_srli_epi32(a.v, -left) : left ? _mm512_slli_epi32(a.v, left) : a.v}; }
inline Ints operator&(Ints a, int mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(mask))}; }

template <int BYTES>
inline Ints load_ints(const void* p) {
    if constexpr (BYTES == 1) return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))};
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))};
}
inline Ints selected(int mask, Ints a, Ints b) { return {_mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), a.v, b.v, 0xca)}; }
inline Floats as_floats(Ints a) { return {_mm512_castsi512_ps(a.v)}; }

// The number in the BITS bits from CODE_PLACE up, plus CODE_ADDEND: looked up, or put below the exponent of 64.
template <int BITS>
constexpr int CODE_PLACE = BITS == 6 ? 17 : 0;
template <int BITS>
constexpr float CODE_ADDEND = BITS == 6 ? 64 : 0;
template <int BITS>
inline Floats to_floats(Ints a) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if constexpr (BITS == 4) return {_mm512_permutexvar_ps(a.v, numbers)};
    if constexpr (BITS == 5) return {_mm512_permutex2var_ps(numbers, a.v, _mm512_add_ps(numbers, _mm512_set1_ps(16)))};
    return {_mm512_castsi512_ps(selected(63 << 17, a, Ints{_mm512_castps_si512(_mm512_set1_ps(64))}).v)};
}
inline Floats looked_up(Floats table, Ints a) { return {_mm512_permutexvar_ps(a.v, table.v)}; }  // by the low 4 bits
inline Floats exponents(Floats a) { return {_mm512_castsi512_ps((Ints{_mm512_castps_si512(a.v)} & 0x7f800000).v)}; }

#elif defined(__AVX2__)

struct Floats {
    __m256 lo, hi;
};

inline Floats splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
inline Floats load(const bf16* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline Floats load(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline Floats load(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline __m256 widen_fp8(__m128i eight) {
    const __m256i bytes = _mm256_cvtepi8_epi32(eight), sign = _mm256_set1_epi32(int(0x80000000));
    const __m256i rest = _mm256_and_si256(_mm256_slli_epi32(bytes, 20), _mm256_set1_epi32(0x07f00000));
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(bytes, sign), rest)), _mm256_set1_ps(0x1p120f));
}
inline Floats load(const fp8* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {widen_fp8(bytes), widen_fp8(_mm_srli_si128(bytes, 8))};
}
inline void store(float* p, Floats a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
#if defined(BATON_BLOCKS)
// A number as the conversion of AVX-512 rounds it: NaN stays NaN, and a subnormal number becomes zero.
inline __m256i narrow(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
    const __m256i last = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, last), _mm256_set1_epi32(0x7fff)), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i is_small = _mm256_cmpeq_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000)), _mm256_setzero_si256());
    const __m256i of_number = _mm256_blendv_epi8(nearest, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), is_small);
    return _mm256_blendv_epi8(of_number, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}
inline void store_words(bf16* p, __m256i lo, __m256i hi) {
    const __m256i in_turns = _mm256_packus_epi32(lo, hi);  // four of each half
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(in_turns, 0b11011000));
}
inline void store(bf16* p, Floats a) { store_words(p, narrow(a.lo), narrow(a.hi)); }
// Numbers that bf16 can hold.
inline void store_high(bf16* p, Floats a) {
    store_words(p, _mm256_srli_epi32(_mm256_castps_si256(a.lo), 16), _mm256_srli_epi32(_mm256_castps_si256(a.hi), 16));
}
#else
inline void store(bf16* p, Floats a) {
    float values[LANES];
    store(values, a);
    for (int i = 0; i < LANES; ++i) from_float(values[i], p + i);
}
#endif
inline void store(f16* p, Floats a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats round(Floats a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
inline Floats scale_by_power(Floats a, Floats n) { return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)}; }

struct Ints {
    __m256i lo, hi;
};

inline Ints load_ints(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
template <int BYTES>
inline Ints load_ints(const void* p) {
    const __m128i* at = (const __m128i*)p;
    if constexpr (BYTES == 1) return {_mm256_cvtepu8_epi32(_mm_loadu_si128(at)), _mm256_cvtepu8_epi32(_mm_srli_si128(_mm_loadu_si128(at), 8))};
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
}
inline __m256i shifted(__m256i a, int left) { return left < 0 ? _mm256_srli_epi32(a, -left) : left ? _mm256_slli_epi32(a, left) : a; }
inline Ints shifted(Ints a, int left) { return {shifted(a.lo, left), shifted(a.hi, left)}; }
inline Ints operator&(Ints a, int mask) {
    return {_mm256_and_si256(a.lo, _mm256_set1_epi32(mask)), _mm256_and_si256(a.hi, _mm256_set1_epi32(mask))};
}
inline Ints operator|(Ints a, Ints b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline Floats as_floats(Ints a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Ints as_ints(Floats a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline __m256 looked_up(Floats table, __m256i a) {
    const __m256 of_first = _mm256_permutevar8x32_ps(table.lo, a), of_last = _mm256_permutevar8x32_ps(table.hi, a);
    return _mm256_blendv_ps(of_first, of_last, _mm256_castsi256_ps(_mm256_slli_epi32(a, 28)));
}
inline Floats looked_up(Floats table, Ints a) { return {looked_up(table, a.lo), looked_up(table, a.hi)}; }  // by the low 4 bits
inline Floats exponents(Floats a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}

#else

struct Floats {
    float v[LANES];
};

template <class Function>
inline Floats each(Function function) {
    Floats out;
    for (int i = 0; i < LANES; ++i) out.v[i] = function(i);
    return out;
}

inline Floats splat(float value) {
    return each([&](int) { return value; });
}
template <class T>
inline Floats load(const T* p) {
    return each([&](int i) { return to_float(p[i]); });
}
template <class T>
inline void store(T* p, Floats a) {
    for (int i = 0; i < LANES; ++i) from_float(a.v[i], p + i);
}
inline Floats operator+(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats operator-(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats operator*(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats operator/(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // rounded twice: fused, it would be a library's call
inline Floats max(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats round(Floats a) {
    return each([&](int i) { return std::nearbyintf(a.v[i]); });
}
inline Floats scale_by_power(Floats a, Floats n) {
    return each([&](int i) { return a.v[i] * bits_to_float(uint32_t(int(n.v[i]) + 127) << 23); });
}

struct Ints {
    uint32_t v[LANES];
};

template <class Function>
inline Ints each_int(Function function) {
    Ints out;
    for (int i = 0; i < LANES; ++i) out.v[i] = function(i);
    return out;
}

inline Ints load_ints(const void* p) {
    Ints out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
template <int BYTES>
inline Ints load_ints(const void* p) {
    using T = std::conditional_t<BYTES == 1, uint8_t, uint16_t>;
    return each_int([&](int i) { return ((const T*)p)[i]; });
}
inline Ints shifted(Ints a, int left) {
    return each_int([&](int i) { return left < 0 ? a.v[i] >> -left : a.v[i] << left; });
}
inline Ints operator&(Ints a, int mask) {
    return each_int([&](int i) { return a.v[i] & uint32_t(mask); });
}
inline Ints operator|(Ints a, Ints b) {
    return each_int([&](int i) { return a.v[i] | b.v[i]; });
}
inline Floats to_floats(Ints a) {
    return each([&](int i) { return float(int32_t(a.v[i])); });
}
inline Floats looked_up(Floats table, Ints a) {  // by the low 4 bits
    return each([&](int i) { return table.v[a.v[i] & 15]; });
}
inline Floats exponents(Floats a) {
    return each([&](int i) { return bits_to_float(float_to_bits(a.v[i]) & 0x7f800000); });
}

#endif

#if !defined(__AVX512F__)
inline Ints selected(int mask, Ints a, Ints b) { return (a & mask) | (b & ~mask); }
template <int BITS>
constexpr int CODE_PLACE = 0;
template <int BITS>
constexpr float CODE_ADDEND = 0;
template <int BITS>
inline Floats to_floats(Ints a) {
    return to_floats(a & (1 << BITS) - 1);
}
#endif

// The first `count` of 16 values, and zeros.
template <class T>
inline Floats load_some(const T* p, int count) {
    if (count == LANES) return load(p);
    T padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

template <class T>
inline void store_some(T* p, Floats a, int count) {
    if (count == LANES) return store(p, a);
    T padded[LANES];
    store(padded, a);
    std::memcpy(p, padded, count * sizeof(T));
}

// Calls function(column, count) for each 16 columns; the last ones may be fewer.
template <class Function>
inline void for_columns(int64_t columns, const Function& function) {
    for (int64_t column = 0; column < columns; column += LANES)
        function(column, int(columns - column < LANES ? columns - column : LANES));
}

// As T holds the values.
template <class T>
inline Floats rounded(Floats value) {
    T narrow[LANES];
    store(narrow, value);
    return load(narrow);
}

// As T holds values that are 0 or normal and less than 2^110; a zero loses its sign. For bf16, 1.5 * 2^16 times a value's power of
// two is added and taken away: the last bit of such a sum stands where bf16 has its last, and is rounded to even.
template <class T>
inline Floats nearest(Floats value) {
    if constexpr (std::is_same_v<T, float>) return value;
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, bf16>) {
        const Floats powers = exponents(value), sum = fma(powers, splat(0x1.8p16f), value);
        return fma(powers, splat(-0x1.8p16f), sum);
    }
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm512_cvtps_ph(value.v, _MM_FROUND_TO_NEAREST_INT))};
#else
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT;
    return {_mm256_cvtph_ps(_mm256_cvtps_ph(value.lo, mode)), _mm256_cvtph_ps(_mm256_cvtps_ph(value.hi, mode))};
#endif
#else
    return rounded<T>(value);
#endif
}

// Sums and maxima of all lanes, always over the same tree: lane i with lane i + 8, then + 4, + 2, + 1.
#if defined(__AVX2__)
template <class Function>
inline float reduce(Floats a, Function&& function) {
#if defined(__AVX512F__)
    const __m256 of_8 = function(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    const __m256 of_8 = function(a.lo, a.hi);
#endif
    const __m256 of_4 = function(of_8, _mm256_permute2f128_ps(of_8, of_8, 1));
    const __m256 of_2 = function(of_4, _mm256_permute_ps(of_4, 0b01001110));
    return _mm256_cvtss_f32(function(of_2, _mm256_permute_ps(of_2, 0b10110001)));
}
inline float sum(Floats a) {
    return reduce(a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
}
inline float largest(Floats a) {
    return reduce(a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
}
#else
inline float sum(Floats a) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    return a.v[0];
}
inline float largest(Floats a) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    return a.v[0];
}
#endif

// The sums, and the maxima, of the lanes of each of the first `count` of LANES vectors, over the tree of `sum` and `largest`. The results behind them are
// undefined.
#if defined(__AVX512F__)
template <class Function>
inline Floats reduce_each(const Floats* rows, Function&& function) {
    __m512 of_8[8], of_4[4], of_2[2];  // 8 partial results of each of 2 rows, 4 of 4, 2 of 8
    for (int i = 0; i < 8; ++i) {
        const __m512 a = rows[2 * i].v, b = rows[2 * i + 1].v;
        of_8[i] = function(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 a = of_8[2 * i], b = of_8[2 * i + 1];
        of_4[i] = function(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512 a = of_4[2 * i], b = of_4[2 * i + 1];
        of_2[i] = function(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    const __m512 all = function(_mm512_shuffle_ps(of_2[0], of_2[1], 0x88), _mm512_shuffle_ps(of_2[0], of_2[1], 0xdd));
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return {_mm512_permutexvar_ps(in_order, all)};
}
inline Floats sum_each(const Floats* rows, int) {
    return reduce_each(rows, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); });
}
inline Floats largest_each(const Floats* rows, int) {
    return reduce_each(rows, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
}
#else
inline Floats sum_each(const Floats* rows, int count) {
    float sums[LANES] = {};
    for (int i = 0; i < count; ++i) sums[i] = sum(rows[i]);
    return load(sums);
}
inline Floats largest_each(const Floats* rows, int count) {
    float all[LANES] = {};
    for (int i = 0; i < count; ++i) all[i] = largest(rows[i]);
    return load(all);
}
#endif

// A power of e in parts: x = n ln 2 + r, |r| <= ln 2 / 2, and e^r = 1 + r * rise, by its Taylor polynomial of degree 7.
struct Parts {
    Floats n, r, rise;
};

inline Parts in_parts(Floats x) {
    const Floats n = round(max(splat(-126.0f), x * splat(0x1.715476p+0f)));  // max takes the second operand for NaN
    const Floats r = fma(n, splat(0x1.05c61p-29f), fma(n, splat(-0x1.62e43p-1f), x));
    Floats rise = splat(1.0f / 5040);
    for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f}) rise = fma(rise, r, splat(coefficient));
    return {n, r, rise};
}

// e^x for x <= 88; 0 below -87.3, where the result would be subnormal; NaN stays NaN. Within 2 units of the last place.
inline Floats exponential(Floats x) {
    const auto [n, r, rise] = in_parts(x);
    const Floats y = scale_by_power(fma(rise, r, splat(1.0f)), n);
#if defined(__AVX512F__)
    return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.3f), _CMP_LT_OQ), _mm512_setzero_ps())};
#elif defined(__AVX2__)
    const __m256 least = _mm256_set1_ps(-87.3f);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, least, _CMP_LT_OQ), y.lo), _mm256_andnot_ps(_mm256_cmp_ps(x.hi, least, _CMP_LT_OQ), y.hi)};
#else
    return each([&](int i) { return x.v[i] < -87.3f ? 0.0f : y.v[i]; });
#endif
}

// 2^x for x < 128; 0 below -126, where the result would be subnormal; NaN stays NaN. A minimax polynomial of degree 4, whose error is
// 2^-18 of the result: for numbers that become bf16.
inline Floats power_of_two(Floats x) {
    const Floats n = round(x), f = x - n;
    Floats y = splat(0x1.3a02cap-7f);
    for (float coefficient : {0x1.c9fc46p-5f, 0x1.ec0378p-3f, 0x1.62e12cp-1f, 1.0f}) y = fma(y, f, splat(coefficient));
#if defined(__AVX512F__)
    return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126), _CMP_NLT_UQ), y.v, n.v)};
#elif defined(__AVX2__)
    const Floats power = scale_by_power(y, n);
    const __m256 least = _mm256_set1_ps(-126);
    return {_mm256_and_ps(_mm256_cmp_ps(x.lo, least, _CMP_NLT_UQ), power.lo), _mm256_and_ps(_mm256_cmp_ps(x.hi, least, _CMP_NLT_UQ), power.hi)};
#else
    return each([&](int i) { return x.v[i] < -126 ? 0.0f : y.v[i] * bits_to_float(uint32_t(int(n.v[i]) + 127) << 23); });
#endif
}

// tanh x = p / (p + 2) with p = e^2x - 1 = 2^n r rise + (2^n - 1), in which nothing is lost where x is small. NaN stays NaN.
inline Floats tanh(Floats x) {
    const Floats at_most_20 = splat(0.0f) - max(splat(-20.0f), x * splat(-2.0f));  // of 2x: beyond, the result is 1 or -1
    const auto [n, r, rise] = in_parts(max(splat(-20.0f), at_most_20));
    const Floats power = scale_by_power(splat(1.0f), n), p = fma(r * rise, power, power - splat(1.0f));
    return p / (p + splat(2.0f));
}

inline float exponential(float x) {
    float v[LANES];
    store(v, exponential(splat(x)));
    return v[0];
}
