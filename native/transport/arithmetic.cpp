#include "transport/arithmetic.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "transport/small_floats.hpp"

namespace fullwire {
namespace {

template <typename T>
struct Plain {
    using Stored = T;
    using Computed = T;

    FULLWIRE_INLINE static T load(T value) { return value; }
    FULLWIRE_INLINE static T store(T value) { return value; }
};

struct Truth {
    using Stored = std::uint8_t;
    using Computed = std::uint8_t;

    FULLWIRE_INLINE static std::uint8_t load(std::uint8_t value) { return value != 0; }
    FULLWIRE_INLINE static std::uint8_t store(std::uint8_t value) { return value != 0; }
};

// Whole numbers wrap around, as they do in every other library; signed ones may not in C++.
template <typename T, typename Wrapped>
FULLWIRE_INLINE T wrapping(T a, T b, Wrapped operation) {
    if constexpr (std::is_integral_v<T>) {
        using Unsigned = std::make_unsigned_t<T>;
        using Wide = std::conditional_t<sizeof(T) < 4, std::uint32_t, Unsigned>;
        return static_cast<T>(static_cast<Unsigned>(operation(
            static_cast<Wide>(static_cast<Unsigned>(a)),
            static_cast<Wide>(static_cast<Unsigned>(b)))));
    } else {
        return operation(a, b);
    }
}

struct Sum {
    template <typename T>
    FULLWIRE_INLINE static T of(T a, T b) {
        return wrapping(a, b, [](auto x, auto y) { return x + y; });
    }
};

struct Product {
    template <typename T>
    FULLWIRE_INLINE static T of(T a, T b) {
        return wrapping(a, b, [](auto x, auto y) { return x * y; });
    }
};

template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

// What is no number wins from both sides, and -0 is below 0, so that ranks agree on the bits.
struct Minimum {
    template <typename T>
    FULLWIRE_INLINE static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) {
            using Bits = BitsOf<T>;
            const T equal = std::bit_cast<T>(std::bit_cast<Bits>(a) | std::bit_cast<Bits>(b));
            return a == b ? equal : b < a || b != b ? b : a;
        }
        return b < a ? b : a;
    }
};

struct Maximum {
    template <typename T>
    FULLWIRE_INLINE static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) {
            using Bits = BitsOf<T>;
            const T equal = std::bit_cast<T>(std::bit_cast<Bits>(a) & std::bit_cast<Bits>(b));
            return a == b ? equal : b > a || b != b ? b : a;
        }
        return b > a ? b : a;
    }
};

// Of two that are no numbers the processor keeps the first one's sign and digits. Half and Brain
// have one such value only.
template <typename Kind>
FULLWIRE_INLINE typename Kind::Computed same_from_both_sides(typename Kind::Computed value) {
    using Computed = typename Kind::Computed;
    if constexpr (std::is_floating_point_v<typename Kind::Stored>) {
        return value != value ? std::numeric_limits<Computed>::quiet_NaN() : value;
    }
    return value;
}

struct BitAnd {
    template <typename T>
    FULLWIRE_INLINE static T of(T a, T b) { return static_cast<T>(a & b); }
};

struct BitOr {
    template <typename T>
    FULLWIRE_INLINE static T of(T a, T b) { return static_cast<T>(a | b); }
};

struct BitXor {
    template <typename T>
    FULLWIRE_INLINE static T of(T a, T b) { return static_cast<T>(a ^ b); }
};

template <typename Kind, typename Operation>
FULLWIRE_INLINE void combine_all(void* result, const void* a, const void* b, std::size_t count) {
    using Stored = Loose<typename Kind::Stored>;
    auto* to = static_cast<Stored*>(result);
    const auto* from = static_cast<const Stored*>(a);
    const auto* other = static_cast<const Stored*>(b);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        to[i].value = Kind::store(same_from_both_sides<Kind>(
            Operation::of(Kind::load(from[i].value), Kind::load(other[i].value))));
    }
}

