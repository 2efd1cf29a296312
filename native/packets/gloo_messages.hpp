// Reads the messages that Gloo sends, where their beginnings can be seen.
//
// Gloo puts 48 bytes before each message: how long it is, what it does, and a slot that says which
// collective it belongs to (gloo/transport/tcp/pair.h, gloo/types.h). With a snap length of 96 the
// first 24 of them are in a capture, if the message begins a packet. Where one begins within a packet,
// what follows is counted as unread until a beginning is seen again.

#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace fullwire {

// How a message begins, as far as it is read.
struct GlooBeginning {
    std::uint64_t bytes = 0;  // itself among them
    std::uint64_t opcode = 0;
    std::uint64_t slot = 0;

    bool is_possible() const;
    bool is_certain() const;
};

// The beginning that these bytes of a payload may be; nothing possible if there are too few.
GlooBeginning gloo_beginning(std::span<const std::uint8_t> captured);

// What one flow carried of one collective.
struct GlooTraffic {
    std::uint64_t slot = 0;
    std::int64_t asked_ns = 0;  // its first packet, which may ask for data or announce it
    std::int64_t first_ns = 0;  // of its data; 0 where there is none
    std::int64_t last_ns = 0;
    std::int64_t payload_bytes = 0;
    std::int64_t unread_bytes = 0;  // beginnings among them, and perhaps another's data
    std::uint32_t messages = 0;
    std::uint32_t flow = 0;
};

class GlooMessages {
  public:
    // Takes bytes of a stream that are seen for the first time, and what they may begin.
    void take(std::uint32_t flow, std::uint64_t begin, std::uint64_t end,
              const GlooBeginning& beginning, std::int64_t time_ns);
    // Says that a new connection uses the same ports.
    void restart(std::uint32_t flow) {
        if (flow < readers_.size()) readers_[flow] = {};
    }
    const std::vector<GlooTraffic>& traffic() const { return traffic_; }

  private:
    static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

    struct Reader {
        std::uint64_t next = 0;       // where the next message begins; 0 if that is not known
        std::uint64_t body_from = 0;  // where the data of this one begins
        std::array<std::uint32_t, 4> recent{kNone, kNone, kNone, kNone};  // the latest first
    };

    void carry(const Reader& reader, std::int64_t bytes, bool is_read, std::int64_t time_ns);
    GlooTraffic* current(const Reader& reader);
    void turn_to(Reader& reader, std::uint32_t flow, std::uint64_t slot, std::int64_t time_ns);

    std::vector<Reader> readers_;  // by flow
    std::vector<GlooTraffic> traffic_;
};

}  // namespace fullwire
