// Vectors of LANES fp32 values, and how stored codes become such vectors.
//
// Arithmetic is the compiler's own vector extension, so any CPU runs it. Only what that extension
// cannot say has a form of its own for AVX-512 and AVX2; the plain forms beside them are the
// definitions. RESIDENCY_LANES=16 with no AVX-512 runs the 16-lane algorithm by the plain forms.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifdef RESIDENCY_LANES
constexpr int LANES = RESIDENCY_LANES;
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define RESIDENCY_AVX512
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__F16C__)
#define RESIDENCY_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float V __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));

template <class To> inline To load(const void* p) {
    To value;
    memcpy(&value, p, sizeof value);
    return value;
}
inline V as_float(I bits) { return (V)bits; }
inline I splat(int32_t value) { return I{} + value; }

// A fixed order of additions, so that a sum's bits depend on LANES alone: the upper half onto the
// lower one, until one lane is left.
inline float sum(V v) {
    typedef float V8 __attribute__((vector_size(32)));
    typedef float V4 __attribute__((vector_size(16)));
    alignas(64) float lane[16];
    memcpy(lane, &v, sizeof v);
    if (LANES == 16) {
        V8 half = load<V8>(lane) + load<V8>(lane + 8);
        memcpy(lane, &half, sizeof half);
    }
    if (LANES >= 8) {
        V4 half = load<V4>(lane) + load<V4>(lane + 4);
        memcpy(lane, &half, sizeof half);
    }
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

// fp16 in the low half of each lane. Subnormals come by an integer's conversion, so they stay
// exact and cost nothing where the hardware is slow with them.
inline V half_bits(I h) {
    I magnitude = h & 0x7fff;
    V small = __builtin_convertvector(magnitude, V) * 0x1p-24f;
    I normal = (magnitude << 13) + (112 << 23);
    normal += (magnitude >= 0x7c00) & (112 << 23);  // infinity and NaN
    return as_float((magnitude < 0x400 ? (I)small : normal) | (h & 0x8000) << 16);
}

// e4m3 bytes, LANES of them in a register. Their value is 2^8 times what `e4m3` returns: its fp16
// form keeps the exponent's bits, and the bias differs by 8. NaN codes give 480 / 2^8; see is_nan.
constexpr float E4M3_UNIT = 256;

#if defined(RESIDENCY_AVX512)
typedef __m128i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline V halves(const uint8_t* p) {
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline V e4m3(Bytes b) {
    __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(b), 7);
    return (V)_mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16((short)0xbfff)));
}
inline I widen(Bytes b) { return (I)_mm512_cvtepu8_epi32(b); }
// A permutation looks at the low 4 bits of each lane and at no others.
constexpr float E2M1_UNIT = 1;
inline V e2m1(I codes, int j) {
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6,
                                        -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    return (V)_mm512_permutexvar_ps((__m512i)(codes >> 4 * j), table);
}
#elif defined(RESIDENCY_AVX2)
typedef __m128i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }
inline V halves(const uint8_t* p) { return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline V e4m3(Bytes b) {
    __m128i h = _mm_slli_epi16(_mm_cvtepi8_epi16(b), 7);
    return (V)_mm256_cvtph_ps(_mm_and_si128(h, _mm_set1_epi16((short)0xbfff)));
}
inline I widen(Bytes b) { return (I)_mm256_cvtepu8_epi32(b); }
// All even or odd codes at once become bytes of twice their value; a byte that is shifted to the top
// of its lane, the others masked away, is an integer 2^24 times as large.
constexpr float E2M1_UNIT = 0x1p-25f;
inline V e2m1(I codes, int j) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    I nibbles = (j % 2 ? codes >> 4 : codes) & 0x0f0f0f0f;
    I bytes = (I)_mm256_shuffle_epi8(table, (__m256i)nibbles);
    return __builtin_convertvector((bytes << (24 - j / 2 * 8)) & (int32_t)0xff000000, V);
}
#else
struct Bytes { uint8_t lane[LANES]; };
inline Bytes load_bytes(const uint8_t* p) { return load<Bytes>(p); }
inline I widen(Bytes b) {
    I wide;
    for (int i = 0; i < LANES; i++) wide[i] = b.lane[i];
    return wide;
}
inline V halves(const uint8_t* p) {
    I wide;
    for (int i = 0; i < LANES; i++) wide[i] = load<uint16_t>(p + 2 * i);
    return half_bits(wide);
}
inline V e4m3(Bytes b) {
    I wide = widen(b);
    return half_bits((wide & 0x7f) << 7 | (wide & 0x80) << 8);
}
constexpr float E2M1_UNIT = 1;
inline V e2m1(I codes, int j) {
    I code = codes >> 4 * j, magnitude = code & 7;
    V small = __builtin_convertvector(magnitude, V) * 0.5f;
    I normal = (magnitude << 22) + (126 << 23);
    return as_float((magnitude < 2 ? (I)small : normal) | (code & 8) << 28);
}
#endif

