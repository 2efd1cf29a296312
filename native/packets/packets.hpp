// Keeps what each flow of a capture sent and when.
//
// A capture comes as bytes in pieces or as an open file; a file is read by several threads. Each of
// them takes a batch through three stages: bytes are cut into packets, in order and by one thread at
// a time; headers are read, by all at once; flows take what they say, again in order. So the result
// is the same whatever threads there are. Memory does not grow with the number of packets: flows,
// time bins and pieces of a stream each have an upper limit, and what is beyond is counted and said.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "packets/capture_file.hpp"
#include "packets/gloo_messages.hpp"
#include "packets/packet_headers.hpp"
#include "packets/passing.hpp"
#include "packets/stream.hpp"

namespace fullwire {

// Traffic of one flow in one time bin.
struct Bin {
    std::int64_t number = 0;  // time >> shift
    std::uint64_t payload_bytes = 0;
    std::uint64_t wire_bytes = 0;
    std::uint32_t flow = 0;
    std::uint32_t packets = 0;
    std::uint32_t retransmits = 0;
};

// Where a message of one flow ended: with a packet that was not full.
struct Ending {
    std::int64_t time_ns = 0;
    std::uint64_t bytes = 0;  // since the one before
    std::uint32_t flow = 0;
};

struct Flow {
    Bin now{};  // the bin being filled; without packets there is none
    Stream stream;
    std::int64_t first_ns = std::numeric_limits<std::int64_t>::max();
    std::int64_t last_ns = 0;
    std::uint64_t packets = 0;  // these three are known when the capture has ended
    std::uint64_t payload_bytes = 0;
    std::uint64_t wire_bytes = 0;
    std::uint64_t retransmitted_bytes = 0;
    std::uint64_t reordered_bytes = 0;
    std::uint64_t lost_bytes = 0;
    std::uint64_t missed_bytes = 0;      // acknowledged, so only the capture lacks them
    std::uint64_t supposed_packets = 0;  // cut out of larger ones at a size that was supposed
    std::uint32_t first_sequence = 0;
    std::uint32_t acknowledged = 0;  // the furthest that this flow's packets acknowledge
    std::uint32_t largest_payload = 0;
    std::uint16_t segment_limit = 0;  // agreed when the connection opened, TCP options included
    std::uint16_t segment_guess = 0;  // what frames divide by, where no opening was seen
    bool has_acknowledged = false;
    bool is_reliable = false;  // RoCEv2: nothing after a lost packet stays unrepeated
    Direction direction = Direction::unknown;
    std::uint32_t back = FlowNumbers::kNone;  // the other direction of the connection
    RoundTrips round_trips;
    std::uint64_t ended = 0;  // where in the stream the latest message did
    std::uint32_t endings = 0;
};

class PacketScan {
  public:
    // Takes the next bytes of the capture. Once damage is found, takes no more.
    void feed(Bytes piece);
    // Reads on in an open file, with so many threads, and returns how many bytes that were: at least
    // `enough_bytes`, or 0 where no more come.
    std::uint64_t read(int file, unsigned threads, std::uint64_t enough_bytes);
    // Says that there is no more.
    void finish();

    const std::string& damage() const { return file_.damage(); }
    // Of the host that captured, where it says them.
    const std::vector<std::array<std::uint8_t, 16>>& addresses() const { return file_.addresses(); }
    const Counts& counts() const { return counts_; }
    const std::vector<FlowKey>& keys() const { return numbers_.keys(); }
    const std::vector<Flow>& flows() const { return flows_; }
    const std::vector<Bin>& bins() const { return bins_; }
    int shift() const { return shift_; }
    const std::vector<GlooTraffic>& gloo_traffic() const { return gloo_.traffic(); }
    const std::vector<Passage>& passages() const { return passages_.all(); }
    const std::vector<Ending>& endings() const { return endings_; }

  private:
    friend class Readers;

    void take(const Segments& segments);
    void take_tcp(std::uint32_t flow, const Segment& segment, const GlooBeginning& beginning);
    void take_data(std::uint32_t flow, const Segment& segment, std::uint64_t begin,
                   const Share& share, const GlooBeginning& beginning);
    void acknowledge(std::uint32_t flow, const Segment& segment);
    void take_roce(std::uint32_t number, const Segment& segment);
    void take_fragment(const FlowKey& key, const Segment& segment);
    void begin_fragments(const FlowKey& key, std::uint32_t flow, const Segment& first);
    void open_connection(std::uint32_t flow, const Segment& segment);
    void agree_segments(std::uint32_t flow, std::uint16_t announced);
    std::uint32_t cut_by_offload(Flow& flow, const Segment& segment);
    void end_message(std::uint32_t flow, const Segment& segment, std::uint64_t end);
    void count(Flow& flow, const Segment& segment, std::uint64_t fresh, std::uint64_t again,
               std::uint32_t packet_bytes);
    std::uint32_t flow_of(const FlowKey& key);
    void keep(Bin& bin);
    void make_room();
    void sort_bins();
    void merge_bins();
    void add_up();
    void give_up_holes(std::uint32_t number);
    void settle_holes(std::uint32_t number);
    void settle(std::uint32_t number, const Hole& hole);

    CaptureFile file_;
    Batch batch_;  // of `feed`
    Segments segments_;
    bool is_finished_ = false;
    Counts counts_;
    FlowNumbers numbers_;
    std::vector<Flow> flows_;
    std::vector<std::uint32_t> of_batch_;  // the number of each flow of the batch, once it came
    // Datagrams in fragments, of which the first has come: whose they are, and which number of a TCP
    // sequence their first byte would have.
    struct Fragmented {
        std::uint32_t flow;
        std::uint32_t sequence;
    };
    FlowNumbers fragmented_numbers_;
    std::vector<Fragmented> fragmented_;
    std::vector<Bin> bins_;
    int shift_ = 17;  // 131 us
    GlooMessages gloo_;
    Passages passages_;
    std::vector<Ending> endings_;
};

}  // namespace fullwire
