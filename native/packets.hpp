// Reads packet captures as bytes come, and keeps what each flow sent and when.
//
// Bytes are fed in pieces of any size; nothing here opens a file. Memory does not grow with the
// number of packets: flows, time bins and pieces of a stream each have an upper limit, and what is
// beyond is counted and said.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace fullwire {

using Bytes = std::span<const std::uint8_t>;

// One direction of a connection, as one interface saw it.
struct FlowKey {
    std::array<std::uint64_t, 2> source{};  // IPv6, or IPv4 mapped into it; big-endian in memory
    std::array<std::uint64_t, 2> destination{};
    std::uint16_t source_port = 0;  // 0 for RoCEv2, where it only spreads load
    std::uint16_t destination_port = 0;
    std::uint32_t queue_pair = 0;  // RoCEv2: the receiver's; the top bit marks answers to reads
    std::uint32_t point = 0;       // the interface within the capture
    std::uint32_t protocol = 0;
    bool operator==(const FlowKey&) const = default;
};

inline constexpr std::uint32_t kTcp = 6;
inline constexpr std::uint32_t kUdp = 17;
inline constexpr std::uint32_t kRoce = 256;  // beyond what IP numbers

// What became of the bytes, or packets, that one segment carried.
struct Share {
    std::uint64_t fresh = 0;      // never seen before
    std::uint64_t again = 0;      // seen before, or filling a hole long after it opened
    std::uint64_t reordered = 0;  // fresh, filling a hole soon after it opened
};

// Which parts of a sequence space have been seen. A stream in order is one number.
class Stream {
  public:
    bool has_begun() const { return begun_; }
    void begin(std::uint64_t next);
    std::uint64_t next() const { return next_; }
    std::uint64_t furthest() const { return ahead_.empty() ? next_ : ahead_.back().end; }
    Share add(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns);
    // How much is still missing, and where the last hole ends.
    std::uint64_t holes() const;
    std::uint64_t last_hole_end() const;

  private:
    struct Piece {
        std::uint64_t begin;
        std::uint64_t end;
        std::int64_t opened_ns;  // when the hole before it was first seen
    };

    Share add_among(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns, Share share);
    void close_lowest_hole();

    std::uint64_t next_ = 0;
    std::vector<Piece> ahead_;  // beyond a hole, in order, not touching
    std::uint64_t closed_ = 0;  // holes that were given up
    std::uint64_t closed_end_ = 0;
    bool begun_ = false;
};

// Traffic of one flow in one time bin.
struct Bin {
    std::int64_t number = 0;  // time >> shift
    std::int64_t payload_bytes = 0;
    std::int64_t wire_bytes = 0;
    std::uint32_t flow = 0;
    std::uint32_t packets = 0;
    std::uint32_t retransmits = 0;
};

struct Flow {
    FlowKey key;
    Stream stream;
    Bin now{};  // the bin being filled; without packets there is none
    std::int64_t first_ns = 0;
    std::int64_t last_ns = 0;
    std::uint64_t packets = 0;
    std::uint64_t payload_bytes = 0;
    std::uint64_t wire_bytes = 0;
    std::uint64_t retransmitted_bytes = 0;
    std::uint64_t reordered_bytes = 0;
    std::uint64_t lost_bytes = 0;    // by earlier connections between the same ports
    std::uint64_t missed_bytes = 0;  // acknowledged, so only the capture lacks them
    std::uint64_t supposed_packets = 0;  // cut out of larger ones at a size that was supposed
    std::uint32_t first_sequence = 0;
    std::uint32_t acknowledged = 0;  // the furthest that this flow's packets acknowledge
    std::uint32_t largest_payload = 0;
    std::uint16_t segment_limit = 0;   // agreed when the connection opened, TCP options included
    std::uint16_t segment_guess = 0;   // what frames divide by, where no opening was seen
    bool has_acknowledged = false;
};

struct Counts {
    std::uint64_t packets = 0;
    std::uint64_t bytes = 0;         // on the wire, as the capture has it
    std::uint64_t other_packets = 0;  // not TCP or UDP over IP
    std::uint64_t other_bytes = 0;
    std::uint64_t fragments = 0;      // of IP, without ports
    std::uint64_t cut_headers = 0;    // too short to be told
    std::uint64_t impossible = 0;     // headers that contradict themselves
    std::uint64_t crowded_packets = 0;  // of flows beyond the limit
    std::uint64_t dropped = 0;          // by the capture, which says so
    std::uint64_t untimed = 0;          // packets without a time
};