template <typename Kind>
FULLWIRE_INLINE void combine_kind(Reduction reduction, void* result, const void* a, const void* b,
                                  std::size_t count) {
    switch (reduction) {
        case Reduction::sum: return combine_all<Kind, Sum>(result, a, b, count);
        case Reduction::product: return combine_all<Kind, Product>(result, a, b, count);
        case Reduction::minimum: return combine_all<Kind, Minimum>(result, a, b, count);
        case Reduction::maximum: return combine_all<Kind, Maximum>(result, a, b, count);
        default: break;
    }
    if constexpr (std::is_integral_v<typename Kind::Computed>) {
        switch (reduction) {
            case Reduction::bit_and: return combine_all<Kind, BitAnd>(result, a, b, count);
            case Reduction::bit_or: return combine_all<Kind, BitOr>(result, a, b, count);
            case Reduction::bit_xor: return combine_all<Kind, BitXor>(result, a, b, count);
            default: break;
        }
    }
    throw std::invalid_argument("bits of fractions cannot be combined");
}

template <typename Kind>
FULLWIRE_INLINE void divide_kind(void* values, std::size_t count, std::uint32_t by) {
    using Computed = typename Kind::Computed;
    auto* all = static_cast<Loose<typename Kind::Stored>*>(values);
    const auto divisor = static_cast<Computed>(by);
    for (std::size_t i = 0; i < count; ++i) {
        all[i].value = Kind::store(static_cast<Computed>(Kind::load(all[i].value) / divisor));
    }
}

// Calls `work` with the kind of this number.
template <typename Work>
FULLWIRE_INLINE void with_kind(Number number, Work work) {
    switch (number) {
        case Number::float32: return work(Plain<float>{});
        case Number::float64: return work(Plain<double>{});
        case Number::float16: return work(Half{});
        case Number::bfloat16: return work(Brain{});
        case Number::int8: return work(Plain<std::int8_t>{});
        case Number::int16: return work(Plain<std::int16_t>{});
        case Number::int32: return work(Plain<std::int32_t>{});
        case Number::int64: return work(Plain<std::int64_t>{});
        case Number::uint8: return work(Plain<std::uint8_t>{});
        case Number::boolean: return work(Truth{});
    }
    throw std::invalid_argument("an unknown type of number");
}

FULLWIRE_INLINE void combine_here(Reduction reduction, Number number, void* result, const void* a,
                                  const void* b, std::size_t count) {
    with_kind(number, [&](auto kind) __attribute__((always_inline)) {
        combine_kind<decltype(kind)>(reduction, result, a, b, count);
    });
}

void combine_plainly(Reduction reduction, Number number, void* result, const void* a,
                     const void* b, std::size_t count) {
    combine_here(reduction, number, result, a, b, count);
}

#if defined(__x86_64__)
// The same lines, compiled again for vectors twice as wide.
[[gnu::target("avx2")]] void combine_widely(Reduction reduction, Number number, void* result,
                                            const void* a, const void* b, std::size_t count) {
    combine_here(reduction, number, result, a, b, count);
}

const auto combine_best = __builtin_cpu_supports("avx2") ? combine_widely : combine_plainly;
#else
const auto combine_best = combine_plainly;
#endif

}  // namespace

std::size_t bytes_of(Number number) {
    std::size_t found = 0;
    with_kind(number, [&](auto kind) { found = sizeof(typename decltype(kind)::Stored); });
    return found;
}

void combine(Reduction reduction, Number number, void* result, const void* a, const void* b,
             std::size_t count) {
    combine_best(reduction, number, result, a, b, count);
}

void divide(Number number, void* values, std::size_t count, std::uint32_t by) {
    with_kind(number, [&](auto kind) { divide_kind<decltype(kind)>(values, count, by); });
}

}  // namespace fullwire
