// Memory for what lies between products, kept from call to call.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <utility>

namespace {

enum Outcome { DONE, NO_MEMORY };

// Memory of one thread that calls; null where there is none.
class Kept {
  public:
    ~Kept() { std::free(at_); }
    char *of(size_t bytes) {
        if (bytes > size_) {
            std::free(at_);
            at_ = static_cast<char *>(std::aligned_alloc(64, bytes));
            size_ = at_ ? bytes : 0;
        }
        return at_;
    }

  private:
    char *at_ = nullptr;
    size_t size_ = 0;
};

inline size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline size_t larger(size_t one, size_t other) { return one > other ? one : other; }

// The bytes at `at`, which goes on to those behind them; likewise numbers.
template <class Number> Number *taken(char *&at, size_t bytes) {
    return reinterpret_cast<Number *>(std::exchange(at, at + bytes));
}
template <class Number> Number *taken(Number *&at, size_t count) {
    return std::exchange(at, at + count);
}

}  // namespace
