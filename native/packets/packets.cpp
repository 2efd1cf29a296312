#include "packets/packets.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

namespace fullwire {
namespace {

constexpr std::size_t kMostFlows = 1 << 16;
constexpr std::size_t kMostBins = 1 << 19;
constexpr std::size_t kMostFragmented = 1 << 12;  // datagrams under way
constexpr std::uint64_t kLargestWindow = 1ULL << 30;  // TCP's; a longer leap is another connection
// A longer hole may be no hole but the ports of another connection, whose opening was not captured.
constexpr std::uint64_t kMostMissed = 1ULL << 26;
constexpr std::uint32_t kMostEndings = 1 << 13;  // of a flow
constexpr std::size_t kMostEndingsInAll = 1 << 17;

// Where streams begin: far enough above zero for packets from before the first one seen.
constexpr std::uint64_t kStreamBase = 1ULL << 33;

// The number nearest to `near` of those that a sequence number of so many bits may stand for.
std::uint64_t unwrapped(std::uint64_t near, std::uint32_t sequence, int bits = 32) {
    const std::uint32_t apart = (sequence - static_cast<std::uint32_t>(near)) << (32 - bits);
    const std::int64_t leap = static_cast<std::int32_t>(apart) >> (32 - bits);
    return near + static_cast<std::uint64_t>(leap);
}

// How many packets so many bytes of payload are, with so many in each.
std::uint64_t packets_of(std::uint64_t payload, std::uint32_t packet_bytes) {
    if (payload == packet_bytes || payload == 0 || packet_bytes == 0) return payload > 0;
    return (payload + packet_bytes - 1) / packet_bytes;
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// Bytes become batches, and batches become segments of flows.

void PacketScan::feed(Bytes piece) {
    while (!piece.empty() && damage().empty()) {
        file_.begin(batch_, piece.size());
        const std::size_t added = std::min(piece.size(), batch_.room().size());
        std::copy_n(piece.begin(), added, batch_.room().begin());
        batch_.size += added;
        piece = piece.subspan(added);
        file_.cut(batch_);
        segments_.read(batch_);
        take(segments_);
    }
}

// Threads that read one file. Each takes a batch through all stages, so that its bytes stay in one
// processor's cache; a lock for each of the two stages that have an order keeps it.
class Readers {
  public:
    Readers(PacketScan& scan, int file, std::uint64_t enough_bytes)
        : scan_(scan), descriptor_(file), enough_bytes_(enough_bytes) {}

    std::uint64_t read(unsigned threads) {
        std::vector<std::thread> others;
        try {
            while (others.size() + 1 < threads) others.emplace_back([this] { work(); });
        } catch (const std::system_error&) {  // no more threads here: those that are do it all
        }
        work();
        for (std::thread& other : others) other.join();
        if (failure_) std::rethrow_exception(failure_);
        return bytes_;
    }

  private:
    void work() {
        try {
            Batch batch;
            Segments segments;
            std::uint64_t turn = 0;
            while (take_next(batch, turn)) {
                segments.read(batch);
                std::unique_lock in_turn(taking_);
                turns_.wait(in_turn, [&] { return turn == turn_ || failure_; });
                if (failure_) return;
                scan_.take(segments);
                ++turn_;
                turns_.notify_all();
            }
        } catch (...) {  // out of memory
            const std::scoped_lock both(cutting_, taking_);
            failure_ = std::current_exception();
            is_over_ = true;
            turns_.notify_all();
        }
    }

    bool take_next(Batch& batch, std::uint64_t& turn) {
        const std::lock_guard alone(cutting_);
        if (is_over_) return false;
        scan_.file_.begin(batch, std::numeric_limits<std::uint32_t>::max());
        const std::size_t before = batch.size;
        fill(batch);
        scan_.file_.cut(batch);
        bytes_ += batch.size - before;
        is_over_ = batch.size == before || bytes_ >= enough_bytes_ || !scan_.damage().empty();
        turn = next_turn_++;
        return true;
    }

    void fill(Batch& batch) {
        while (!batch.room().empty()) {
            const ssize_t got = ::read(descriptor_, batch.room().data(), batch.room().size());
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) scan_.file_.stop(std::string("it cannot be read on: ") + std::strerror(errno));
            if (got <= 0) return;
            batch.size += static_cast<std::size_t>(got);
        }
    }

    PacketScan& scan_;
    const int descriptor_;
    const std::uint64_t enough_bytes_;
    std::mutex cutting_;  // holds for these four
    std::uint64_t bytes_ = 0;
    std::uint64_t next_turn_ = 0;
    bool is_over_ = false;
    std::mutex taking_;  // and for the rest
    std::condition_variable turns_;
    std::uint64_t turn_ = 0;
    std::exception_ptr failure_;
};

std::uint64_t PacketScan::read(int file, unsigned threads, std::uint64_t enough_bytes) {
    return Readers(*this, file, enough_bytes).read(threads);
}

void PacketScan::finish() {
    if (std::exchange(is_finished_, true)) return;
    file_.finish();
    for (std::uint32_t number = 0; number < flows_.size(); ++number) settle_holes(number);
    make_room();
    add_up();
    counts_.dropped = file_.dropped();
}

// ---------------------------------------------------------------------------------------------
// What packets say becomes what flows sent.

void PacketScan::take(const Segments& segments) {
    counts_ += segments.counts;
    const std::vector<FlowKey>& keys = segments.flows.keys();
    of_batch_.assign(keys.size(), FlowNumbers::kNone);
    const Segment* before = nullptr;
    auto beginning = segments.beginnings.begin();
    for (const Segment& segment : segments.all()) {
        const auto place = static_cast<std::size_t>(&segment - segments.all().data());
        const bool begins = beginning != segments.beginnings.end() && beginning->segment == place;
        const GlooBeginning gloo = begins ? (beginning++)->gloo : GlooBeginning{};
        if (keys[segment.flow].protocol >= kFragment) {
            if (segment.payload > 0) {
                take_fragment(keys[segment.flow], segment);
            } else {
                begin_fragments(keys[segment.flow], of_batch_[before->flow], *before);
            }
            continue;
        }
        before = &segment;
        std::uint32_t& flow = of_batch_[segment.flow];
        if (flow == FlowNumbers::kNone) flow = flow_of(keys[segment.flow]);
        if (flow == FlowNumbers::kNone) {
            ++counts_.crowded_packets;
            continue;
        }
        switch (keys[segment.flow].protocol) {
            case kTcp: take_tcp(flow, segment, gloo); break;
            case kRoce: take_roce(flow, segment); break;
            default: count(flows_[flow], segment, segment.payload, 0, segment.payload);
        }
    }
    for (std::size_t each = 0; each < segments.directions.size(); ++each) {
        if (segments.directions[each] == Direction::unknown) continue;
        if (of_batch_[each] == FlowNumbers::kNone) continue;
        flows_[of_batch_[each]].direction = segments.directions[each];
    }
}

void PacketScan::take_tcp(std::uint32_t number, const Segment& segment,
                          const GlooBeginning& beginning) {
    if (segment.flags & kSyn) open_connection(number, segment);
    Flow& flow = flows_[number];
    if (segment.flags & kAck) acknowledge(number, segment);
    if (segment.flags & kNoData) return count(flow, segment, 0, 0, 0);
    const std::uint32_t first = segment.sequence + (segment.flags & kSyn ? 1 : 0);  // SYN has one
    if (!flow.stream.has_begun()) flow.stream.begin(flow.ended = kStreamBase + first);
    Share share;
    if (segment.payload > 0) {
        const std::uint64_t near = flow.stream.furthest();
        const std::uint64_t there = unwrapped(near, first);
        if (std::max(near, there) - std::min(near, there) > kLargestWindow) {
            settle_holes(number);
            flow.stream.begin(flow.ended = kStreamBase + first);
            gloo_.restart(number);
        }
        const std::uint64_t begin = unwrapped(flow.stream.furthest(), first);
        const bool is_probe = segment.payload == 1 && begin + 1 == flow.stream.next();  // keep-alive
        if (!is_probe) share = flow.stream.add(begin, begin + segment.payload, segment.time_ns);
        give_up_holes(number);
        take_data(number, segment, begin, share, beginning);
    }
    flow.reordered_bytes += share.reordered;
    count(flow, segment, share.fresh, share.again, cut_by_offload(flow, segment));
}

void PacketScan::take_data(std::uint32_t number, const Segment& segment, std::uint64_t begin,
                           const Share& share, const GlooBeginning& beginning) {
    const std::uint64_t end = begin + segment.payload;
    const auto from = static_cast<std::uint32_t>(begin);
    const auto to = static_cast<std::uint32_t>(end);
    if (share.again > 0 || share.fresh == 0) {
        flows_[number].round_trips.sent_again();
    } else {
        flows_[number].round_trips.sent(to, segment.time_ns);
    }
    if (share.fresh < segment.payload) return;
    end_message(number, segment, end);
    gloo_.take(number, begin, end, beginning, segment.time_ns);
    passages_.passed(number, from, to, false, segment.time_ns);
}

void PacketScan::acknowledge(std::uint32_t number, const Segment& segment) {
    Flow& flow = flows_[number];
    const std::uint32_t upto = segment.acknowledged;
    const bool is_further = static_cast<std::int32_t>(upto - flow.acknowledged) > 0;
    if (is_further && flow.has_acknowledged) {
        passages_.passed(number, flow.acknowledged, upto, true, segment.time_ns);
    }
    if (is_further || !flow.has_acknowledged) flow.acknowledged = upto;
    flow.has_acknowledged = true;
    if (flow.back != FlowNumbers::kNone) {
        flows_[flow.back].round_trips.acknowledged(upto, segment.time_ns);
    }
}

void PacketScan::take_roce(std::uint32_t number, const Segment& segment) {
    Flow& flow = flows_[number];
    if (segment.flags & kNoData) return count(flow, segment, 0, 0, 0);
    if (!flow.stream.has_begun()) flow.stream.begin(kStreamBase + segment.sequence);
    const std::uint64_t packet = unwrapped(flow.stream.furthest(), segment.sequence, 24);
    const Share share = flow.stream.add(packet, packet + 1, segment.time_ns);
    flow.largest_payload = std::max(flow.largest_payload, segment.payload);
    flow.is_reliable = (segment.flags & kReliable) != 0;
    give_up_holes(number);
    flow.reordered_bytes += share.reordered * segment.payload;
    count(flow, segment, share.fresh * segment.payload, share.again * segment.payload,
          segment.payload);
}

void PacketScan::begin_fragments(const FlowKey& key, std::uint32_t flow, const Segment& first) {
    if (flow == FlowNumbers::kNone) return;
    if (fragmented_.size() == kMostFragmented) {
        fragmented_.clear();
        fragmented_numbers_.clear();
    }
    const std::uint32_t number = fragmented_numbers_.number(key);
    fragmented_.resize(fragmented_numbers_.keys().size());
    fragmented_[number] = {flow, first.sequence - 20 - first.options};
}

void PacketScan::take_fragment(const FlowKey& key, const Segment& segment) {
    const std::uint32_t number = fragmented_numbers_.known(key);
    if (number == FlowNumbers::kNone) {
        ++counts_.fragments;
        ++counts_.other_packets;
        counts_.other_bytes += segment.wire_bytes;
        return;
    }
    const Fragmented& whole = fragmented_[number];
    Flow& flow = flows_[whole.flow];
    if (keys()[whole.flow].protocol != kTcp) {
        return count(flow, segment, segment.payload, 0, segment.payload);
    }
    const std::uint32_t sequence = whole.sequence + segment.sequence;
    if (!flow.stream.has_begun()) flow.stream.begin(kStreamBase + sequence);
    const std::uint64_t begin = unwrapped(flow.stream.furthest(), sequence);
    const Share share = flow.stream.add(begin, begin + segment.payload, segment.time_ns);
    give_up_holes(whole.flow);
    flow.reordered_bytes += share.reordered;
    count(flow, segment, share.fresh, share.again, segment.payload);
}

void PacketScan::open_connection(std::uint32_t number, const Segment& segment) {
    Flow& flow = flows_[number];
    const bool is_again = flow.stream.has_begun() && flow.first_sequence == segment.sequence;
    if (!is_again) {
        settle_holes(number);
        flow.first_sequence = segment.sequence;
        flow.segment_limit = 0;
        flow.has_acknowledged = false;
        flow.stream.begin(flow.ended = kStreamBase + segment.sequence + 1);
        gloo_.restart(number);
    }
    // Less than 48 is below what IP guarantees: nobody means it.
    if (segment.announced >= 48) agree_segments(number, segment.announced);
}

// Keeps the segment size that both ends can take: each announces its own.
void PacketScan::agree_segments(std::uint32_t number, std::uint16_t announced) {
    for (const std::uint32_t each : {number, flow_of(numbers_.keys()[number].turned())}) {
        if (each == FlowNumbers::kNone) continue;
        std::uint16_t& limit = flows_[each].segment_limit;
        limit = limit ? std::min(limit, announced) : announced;
    }
}

// Notes where a message ends: full packets are followed by more. Without an opening, the largest packet
// or what large frames divide by is full.
void PacketScan::end_message(std::uint32_t number, const Segment& segment, std::uint64_t end) {
    Flow& flow = flows_[number];
    if (segment.payload == flow.largest_payload) return;  // which spares dividing, most often
    std::uint32_t full = flow.segment_limit > segment.options ? flow.segment_limit - segment.options : 0;
    if (full == 0) full = flow.segment_guess;
    if (full == 0) full = flow.largest_payload < 9000 ? flow.largest_payload : 1460u - segment.options;
    const bool is_full = segment.payload >= full && segment.payload % std::max(full, 1u) == 0;
    if (is_full || end <= flow.ended || flow.endings == kMostEndings) return;
    if (endings_.size() == kMostEndingsInAll) return;
    ++flow.endings;
    endings_.push_back({segment.time_ns, end - flow.ended, number});
    flow.ended = end;
}

// The most payload that a packet of a frame had on the wire: with segmentation offload a host sees
// frames of up to 64 KiB, which are many packets.
std::uint32_t PacketScan::cut_by_offload(Flow& flow, const Segment& segment) {
    const std::uint32_t payload = segment.payload;
    flow.largest_payload = std::max(flow.largest_payload, payload);
    if (payload <= 536) return payload;
    const std::uint32_t ethernet = 1460u - segment.options;  // of an MTU of 1500, over IPv4
    std::uint32_t most = flow.segment_limit > segment.options ? flow.segment_limit - segment.options : 0;
    if (most == 0) {
        if (payload <= ethernet) return payload;
        const std::uint32_t jumbo = 8960u - segment.options;
        // Whole segments are handed down: their size divides most large frames.
        if (payload % ethernet == 0) {
            flow.segment_guess = static_cast<std::uint16_t>(ethernet);
        } else if (payload % jumbo == 0) {
            flow.segment_guess = static_cast<std::uint16_t>(jumbo);
        }
        most = flow.segment_guess ? flow.segment_guess : payload <= jumbo ? jumbo : ethernet;
        if (payload > most) flow.supposed_packets += packets_of(payload, most);
    }
    return std::min(payload, most);
}

void PacketScan::count(Flow& flow, const Segment& segment, std::uint64_t fresh,
                       std::uint64_t again, std::uint32_t packet_bytes) {
    const std::uint64_t full = packets_of(segment.payload, packet_bytes);
    const std::uint64_t packets = std::max<std::uint64_t>(full, 1);  // headers alone are one, too
    const std::uint64_t length = segment.wire_bytes;
    const std::uint64_t headers = length - std::min<std::uint64_t>(length, segment.payload);
    const std::int64_t number = segment.time_ns >> shift_;
    if (flow.now.number != number || flow.now.packets == 0) {
        keep(flow.now);
        if (bins_.size() >= kMostBins) make_room();
        flow.now = {.number = segment.time_ns >> shift_,
                    .flow = static_cast<std::uint32_t>(&flow - flows_.data())};
    }
    flow.first_ns = std::min(flow.first_ns, segment.time_ns);
    flow.last_ns = std::max(flow.last_ns, segment.time_ns);
    flow.retransmitted_bytes += again;
    flow.now.payload_bytes += fresh;
    flow.now.wire_bytes += length + (packets - 1) * headers;
    flow.now.packets += packets;
    // A frame of many packets may repeat the payload of only some of them.
    flow.now.retransmits += packets_of(again, packet_bytes);
}

std::uint32_t PacketScan::flow_of(const FlowKey& key) {
    const std::uint32_t known = numbers_.known(key);
    if (known != FlowNumbers::kNone || flows_.size() == kMostFlows) return known;
    flows_.emplace_back();
    const std::uint32_t number = numbers_.number(key);
    const std::uint32_t back = key.queue_pair ? FlowNumbers::kNone : numbers_.known(key.turned());
    if (back != FlowNumbers::kNone) {
        flows_[number].back = back;
        flows_[back].back = number;
    }
    return number;
}

// ---------------------------------------------------------------------------------------------
// Bins get wider when they are too many.

void PacketScan::keep(Bin& bin) {
    if (bin.packets > 0) bins_.push_back(bin);
    bin.packets = 0;
}

// Puts the bins in order, one for each flow and time, and doubles their width while that leaves
// more than half of the room taken.
void PacketScan::make_room() {
    for (Flow& flow : flows_) keep(flow.now);
    sort_bins();
    merge_bins();
    while (bins_.size() > kMostBins / 2 && shift_ < 62) {
        ++shift_;
        for (Bin& bin : bins_) bin.number >>= 1;
        merge_bins();
    }
}

// Bins come in the order of time, nearly, so what remains is to bring each flow's together.
void PacketScan::sort_bins() {
    std::vector<std::size_t> begins(flows_.size() + 1);
    for (const Bin& bin : bins_) ++begins[bin.flow + 1];
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    std::vector<Bin> sorted(bins_.size());
    std::vector<std::size_t> next = begins;
    for (const Bin& bin : bins_) sorted[next[bin.flow]++] = bin;
    const auto is_earlier = [](const Bin& a, const Bin& b) { return a.number < b.number; };
    for (std::size_t flow = 0; flow < flows_.size(); ++flow) {
        const auto from = sorted.begin() + static_cast<std::ptrdiff_t>(begins[flow]);
        const auto to = sorted.begin() + static_cast<std::ptrdiff_t>(begins[flow + 1]);
        if (!std::is_sorted(from, to, is_earlier)) std::sort(from, to, is_earlier);
    }
    bins_ = std::move(sorted);
}

void PacketScan::merge_bins() {
    std::size_t kept = 0;
    for (std::size_t each = 1; each < bins_.size(); ++each) {
        Bin& into = bins_[kept];
        const Bin& bin = bins_[each];
        if (into.flow != bin.flow || into.number != bin.number) {
            bins_[++kept] = bin;
            continue;
        }
        into.payload_bytes += bin.payload_bytes;
        into.wire_bytes += bin.wire_bytes;
        into.packets += bin.packets;
        into.retransmits += bin.retransmits;
    }
    bins_.resize(std::min(bins_.size(), kept + 1));
}

// Flows sent what their bins say.
void PacketScan::add_up() {
    for (const Bin& bin : bins_) {
        Flow& flow = flows_[bin.flow];
        flow.packets += bin.packets;
        flow.payload_bytes += bin.payload_bytes;
        flow.wire_bytes += bin.wire_bytes;
    }
    for (Flow& flow : flows_) {
        if (flow.packets == 0) flow.first_ns = 0;
    }
}

// Of too many holes the oldest are given up.
void PacketScan::give_up_holes(std::uint32_t number) {
    while (flows_[number].stream.has_too_many_holes()) {
        settle(number, flows_[number].stream.give_up_oldest());
    }
}

void PacketScan::settle_holes(std::uint32_t number) {
    for (const Hole& hole : flows_[number].stream.holes()) settle(number, hole);
}

// Bytes that the other side acknowledged did arrive: where they were not seen, the capture missed
// them and not the network. They were sent, so they count, when they were found to be missing. Of a
// reliable queue pair of RoCEv2 nobody sees who acknowledges it; but what it had lost it would have
// sent again, with all that follows.
void PacketScan::settle(std::uint32_t number, const Hole& hole) {
    Flow& flow = flows_[number];
    const bool is_roce = keys()[number].protocol == kRoce;  // which numbers packets
    const std::uint64_t bytes = (hole.end - hole.begin) * (is_roce ? flow.largest_payload : 1);
    const Flow* const back = flow.back == FlowNumbers::kNone ? nullptr : &flows_[flow.back];
    const bool has_arrived =
        flow.is_reliable ||
        (back != nullptr && back->has_acknowledged &&
         static_cast<std::int32_t>(back->acknowledged - static_cast<std::uint32_t>(hole.end)) >= 0);
    (has_arrived ? flow.missed_bytes : flow.lost_bytes) += bytes;
    if (!has_arrived || bytes > kMostMissed) return;
    if (bins_.size() >= kMostBins) make_room();
    bins_.push_back({.number = hole.opened_ns >> shift_, .payload_bytes = bytes, .flow = number});
}

}  // namespace fullwire
