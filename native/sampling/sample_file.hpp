// The file that a sampler appends to: the journal's checked blocks, with rows of counters in them.
//
// A block of samples holds the rows of one series. All its numbers are variable-length: seven bits a
// byte, lowest first, the eighth bit set where more follow, signs folded in (0, -1, 1, -2 are 0 to 3).
// They are the series' kind and number, then column after column: the first value, and differences.
// A block stands alone, so a torn one costs its own rows only.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fullwire {

enum class Kind : std::uint8_t { link = 1, socket, processor, memory, gpu, own_cost };

class SampleFile {
  public:
    explicit SampleFile(int file) : file_(file) {}

    void define(std::string_view json_object);
    void add_samples(const std::string& numbers);

    // Append what was added by one call, so that a crash tears at most the last block.
    void write();

  private:
    int file_;
    std::string definitions_;
    std::string blocks_;
};

// The rows of one thing that is sampled; the first value of a row is its time.
//
// Rows that say what the one before said are left out, except the last of such a stretch: between two
// rows nothing but what they show has happened.
class Series {
  public:
    Series(Kind kind, std::int64_t number, std::size_t columns)
        : kind_(kind), number_(number), columns_(columns) {}

    void add(std::span<const std::int64_t> row);
    void add(std::initializer_list<std::int64_t> row) { add({row.begin(), row.size()}); }
    void move_into(SampleFile& file);

  private:
    bool repeats_last(std::span<const std::int64_t> row) const;
    void keep(std::span<const std::int64_t> row);

    Kind kind_;
    std::int64_t number_;
    std::size_t columns_;
    std::vector<std::int64_t> rows_;
    std::vector<std::int64_t> last_;  // the newest row, kept or left out
    bool is_last_left_out_ = false;
};

}  // namespace fullwire
