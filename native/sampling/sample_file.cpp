#include "sampling/sample_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace fullwire {

namespace {

// As in recorder/inside/journal.py.
constexpr std::string_view kTag = "FWJ2";
constexpr std::uint8_t kDefinitions = 2;
constexpr std::uint8_t kSamples = 3;

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320u : 0);
        table[byte] = value;
    }
    return table;
}();

std::uint32_t crc32(std::string_view content) {
    std::uint32_t value = ~0u;
    for (const char byte : content) {
        value = kCrcTable[(value ^ static_cast<std::uint8_t>(byte)) & 0xFF] ^ (value >> 8);
    }
    return ~value;
}

void append_little_endian(std::string& out, std::uint32_t value) {
    for (int byte = 0; byte < 4; ++byte) out += static_cast<char>(value >> (8 * byte));
}

void append_block(std::string& out, std::uint8_t kind, std::string_view content) {
    out += kTag;
    out += static_cast<char>(kind);
    out.append(3, '\0');
    append_little_endian(out, static_cast<std::uint32_t>(content.size()));
    append_little_endian(out, crc32(content));
    out += content;
}

void append_number(std::string& out, std::int64_t value) {
    std::uint64_t rest = (static_cast<std::uint64_t>(value) << 1) ^
                         static_cast<std::uint64_t>(value >> 63);
    for (; rest >= 128; rest >>= 7) out += static_cast<char>(rest | 128);
    out += static_cast<char>(rest);
}

std::int64_t difference(std::int64_t after, std::int64_t before) {  // wraps, as the reader's sum
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(after) -
                                     static_cast<std::uint64_t>(before));
}

}  // namespace

void SampleFile::define(std::string_view json_object) {
    definitions_ += definitions_.empty() ? "[" : ",";
    definitions_ += json_object;
}

void SampleFile::add_samples(const std::string& numbers) {
    append_block(blocks_, kSamples, numbers);
}

void SampleFile::write() {
    std::string whole;
    if (!definitions_.empty()) append_block(whole, kDefinitions, definitions_ + "]");
    whole += blocks_;
    definitions_.clear();
    blocks_.clear();
    if (whole.empty()) return;
    const ssize_t written = ::write(file_, whole.data(), whole.size());
    if (written < 0) throw std::system_error(errno, std::generic_category(), "cannot be written");
    if (static_cast<std::size_t>(written) < whole.size()) {
        throw std::runtime_error("the file took " + std::to_string(written) + " of " +
                                 std::to_string(whole.size()) + " bytes: is the disk full?");
    }
}

void Series::add(std::span<const std::int64_t> row) {
    if (repeats_last(row)) {
        is_last_left_out_ = true;
    } else {
        if (is_last_left_out_) keep(last_);
        keep(row);
        is_last_left_out_ = false;
    }
    last_.assign(row.begin(), row.end());
}

void Series::move_into(SampleFile& file) {
    if (is_last_left_out_) keep(last_);
    is_last_left_out_ = false;
    if (rows_.empty()) return;
    std::string numbers;
    append_number(numbers, static_cast<std::int64_t>(kind_));
    append_number(numbers, number_);
    for (std::size_t column = 0; column < columns_; ++column) {
        std::int64_t before = 0;
        for (std::size_t at = column; at < rows_.size(); at += columns_) {
            append_number(numbers, difference(rows_[at], before));
            before = rows_[at];
        }
    }
    file.add_samples(numbers);
    rows_.clear();
}

bool Series::repeats_last(std::span<const std::int64_t> row) const {
    return !last_.empty() && std::equal(row.begin() + 1, row.end(), last_.begin() + 1);
}

void Series::keep(std::span<const std::int64_t> row) {
    rows_.insert(rows_.end(), row.begin(), row.end());
}

}  // namespace fullwire
