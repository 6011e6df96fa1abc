// Numbers of rows and columns, turned about.

#pragma once

#include "blocks.h"

namespace {

// A tile of sixteen rows by sixteen columns. Rows are `step` apart and of them there are `rows`, of
// columns `columns`; zeros stand for others. To columns `apart` apart, `filled` numbers of each.
inline void tile_turned(const float *from, int64_t step, int rows, int columns, float *to,
                        size_t apart, int filled) {
#ifdef __AVX512F__
    const auto some = [](int count) { return __mmask16((1u << (count < LANES ? count : LANES)) - 1); };
    const __mmask16 read = some(columns), written = some(filled);
    __m512 one[LANES], other[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++)
        one[r] = r < rows ? _mm512_maskz_loadu_ps(read, from + r * step) : _mm512_setzero_ps();
    // Neighbours of two rows, then of four: `one[4 g + c]` has, in its quarter l, column 4 l + c of
    // the rows from 4 g on.
#pragma GCC unroll 8
    for (int r = 0; r < LANES; r += 2) {
        other[r] = _mm512_unpacklo_ps(one[r], one[r + 1]);
        other[r + 1] = _mm512_unpackhi_ps(one[r], one[r + 1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < LANES; r += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512d low = (__m512d)other[r + half], high = (__m512d)other[r + 2 + half];
            one[r + 2 * half] = (__m512)_mm512_unpacklo_pd(low, high);
            one[r + 2 * half + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512 even = _mm512_shuffle_f32x4(one[c], one[4 + c], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(one[c], one[4 + c], 0xdd);
        const __m512 more_even = _mm512_shuffle_f32x4(one[8 + c], one[12 + c], 0x88);
        const __m512 more_odd = _mm512_shuffle_f32x4(one[8 + c], one[12 + c], 0xdd);
        other[c] = _mm512_shuffle_f32x4(even, more_even, 0x88);
        other[8 + c] = _mm512_shuffle_f32x4(even, more_even, 0xdd);
        other[4 + c] = _mm512_shuffle_f32x4(odd, more_odd, 0x88);
        other[12 + c] = _mm512_shuffle_f32x4(odd, more_odd, 0xdd);
    }
#pragma GCC unroll 16
    for (int c = 0; c < LANES; c++)
        if (c < columns) _mm512_mask_storeu_ps(to + c * apart, written, other[c]);
#else
    for (int c = 0; c < columns && c < LANES; c++)
        for (int r = 0; r < filled && r < LANES; r++)
            to[c * apart + r] = r < rows ? from[r * step + c] : 0;
#endif
}

// Rows [rows, columns], `step` apart, to [columns, filled], `apart` apart; zeros beyond the rows.
inline void turned_about(const float *from, int64_t step, int64_t rows, int columns, float *to,
                         size_t apart, int64_t filled) {
    for (int64_t r = 0; r < filled; r += LANES)
        for (int c = 0; c < columns; c += LANES)
            tile_turned(from + r * step + c, step, int(rows - r), columns - c, to + c * apart + r,
                        apart, int(filled - r));
}

}  // namespace
