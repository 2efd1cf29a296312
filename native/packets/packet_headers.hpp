// Reads the headers of packets, one by one and each for itself: what a packet says, and of which
// flow. What that means for the flow is for whoever knows what came before (packets.hpp).

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "packets/capture_file.hpp"
#include "packets/gloo_messages.hpp"

namespace fullwire {

// One direction of a connection, as one interface saw it.
struct FlowKey {
    std::array<std::uint64_t, 2> source{};  // IPv6, or IPv4 mapped into it; big-endian in memory
    std::array<std::uint64_t, 2> destination{};
    std::uint16_t source_port = 0;  // 0 for RoCEv2, where it only spreads load
    std::uint16_t destination_port = 0;
    std::uint32_t queue_pair = 0;  // RoCEv2: the receiver's; the top bit marks answers to reads
    std::uint32_t point = 0;       // the interface within the capture
    std::uint32_t protocol = 0;
    bool operator==(const FlowKey& other) const {  // at once, because nearly always all is equal
        return ((source[0] ^ other.source[0]) | (source[1] ^ other.source[1]) |
                (destination[0] ^ other.destination[0]) | (destination[1] ^ other.destination[1]) |
                (ports() ^ other.ports()) | (kind() ^ other.kind())) == 0;
    }
    std::uint64_t ports() const {
        return std::uint64_t{queue_pair} << 32 | std::uint64_t{source_port} << 16 | destination_port;
    }
    std::uint64_t kind() const { return std::uint64_t{point} << 32 | protocol; }
    FlowKey turned() const;  // the other direction
};

inline constexpr std::uint32_t kIp4InIp = 4;
inline constexpr std::uint32_t kTcp = 6;
inline constexpr std::uint32_t kUdp = 17;
inline constexpr std::uint32_t kIp6InIp = 41;
inline constexpr std::uint32_t kGre = 47;
inline constexpr std::uint32_t kRoce = 256;  // beyond what IP numbers
// What IP cut a datagram into: the queue pair is its identification. The first fragment is a packet
// like others, followed by one without payload that says whose beginning it was; of the others the
// sequence is their offset.
inline constexpr std::uint32_t kFragment = 512;

inline constexpr std::uint8_t kSyn = 2;
inline constexpr std::uint8_t kNoData = 4;  // RST of TCP; of RoCEv2 what answers and asks
inline constexpr std::uint8_t kReliable = 8;  // RoCEv2: what is lost is sent again, with all after it
inline constexpr std::uint8_t kAck = 16;

// What one packet says.
struct Segment {
    std::int64_t time_ns = 0;
    std::uint32_t flow = 0;        // of the batch
    std::uint32_t wire_bytes = 0;  // of the frame, before offload is undone
    std::uint32_t payload = 0;
    std::uint32_t sequence = 0;
    std::uint32_t acknowledged = 0;
    std::uint16_t announced = 0;  // SYN: the largest segment its sender takes, 0 if it says none
    std::uint8_t flags = 0;
    std::uint8_t options = 0;  // bytes of TCP options
};

// Whether the host that captured sent a packet or received it, where the capture says so.
enum class Direction : std::uint8_t { unknown, sent, received };

struct Counts {
    std::uint64_t packets = 0;
    std::uint64_t bytes = 0;         // on the wire, as the capture has it
    std::uint64_t other_packets = 0;  // not TCP or UDP over IP
    std::uint64_t other_bytes = 0;
    std::uint64_t unread_links = 0;   // of a link layer that is not read
    std::uint64_t unread_link = 0;    // the number of the latest such layer
    std::uint64_t fragments = 0;      // of IP, whose first one was not seen before
    std::uint64_t cut_headers = 0;    // too short to be told
    std::uint64_t impossible = 0;     // headers that contradict themselves
    std::uint64_t crowded_packets = 0;  // of flows beyond the limit
    std::uint64_t dropped = 0;          // by the capture, which says so
    std::uint64_t untimed = 0;          // packets without a time

    Counts& operator+=(const Counts& other);
};

// Numbers keys in the order in which they first come.
class FlowNumbers {
  public:
    static constexpr std::uint32_t kNone = 0xffffffff;

    std::uint32_t known(const FlowKey& key) const { return places_[place_of(key)]; }
    std::uint32_t number(const FlowKey& key) {
        if (keys_.empty()) return add(key);
        // Flows take turns: the one that came after the latest before is likely to do so again.
        std::uint32_t& follower = followers_[latest_];
        if (keys_[follower] == key) return latest_ = follower;
        const std::uint32_t found = known(key);
        follower = found != kNone ? found : static_cast<std::uint32_t>(keys_.size());
        return latest_ = found != kNone ? found : add(key);
    }
    const std::vector<FlowKey>& keys() const { return keys_; }
    void clear();

  private:
    std::size_t place_of(const FlowKey& key) const;
    std::uint32_t add(const FlowKey& key);

    std::vector<FlowKey> keys_;
    std::vector<std::uint32_t> followers_;  // of each key, the one that came after it
    std::uint32_t latest_ = 0;
    std::vector<std::uint32_t> places_ = std::vector<std::uint32_t>(256, kNone);
};

// What the packets of a batch say, in their order; those of no flow are counted only.
class Segments {
  public:
    void read(const Batch& batch);
    std::span<const Segment> all() const { return {segments_.data(), count_}; }

    // What a payload begins with, if that may be a message of Gloo's.
    struct Beginning {
        std::size_t segment;
        GlooBeginning gloo;
    };

    FlowNumbers flows;
    Counts counts;
    std::vector<Beginning> beginnings;   // in the order of segments
    std::vector<Direction> directions;  // of the first flows; unknown for others

  private:
    friend class Reader;

    std::vector<Segment> segments_;  // of which so many count; larger is what it has been
    std::size_t count_ = 0;
};

}  // namespace fullwire
