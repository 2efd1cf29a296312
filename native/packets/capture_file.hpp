// Cuts a capture (pcap or pcapng) into its packets, as its bytes come.
//
// Where a packet ends is known from where it begins and from nothing else, so cutting goes from one
// to the next, in order; it reads two numbers of each. What packets hold is read elsewhere, by
// several threads: a batch holds whole packets and all that reading them takes.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fullwire {

using Bytes = std::span<const std::uint8_t>;

inline std::uint16_t big16(const std::uint8_t* at) {
    return static_cast<std::uint16_t>(at[0] << 8 | at[1]);
}

inline std::uint32_t big32(const std::uint8_t* at) {
    return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 |
           at[3];
}

template <typename T>
T raw(const std::uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// How a capture writes numbers, and the interfaces that its packets name.
struct Layout {
    struct Interface {
        std::uint32_t link = 0;
        std::uint8_t resolution = 6;
        std::int64_t offset_s = 0;
    };

    enum class Format : std::uint8_t { unknown, pcap, pcapng };

    std::uint16_t u16(const std::uint8_t* at) const {
        return is_foreign ? __builtin_bswap16(raw<std::uint16_t>(at)) : raw<std::uint16_t>(at);
    }
    std::uint32_t u32(const std::uint8_t* at) const {
        return is_foreign ? __builtin_bswap32(raw<std::uint32_t>(at)) : raw<std::uint32_t>(at);
    }
    std::uint64_t u64(const std::uint8_t* at) const {
        return is_foreign ? __builtin_bswap64(raw<std::uint64_t>(at)) : raw<std::uint64_t>(at);
    }

    Format format = Format::unknown;
    bool is_foreign = false;  // the other order of bytes than this machine's
    bool is_nano = false;     // pcap: the fraction is nanoseconds
    std::shared_ptr<const std::vector<Interface>> interfaces = nullptr;
};

// Whole packets as they lie in the capture, one after another.
struct Batch {
    // Packets that are written in one way: all, unless a pcapng begins another section.
    struct Part {
        Layout layout;
        std::size_t end;  // in `packets`
    };

    std::span<std::uint8_t> room() { return std::span(bytes).subspan(size); }

    std::vector<std::uint8_t> bytes;  // of these the first `size` count
    std::size_t size = 0;
    std::vector<std::uint32_t> packets;  // where their headers begin
    std::vector<Part> parts;
    std::uint64_t untimed = 0;  // packets without a time, which are not among them
    std::uint64_t untimed_bytes = 0;
};

class CaptureFile {
  public:
    // No tool writes longer frames of a network, whatever snap length its header claims.
    static constexpr std::uint32_t kLongestFrame = 1 << 18;

    // Puts what the batch before left at the beginning of this one, and makes room for what comes.
    void begin(Batch& batch, std::size_t coming);
    // Finds the packets in what the batch holds, and keeps what is no whole one for the next.
    void cut(Batch& batch);
    // Says that there is no more.
    void finish();
    // Says that no more can be had. Only the first problem counts.
    void stop(const std::string& problem);

    const std::string& damage() const { return damage_; }
    // Packets that the capture says it dropped.
    std::uint64_t dropped() const;
    // The addresses of the interfaces, of IPv4 as those of IPv6 that stand for them.
    const std::vector<std::array<std::uint8_t, 16>>& addresses() const { return addresses_; }

  private:
    std::size_t unit(Bytes rest, Batch& batch);
    std::size_t file_header(Bytes rest);
    std::size_t records(Bytes rest, Batch& batch);
    std::size_t block(Bytes rest, Batch& batch);
    void section(Bytes rest, Batch& batch);
    void interface(Bytes body);
    bool is_packet(Bytes body, bool is_old);
    void untimed(Bytes body, Batch& batch);
    void statistics(Bytes body);
    void end_part(Batch& batch);

    Layout layout_;
    std::vector<Layout::Interface> interfaces_;  // which `layout_` is given when packets end
    std::vector<std::uint64_t> dropped_;  // by interface of this section
    std::uint64_t dropped_before_ = 0;
    std::vector<std::array<std::uint8_t, 16>> addresses_;
    std::vector<std::uint8_t> rest_;  // a unit whose end has not come
    std::uint64_t skip_ = 0;          // bytes of a block that nobody reads
    std::uint64_t position_ = 0;      // in the capture, of the next unit
    std::uint64_t packets_ = 0;
    std::string damage_;
};

}  // namespace fullwire