class PacketScan {
  public:
    // Takes the next bytes of the capture. Once damage is found, takes no more.
    void feed(Bytes piece);
    // Says that there is no more.
    void finish();

    const std::string& damage() const { return damage_; }
    const Counts& counts() const { return counts_; }
    const std::vector<Flow>& flows() const { return flows_; }
    const std::vector<Bin>& bins() const { return bins_; }
    int shift() const { return shift_; }

  private:
    enum class Format : std::uint8_t { unknown, pcap, pcapng };

    struct Interface {
        std::uint32_t link = 0;
        std::uint8_t resolution = 6;
        std::int64_t offset_s = 0;
        std::uint64_t dropped = 0;
    };

    // A frame on its way through the layers.
    struct Frame {
        Bytes data;               // as much as was captured
        std::size_t length;       // as long as it was
        std::int64_t link_bytes;  // what a wire carries more than `length`; may be below zero
        std::int64_t time_ns;
        std::uint32_t point;
    };

    struct Addresses {
        std::array<std::uint64_t, 2> source{};
        std::array<std::uint64_t, 2> destination{};
    };

    // Of the next unit, how many bytes it takes; less than that are there, or all of them.
    std::size_t wanted(Bytes rest);
    std::size_t wanted_record(Bytes rest);
    std::size_t wanted_block(Bytes rest);
    std::size_t complete_pending(Bytes piece);
    void take(Bytes unit);
    std::size_t take_records(Bytes rest);
    void take_file_header(Bytes unit);
    void take_record(Bytes unit);
    void take_block(Bytes unit);
    void take_interface(Bytes body);
    void take_enhanced(Bytes body, bool is_old);
    void take_simple(Bytes body);
    void take_statistics(Bytes body);
    void stop(const std::string& problem);

    std::uint16_t u16(const std::uint8_t* at) const;
    std::uint32_t u32(const std::uint8_t* at) const;
    std::int64_t time_of(const Interface& interface, std::uint64_t ticks) const;

    void frame(std::uint32_t link, Frame frame);
    void other(const Frame& frame);
    void ethernet(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void network(const Frame& frame, std::size_t at, std::size_t end, std::uint16_t type, int depth);
    void ip4(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void ip6(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void transport(const Frame& frame, std::size_t at, std::size_t end, std::uint32_t protocol,
                   const Addresses& between, int depth);
    void tcp(const Frame& frame, std::size_t at, std::size_t end, const Addresses& between);
    void udp(const Frame& frame, std::size_t at, std::size_t end, const Addresses& between,
             int depth);
    void roce(const Frame& frame, std::size_t at, std::size_t end, const Addresses& between);
    void open_connection(Flow& flow, std::uint32_t sequence);
    void agree_segments(std::uint32_t flow, Bytes options);
    std::uint32_t segments(Flow& flow, std::size_t payload, std::size_t options);
    void count(Flow& flow, const Frame& frame, std::uint64_t fresh, std::uint64_t again,
               std::size_t payload, std::uint32_t packets);

    static constexpr std::uint32_t kNoFlow = std::numeric_limits<std::uint32_t>::max();
    std::uint32_t flow_of(const FlowKey& key);
    std::uint32_t known_flow(const FlowKey& key) const;
    std::size_t place_of(const FlowKey& key) const;
    void grow_places();
    void keep(Bin& bin);
    void make_room();
    void find_missed();

    Format format_ = Format::unknown;
    bool is_big_ = false;   // byte order of the capture
    bool is_nano_ = false;  // pcap: the fraction is nanoseconds
    bool is_finished_ = false;
    std::vector<Interface> interfaces_;
    std::vector<std::uint8_t> pending_;  // a unit whose end has not come
    std::uint64_t skip_ = 0;             // bytes of a block that nobody reads
    std::uint64_t position_ = 0;         // in the capture, of the next unit
    std::string damage_;
    Counts counts_;
    std::vector<Flow> flows_;
    std::vector<std::uint32_t> places_ = std::vector<std::uint32_t>(1024, kNoFlow);
    std::uint32_t latest_ = kNoFlow;
    std::vector<Bin> bins_;
    int shift_ = 17;  // 131 us
};

}  // namespace fullwire
