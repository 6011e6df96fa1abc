// How fast this processor multiplies pairs in bf16.
//
// One instruction adds the products of sixteen pairs, twice as many as of numbers in fp32. On some
// processors it takes as long as theirs, on others two or four times as long; its name does not
// tell, so it is timed. Takes a millisecond.

#pragma once

#include <cmath>
#include <ctime>

#include "numbers.h"

namespace {

#ifdef __AVX512BF16__
constexpr bool HAS_PAIRS = true;

// Seconds of this thread's own time for the same number of instructions, many under way at a time.
template <class Step> double seconds_of(Step step) {
    constexpr int SUMS = 12, ROUNDS = 4096;
    __m512 sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_set1_ps(float(i));
    timespec began, ended;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &began);
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) {
            sums[i] = step(sums[i]);
            asm volatile("" : "+v"(sums[i]));  // each instruction is carried out
        }
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ended);
    return double(ended.tv_sec - began.tv_sec) + double(ended.tv_nsec - began.tv_nsec) * 1e-9;
}

// By the shortest of some turns, since others use the processor's core, too.
inline bool pairs_take_as_long_as_numbers() {
    constexpr int TURNS = 7;
    constexpr double HARDLY_LONGER = 1.5;  // from 2 on nothing would be gained
    __m512 ones = _mm512_set1_ps(1.0f);
    __m512i pairs = _mm512_set1_epi32(0x3f803f80);  // of ones
    asm volatile("" : "+v"(ones), "+v"(pairs));
    const auto of_numbers = [=](__m512 sum) { return _mm512_fmadd_ps(ones, ones, sum); };
    const auto of_pairs = [=](__m512 sum) {
        return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)pairs);
    };
    double numbers_s = INFINITY, pairs_s = INFINITY;
    for (int turn = 0; turn < TURNS; turn++) {
        numbers_s = std::fmin(numbers_s, seconds_of(of_numbers));
        pairs_s = std::fmin(pairs_s, seconds_of(of_pairs));
    }
    return pairs_s < HARDLY_LONGER * numbers_s;
}
#else
constexpr bool HAS_PAIRS = false;

inline bool pairs_take_as_long_as_numbers() { return false; }
#endif

}  // namespace