// Pairs: where activations are bf16 and the CPU multiplies such numbers two by two, codes of 4 bits
// become bf16, which holds their values. `H` is 2 * LANES of them; pair_codes(codes, j) is the j-th
// code of each lane's four, and add_pairs adds the products of neighbours to a lane of fp32.
#if defined(RESIDENCY_AVX512) && defined(__AVX512BF16__)
#define RESIDENCY_PAIRS
typedef __m512i H;
inline H load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
// The permutation looks at 5 bits, one too many: the table is there twice.
inline H pair_codes(I codes, int j) {
    const __m512i table = _mm512_set_epi16(
        (short)0xc0c0, (short)0xc080, (short)0xc040, (short)0xc000, (short)0xbfc0, (short)0xbf80,
        (short)0xbf00, (short)0x8000, 0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0,
        (short)0xc0c0, (short)0xc080, (short)0xc040, (short)0xc000, (short)0xbfc0, (short)0xbf80,
        (short)0xbf00, (short)0x8000, 0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0);
    return _mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)codes, 4 * j), table);
}
inline V add_pairs(V sums, H a, H b) {
    return (V)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
#elif defined(RESIDENCY_LANES)
#define RESIDENCY_PAIRS
struct H { uint16_t lane[2 * LANES]; };
inline H load_pairs(const uint16_t* p) { return load<H>(p); }
inline H pair_codes(I codes, int j) {
    const uint16_t table[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    H four = load<H>(&codes), h;
    for (int i = 0; i < 2 * LANES; i++) {
        int code = four.lane[i] >> 4 * j & 15;
        h.lane[i] = table[code & 7] | (code & 8) << 12;
    }
    return h;
}
inline float pair_value(uint16_t bits) { return as_float(splat(bits << 16))[0]; }
inline V add_pairs(V sums, H a, H b) {
    for (int i = 0; i < 2 * LANES; i++)
        sums[i / 2] += pair_value(a.lane[i]) * pair_value(b.lane[i]);
    return sums;
}
#endif

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
    uint32_t bits = load<uint32_t>(&value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// e2m1(codes, j), above: the j-th code of each lane's eight, the lowest bits first. E2M1_UNIT times
// what it returns is the value.

// LANES / TIMES bytes, each in TIMES neighbouring lanes.
template <int TIMES> inline Bytes repeat(const uint8_t* p) {
#if defined(RESIDENCY_AVX512) || defined(RESIDENCY_AVX2)
    static_assert(TIMES == 2 || TIMES == 4);
    int64_t few = 0;
    memcpy(&few, p, LANES / TIMES);
    Bytes b = _mm_cvtsi64_si128(few);
    b = _mm_unpacklo_epi8(b, b);
    return TIMES == 2 ? b : _mm_unpacklo_epi8(b, b);
#else
    Bytes b;
    for (int i = 0; i < LANES; i++) b.lane[i] = p[i / TIMES];
    return b;
#endif
}

inline bool any_e4m3_nan(const uint8_t* p, int64_t number) {
    unsigned char found = 0;
    for (int64_t i = 0; i < number; i++) found |= (p[i] & 0x7f) == 0x7f;
    return found;
}
