#include "packets.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>

namespace fullwire {
namespace {

constexpr std::size_t kMostFlows = 1 << 16;
constexpr std::size_t kMostBins = 1 << 19;
constexpr std::size_t kMostPieces = 64;  // of one stream
constexpr std::size_t kMostInterfaces = 1 << 12;
// No tool writes longer frames of a network, whatever snap length its header claims.
constexpr std::uint32_t kLongestFrame = 1 << 18;
constexpr std::uint32_t kLongestBlock = kLongestFrame + (1 << 16);
// A hole that fills sooner was reordering: retransmission takes longer than a round trip. The same
// limit as Wireshark's, which is there for captures without round-trip times, too.
constexpr std::int64_t kReorderedWithin_ns = 3'000'000;
constexpr std::uint64_t kLargestWindow = 1ULL << 30;  // TCP's; a longer leap is another connection

// Where streams begin: far enough above zero for packets from before the first one seen.
constexpr std::uint64_t kStreamBase = 1ULL << 33;

constexpr std::uint32_t kPcapMicro = 0xa1b2c3d4;
constexpr std::uint32_t kPcapNano = 0xa1b23c4d;
constexpr std::uint32_t kPcapng = 0x0a0d0d0a;
constexpr std::uint32_t kOrder = 0x1a2b3c4d;
constexpr std::size_t kPcapHeader = 24;
constexpr std::size_t kRecordHeader = 16;

constexpr std::uint16_t kIp4 = 0x0800;
constexpr std::uint16_t kIp6 = 0x86dd;
constexpr std::uint16_t kVxlanPort = 4789;
constexpr std::uint16_t kRocePort = 4791;
constexpr std::int64_t kEthernetHeader = 14;

std::uint16_t big16(const std::uint8_t* at) {
    return static_cast<std::uint16_t>(at[0] << 8 | at[1]);
}

std::uint32_t big32(const std::uint8_t* at) {
    return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 |
           at[3];
}

template <typename T>
T raw(const std::uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

std::array<std::uint64_t, 2> mapped(const std::uint8_t* address) {
    std::array<std::uint8_t, 16> bytes{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    std::memcpy(bytes.data() + 12, address, 4);
    return std::bit_cast<std::array<std::uint64_t, 2>>(bytes);
}

// Times are never negative, so that their differences fit.
std::int64_t since_epoch(std::uint64_t ns) {
    return std::max<std::int64_t>(static_cast<std::int64_t>(ns), 0);
}

std::uint64_t power_of_ten(int exponent) {
    std::uint64_t power = 1;
    while (exponent-- > 0) power *= 10;
    return power;
}

// The number nearest to `near` of those that a sequence number of 32 bits may stand for.
std::uint64_t unwrapped(std::uint64_t near, std::uint32_t sequence) {
    const auto leap = static_cast<std::int32_t>(sequence - static_cast<std::uint32_t>(near));
    return near + static_cast<std::uint64_t>(std::int64_t{leap});
}

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    return hash ^ hash >> 32;
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// A stream: which bytes have been seen.

void Stream::begin(std::uint64_t next) {
    closed_ += holes() - closed_;
    closed_end_ = furthest();
    next_ = next;
    ahead_.clear();
    begun_ = true;
}

Share Stream::add(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns) {
    if (begin == next_ && ahead_.empty()) {
        next_ = end;
        return {.fresh = end - begin};
    }
    if (!ahead_.empty() && begin == ahead_.back().end) {
        ahead_.back().end = end;
        return {.fresh = end - begin};
    }
    Share share;
    if (begin < next_) {
        share.again = std::min(end, next_) - begin;
        begin = next_;
    }
    return begin < end ? add_among(begin, end, time_ns, share) : share;
}

Share Stream::add_among(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns,
                        Share share) {
    // Pieces that touch or overlap [begin, end) become one with it.
    auto first = std::find_if(ahead_.begin(), ahead_.end(),
                              [&](const Piece& piece) { return piece.end >= begin; });
    Piece whole{begin, end, time_ns};
    std::uint64_t reached = begin;
    auto last = first;
    for (; last != ahead_.end() && last->begin <= end; ++last) {
        const std::uint64_t seen_from = std::max(last->begin, begin);
        const std::uint64_t seen_to = std::min(last->end, end);
        const std::uint64_t filled = seen_from > reached ? seen_from - reached : 0;
        const bool is_soon = time_ns - last->opened_ns <= kReorderedWithin_ns;
        share.fresh += filled;
        (is_soon ? share.reordered : share.again) += filled;
        if (seen_to > seen_from) share.again += seen_to - seen_from;
        reached = std::max(reached, seen_to);
        whole.begin = std::min(whole.begin, last->begin);
        whole.end = std::max(whole.end, last->end);
        whole.opened_ns = std::min(whole.opened_ns, last->opened_ns);
    }
    if (end > reached) {
        const std::uint64_t rest = end - reached;
        share.fresh += rest;
        if (last != ahead_.end()) {  // it lies in a hole, and fills part of it
            const bool is_soon = time_ns - last->opened_ns <= kReorderedWithin_ns;
            (is_soon ? share.reordered : share.again) += rest;
            whole.opened_ns = std::min(whole.opened_ns, last->opened_ns);
        }
    }
    first = ahead_.erase(first, last);
    if (whole.begin <= next_) {
        next_ = whole.end;
    } else {
        ahead_.insert(first, whole);
        if (ahead_.size() > kMostPieces) close_lowest_hole();
    }
    return share;
}

void Stream::close_lowest_hole() {
    closed_ += ahead_.front().begin - next_;
    closed_end_ = ahead_.front().begin;
    next_ = ahead_.front().end;
    ahead_.erase(ahead_.begin());
}

std::uint64_t Stream::holes() const {
    std::uint64_t total = closed_;
    std::uint64_t reached = next_;
    for (const Piece& piece : ahead_) {
        total += piece.begin - reached;
        reached = piece.end;
    }
    return total;
}

std::uint64_t Stream::last_hole_end() const {
    return ahead_.empty() ? closed_end_ : ahead_.back().begin;
}

// ---------------------------------------------------------------------------------------------
// Units of a file: its header, then records or blocks.

void PacketScan::feed(Bytes piece) {
    while (!piece.empty() && damage_.empty()) {
        if (skip_ > 0) {
            const std::size_t skipped = std::min<std::uint64_t>(skip_, piece.size());
            skip_ -= skipped;
            position_ += skipped;
            piece = piece.subspan(skipped);
        } else if (!pending_.empty()) {
            piece = piece.subspan(complete_pending(piece));
        } else if (format_ == Format::pcap) {
            const std::size_t used = take_records(piece);
            piece = piece.subspan(used);
            if (damage_.empty()) {
                pending_.assign(piece.begin(), piece.end());
                return;
            }
        } else {
            const std::size_t need = wanted(piece);
            if (!damage_.empty()) return;
            if (need > piece.size()) {
                pending_.assign(piece.begin(), piece.end());
                return;
            }
            take(piece.first(need));
            position_ += need;
            piece = piece.subspan(need);
        }
    }
}

// Adds what the pending unit lacks, or as much of it as there is; returns how much that was. Its
// header says how long it is, so this may take two turns.
std::size_t PacketScan::complete_pending(Bytes piece) {
    const std::size_t lacks = wanted(pending_) - pending_.size();
    const std::size_t added = std::min(lacks, piece.size());
    pending_.insert(pending_.end(), piece.begin(), piece.begin() + static_cast<long>(added));
    if (added == lacks && wanted(pending_) == pending_.size() && damage_.empty()) {
        const std::vector<std::uint8_t> unit = std::exchange(pending_, {});
        take(unit);
        position_ += unit.size();
    }
    return added;
}

void PacketScan::finish() {
    if (std::exchange(is_finished_, true)) return;
    if (damage_.empty() && format_ == Format::unknown) {
        stop(position_ + pending_.size() == 0 ? "the file is empty" : "not a capture");
    } else if (damage_.empty() && (!pending_.empty() || skip_ > 0)) {
        stop("the file ends within a packet");
    }
    for (Flow& flow : flows_) keep(flow.now);
    make_room();
    find_missed();
    for (const Interface& interface : interfaces_) counts_.dropped += interface.dropped;
}

void PacketScan::stop(const std::string& problem) {
    damage_ = problem + ", after " + std::to_string(counts_.packets) + " packets, at byte " +
              std::to_string(position_);
    pending_.clear();
}

std::uint16_t PacketScan::u16(const std::uint8_t* at) const {
    const auto value = raw<std::uint16_t>(at);
    return is_big_ == (std::endian::native == std::endian::big)
               ? value
               : static_cast<std::uint16_t>(value << 8 | value >> 8);
}

std::uint32_t PacketScan::u32(const std::uint8_t* at) const {
    const auto value = raw<std::uint32_t>(at);
    return is_big_ == (std::endian::native == std::endian::big) ? value : __builtin_bswap32(value);
}

std::size_t PacketScan::wanted(Bytes rest) {
    if (format_ == Format::pcap) return wanted_record(rest);
    if (format_ == Format::pcapng) return wanted_block(rest);
    if (rest.size() < 4) return 4;
    return big32(rest.data()) == kPcapng ? wanted_block(rest) : kPcapHeader;
}

std::size_t PacketScan::wanted_record(Bytes rest) {
    if (rest.size() < kRecordHeader) return kRecordHeader;
    const std::uint32_t captured = u32(rest.data() + 8);
    if (captured > kLongestFrame) {
        stop("a packet claims " + std::to_string(captured) + " bytes");
        return 0;
    }
    return kRecordHeader + captured;
}

std::size_t PacketScan::wanted_block(Bytes rest) {
    if (rest.size() < 12) return 12;
    if (big32(rest.data()) == kPcapng) {  // the order of bytes may change with every section
        const std::uint32_t order = big32(rest.data() + 8);
        if (order != kOrder && order != __builtin_bswap32(kOrder)) {
            stop("a section of unknown byte order");
            return 0;
        }
        is_big_ = order == kOrder;
    }
    const std::uint32_t type = u32(rest.data());
    const std::uint32_t length = u32(rest.data() + 4);
    const bool is_read = type <= 6 || big32(rest.data()) == kPcapng;
    if (length < 12 || length % 4 != 0 || (is_read && length > kLongestBlock)) {
        stop("a block claims " + std::to_string(length) + " bytes");
        return 0;
    }
    return is_read ? length : 12;  // the rest of other blocks is skipped
}

void PacketScan::take(Bytes unit) {
    if (format_ == Format::pcap) {
        take_record(unit);
    } else if (format_ == Format::pcapng || big32(unit.data()) == kPcapng) {
        format_ = Format::pcapng;
        take_block(unit);
    } else {
        take_file_header(unit);
    }
}

// The hot loop: whole records, as many as there are.
std::size_t PacketScan::take_records(Bytes rest) {
    std::size_t used = 0;
    while (rest.size() - used >= kRecordHeader) {
        const Bytes here = rest.subspan(used);
        const std::size_t need = wanted_record(here);
        if (need == 0 || need > here.size()) break;
        // The next record is where this one ends, so its header can be on its way already.
        __builtin_prefetch(here.data() + need + 256);
        take_record(here.first(need));
        used += need;
        position_ += need;
    }
    return used;
}

void PacketScan::take_file_header(Bytes unit) {
    const std::uint32_t magic = big32(unit.data());
    is_big_ = magic == kPcapMicro || magic == kPcapNano;
    const std::uint32_t plain = is_big_ ? magic : __builtin_bswap32(magic);
    if (plain != kPcapMicro && plain != kPcapNano) {
        stop("not a capture: expected pcap or pcapng");
        return;
    }
    format_ = Format::pcap;
    is_nano_ = plain == kPcapNano;
    // The upper half says how long the frame check sequence is, where there is one.
    interfaces_.push_back({.link = u32(unit.data() + 20) & 0xffff});
}

void PacketScan::take_record(Bytes unit) {
    const std::uint64_t seconds = u32(unit.data());
    const std::uint64_t fraction = u32(unit.data() + 4);
    const std::uint32_t length = u32(unit.data() + 12);
    const Bytes data = unit.subspan(kRecordHeader);
    frame(interfaces_.front().link,
          {data, std::max<std::size_t>(length, data.size()), 0,
           static_cast<std::int64_t>(seconds * 1'000'000'000 + fraction * (is_nano_ ? 1 : 1000)),
           0});
}

void PacketScan::take_block(Bytes unit) {
    const std::uint32_t type = u32(unit.data());
    const std::uint32_t length = u32(unit.data() + 4);
    if (unit.size() < length) {  // nobody reads it
        skip_ = length - unit.size();
        return;
    }
    if (u32(unit.data() + length - 4) != length) {
        stop("a block whose two lengths differ");
        return;
    }
    const Bytes body = unit.subspan(8, length - 12);
    if (big32(unit.data()) == kPcapng) {
        for (const Interface& interface : interfaces_) counts_.dropped += interface.dropped;
        interfaces_.clear();
    } else if (type == 1) {
        take_interface(body);
    } else if (type == 6 || type == 2) {
        take_enhanced(body, type == 2);
    } else if (type == 3) {
        take_simple(body);
    } else if (type == 5) {
        take_statistics(body);
    }
}

namespace {

// Calls `use(code, value)` for each option of a block.
template <typename U16, typename Use>
void each_option(Bytes options, U16 u16, Use use) {
    while (options.size() >= 4) {
        const std::uint16_t code = u16(options.data());
        const std::size_t length = u16(options.data() + 2);
        if (code == 0 || length > options.size() - 4) return;
        use(code, options.subspan(4, length));
        options = options.subspan(std::min(options.size(), 4 + (length + 3) / 4 * 4));
    }
}

}  // namespace

void PacketScan::take_interface(Bytes body) {
    if (body.size() < 8) return stop("an interface without a link type");
    if (interfaces_.size() == kMostInterfaces) return stop("more than 4096 interfaces");
    Interface interface{.link = u16(body.data())};
    const auto read = [this](const std::uint8_t* at) { return u16(at); };
    each_option(body.subspan(8), read, [&](std::uint16_t code, Bytes value) {
        if (code == 9 && !value.empty()) interface.resolution = value[0];
        if (code == 14 && value.size() == 8) {
            const std::uint64_t low = u32(value.data() + (is_big_ ? 4 : 0));
            const std::uint64_t high = u32(value.data() + (is_big_ ? 0 : 4));
            interface.offset_s = static_cast<std::int64_t>(high << 32 | low);
        }
    });
    const bool is_binary = interface.resolution & 0x80;
    if ((interface.resolution & 0x7f) > (is_binary ? 63 : 19)) {
        return stop("an interface whose clock is finer than any");
    }
    interfaces_.push_back(interface);
}

std::int64_t PacketScan::time_of(const Interface& interface, std::uint64_t ticks) const {
    const int power = interface.resolution & 0x7f;
    std::uint64_t ns = 0;
    if (interface.resolution & 0x80) {
        const std::uint64_t whole = ticks >> power;
        const std::uint64_t rest = ticks - (whole << power);
        // Halved until the product fits: beyond 2^-34 s a nanosecond has all it can have.
        const int excess = std::max(0, power - 34);
        ns = whole * 1'000'000'000 + ((rest >> excess) * 1'000'000'000 >> (power - excess));
    } else {
        ns = power <= 9 ? ticks * power_of_ten(9 - power) : ticks / power_of_ten(power - 9);
    }
    return since_epoch(ns + static_cast<std::uint64_t>(interface.offset_s) * 1'000'000'000);
}

void PacketScan::take_enhanced(Bytes body, bool is_old) {
    if (body.size() < 20) return stop("a packet block without its header");
    const std::uint32_t number = is_old ? u16(body.data()) : u32(body.data());
    if (number >= interfaces_.size()) return stop("a packet of an interface that is not described");
    const std::uint64_t ticks = std::uint64_t{u32(body.data() + 4)} << 32 | u32(body.data() + 8);
    const std::size_t captured = u32(body.data() + 12);
    const std::size_t length = u32(body.data() + 16);
    if (captured > body.size() - 20) return stop("a packet longer than its block");
    const Interface& interface = interfaces_[number];
    frame(interface.link, {body.subspan(20, captured), std::max(length, captured), 0,
                           time_of(interface, ticks), number});
}

void PacketScan::take_simple(Bytes body) {
    if (body.size() < 4 || interfaces_.empty()) return stop("a packet of no interface");
    ++counts_.packets;
    ++counts_.untimed;
    counts_.bytes += u32(body.data());
}

void PacketScan::take_statistics(Bytes body) {
    if (body.size() < 12) return stop("statistics without their header");
    const std::uint32_t number = u32(body.data());
    if (number >= interfaces_.size()) return stop("statistics of an interface that is not described");
    const auto read = [this](const std::uint8_t* at) { return u16(at); };
    std::uint64_t dropped = 0;
    each_option(body.subspan(12), read, [&](std::uint16_t code, Bytes value) {
        if ((code == 5 || code == 7) && value.size() == 8) {
            dropped += u32(value.data() + (is_big_ ? 4 : 0));  // 4 billion are enough to say so
        }
    });
    interfaces_[number].dropped = std::max(interfaces_[number].dropped, dropped);
}

// ---------------------------------------------------------------------------------------------
// Layers of a frame. `end` is where the layer above says that its contents end; what was captured
// may end before, and padding may follow.

void PacketScan::frame(std::uint32_t link, Frame frame) {
    ++counts_.packets;
    counts_.bytes += frame.length;
    const std::uint8_t* const data = frame.data.data();
    const std::size_t size = frame.data.size();
    const std::size_t end = frame.length;
    switch (link) {
        case 1: return ethernet(frame, 0, end, 0);
        case 12: case 14: case 101: case 228: case 229: {  // IP and nothing below
            if (size < 1) break;
            return network(frame, 0, end, data[0] >> 4 == 6 ? kIp6 : kIp4, 0);
        }
        case 0: case 108: {  // loopback: the family in some byte order
            if (size < 5) break;
            frame.link_bytes = -4;
            return network(frame, 4, end, data[4] >> 4 == 6 ? kIp6 : kIp4, 0);
        }
        case 113: {  // Linux cooked: it stands for an Ethernet header
            if (size < 16) break;
            frame.link_bytes = kEthernetHeader - 16;
            return network(frame, 16, end, big16(data + 14), 0);
        }
        case 276: {  // its second version, which names the interface
            if (size < 20) break;
            frame.link_bytes = kEthernetHeader - 20;
            frame.point = big32(data + 4);
            return network(frame, 20, end, big16(data), 0);
        }
        default: return other(frame);
    }
    ++counts_.cut_headers;
}

void PacketScan::other(const Frame& frame) {
    ++counts_.other_packets;
    counts_.other_bytes += frame.length;
}

void PacketScan::ethernet(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    if (frame.data.size() < at + 14) {
        ++counts_.cut_headers;
        return;
    }
    network(frame, at + 14, end, big16(frame.data.data() + at + 12), depth);
}

void PacketScan::network(const Frame& frame, std::size_t at, std::size_t end, std::uint16_t type,
                         int depth) {
    while (type == 0x8100 || type == 0x88a8 || type == 0x9100) {  // VLAN tags
        if (frame.data.size() < at + 4) {
            ++counts_.cut_headers;
            return;
        }
        type = big16(frame.data.data() + at + 2);
        at += 4;
    }
    if (type == kIp4) return ip4(frame, at, end, depth);
    if (type == kIp6) return ip6(frame, at, end, depth);
    other(frame);
}

void PacketScan::ip4(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    if (frame.data.size() < at + 20) {
        ++counts_.cut_headers;
        return;
    }
    const std::uint8_t* const ip = frame.data.data() + at;
    const std::size_t header = (ip[0] & 15) * 4u;
    // Offload leaves 0 where a length does not fit, or is filled in later.
    const std::size_t total = big16(ip + 2) ? big16(ip + 2) : end - at;
    if (ip[0] >> 4 != 4 || header < 20 || total < header || at + total > end) {
        ++counts_.impossible;
        return;
    }
    if (big16(ip + 6) & 0x1fff) {
        ++counts_.fragments;
        return other(frame);
    }
    transport(frame, at + header, at + total, ip[9], {mapped(ip + 12), mapped(ip + 16)}, depth);
}

void PacketScan::ip6(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    if (frame.data.size() < at + 40) {
        ++counts_.cut_headers;
        return;
    }
    const std::uint8_t* const ip = frame.data.data() + at;
    const std::size_t length = big16(ip + 4);  // 0 in jumbograms, which big TCP sends
    if (ip[0] >> 4 != 6 || at + 40 + length > end) {
        ++counts_.impossible;
        return;
    }
    if (length) end = at + 40 + length;
    const Addresses between{raw<std::array<std::uint64_t, 2>>(ip + 8),
                            raw<std::array<std::uint64_t, 2>>(ip + 24)};
    std::uint32_t next = ip[6];
    at += 40;
    while (next == 0 || next == 43 || next == 44 || next == 60) {  // extension headers
        if (frame.data.size() < at + 8) {
            ++counts_.cut_headers;
            return;
        }
        const std::uint8_t* const header = frame.data.data() + at;
        if (next == 44 && (big16(header + 2) & 0xfff8)) {
            ++counts_.fragments;
            return other(frame);
        }
        at += next == 44 ? 8 : 8 + header[1] * 8u;
        next = header[0];
    }
    if (at > end) {
        ++counts_.impossible;
        return;
    }
    transport(frame, at, end, next, between, depth);
}

void PacketScan::transport(const Frame& frame, std::size_t at, std::size_t end,
                           std::uint32_t protocol, const Addresses& between, int depth) {
    if (protocol == kTcp) return tcp(frame, at, end, between);
    if (protocol == kUdp) return udp(frame, at, end, between, depth);
    other(frame);
}

void PacketScan::tcp(const Frame& frame, std::size_t at, std::size_t end,
                     const Addresses& between) {
    if (frame.data.size() < at + 14) {
        ++counts_.cut_headers;
        return;
    }
    const std::uint8_t* const header = frame.data.data() + at;
    const std::size_t size = (header[12] >> 4) * 4u;
    if (size < 20 || at + size > end) {
        ++counts_.impossible;
        return;
    }
    const std::size_t payload = end - at - size;
    const std::uint32_t number = flow_of({.source = between.source,
                                          .destination = between.destination,
                                          .source_port = big16(header),
                                          .destination_port = big16(header + 2),
                                          .point = frame.point,
                                          .protocol = kTcp});
    if (number == kNoFlow) return;
    const std::uint8_t flags = header[13];
    const std::uint32_t sequence = big32(header + 4);
    if (flags & 2) {  // SYN: it takes a number of its own
        open_connection(flows_[number], sequence);
        const std::size_t seen = std::min(frame.data.size() - at, size);
        agree_segments(number, seen > 20 ? frame.data.subspan(at + 20, seen - 20) : Bytes{});
    }
    Flow& flow = flows_[number];
    if (flags & 16) {
        const std::uint32_t acknowledged = big32(header + 8);
        const bool is_further = static_cast<std::int32_t>(acknowledged - flow.acknowledged) > 0;
        if (is_further || !flow.has_acknowledged) flow.acknowledged = acknowledged;
        flow.has_acknowledged = true;
    }
    if (flags & 4) return count(flow, frame, 0, 0, 0, 1);  // RST: what it carries is no data
    const std::uint32_t first = sequence + (flags & 2 ? 1 : 0);
    if (!flow.stream.has_begun()) {
        flow.stream.begin(kStreamBase + first);
    }
    Share share;
    if (payload > 0) {
        const std::uint64_t near = flow.stream.furthest();
        const std::uint64_t there = unwrapped(near, first);
        if (std::max(near, there) - std::min(near, there) > kLargestWindow) {
            flow.stream.begin(kStreamBase + first);
        }
        const std::uint64_t begin = unwrapped(flow.stream.furthest(), first);
        const bool is_probe = payload == 1 && begin + 1 == flow.stream.next();  // keep-alive
        if (!is_probe) share = flow.stream.add(begin, begin + payload, frame.time_ns);
    }
    flow.reordered_bytes += share.reordered;
    const std::uint32_t packets = segments(flow, payload, size - 20);
    count(flow, frame, share.fresh, share.again, payload, packets);
}

void PacketScan::open_connection(Flow& flow, std::uint32_t sequence) {
    if (flow.stream.has_begun() && flow.first_sequence == sequence) return;  // SYN sent again
    flow.first_sequence = sequence;
    flow.segment_limit = 0;
    flow.has_acknowledged = false;
    flow.stream.begin(kStreamBase + sequence + 1);
}

// Keeps the segment size that both ends can take: each announces its own.
void PacketScan::agree_segments(std::uint32_t number, Bytes options) {
    std::uint16_t announced = 0;
    while (options.size() >= 2 && options[0] != 0) {
        if (options[0] == 1) {
            options = options.subspan(1);
            continue;
        }
        const std::size_t length = options[1];
        if (length < 2 || length > options.size()) break;
        if (options[0] == 2 && length == 4) announced = big16(options.data() + 2);
        options = options.subspan(length);
    }
    if (announced < 48) return;  // less than IP guarantees: nobody means it
    const FlowKey& key = flows_[number].key;
    const std::uint32_t back = flow_of({key.destination, key.source, key.destination_port,
                                        key.source_port, 0, key.point, kTcp});
    for (const std::uint32_t each : {number, back}) {
        if (each == kNoFlow) continue;
        std::uint16_t& limit = flows_[each].segment_limit;
        limit = limit ? std::min(limit, announced) : announced;
    }
}

// How many packets a frame was on the wire: with segmentation offload a host sees up to 64 KiB.
std::uint32_t PacketScan::segments(Flow& flow, std::size_t payload, std::size_t options) {
    flow.largest_payload = std::max(flow.largest_payload, static_cast<std::uint32_t>(payload));
    const std::size_t ethernet = 1460 - options;  // of an MTU of 1500, over IPv4
    if (payload <= 536) return 1;
    std::size_t most = flow.segment_limit > options ? flow.segment_limit - options : 0;
    if (most == 0) {
        if (payload <= ethernet) return 1;
        const std::size_t jumbo = 8960 - options;
        // Whole segments are handed down: their size divides most large frames.
        if (payload % ethernet == 0) {
            flow.segment_guess = static_cast<std::uint16_t>(ethernet);
        } else if (payload % jumbo == 0) {
            flow.segment_guess = static_cast<std::uint16_t>(jumbo);
        }
        most = flow.segment_guess ? flow.segment_guess : payload <= jumbo ? jumbo : ethernet;
        if (payload > most) flow.supposed_packets += (payload + most - 1) / most;
    }
    return static_cast<std::uint32_t>((payload + most - 1) / most);
}

void PacketScan::udp(const Frame& frame, std::size_t at, std::size_t end,
                     const Addresses& between, int depth) {
    if (frame.data.size() < at + 8) {
        ++counts_.cut_headers;
        return;
    }
    const std::uint8_t* const header = frame.data.data() + at;
    const std::uint16_t port = big16(header + 2);
    const std::size_t length = big16(header + 4);
    if (at + 8 > end || (length != 0 && length < 8)) {
        ++counts_.impossible;
        return;
    }
    if (length != 0) end = std::min(end, at + length);
    const bool has_inner = frame.data.size() >= at + 16 + 14 && (header[8] & 8);
    if (port == kVxlanPort && depth == 0 && has_inner) return ethernet(frame, at + 16, end, 1);
    if (port == kRocePort && frame.data.size() >= at + 20 && end >= at + 24) {
        return roce(frame, at + 8, end, between);
    }
    const std::uint32_t number = flow_of({.source = between.source,
                                          .destination = between.destination,
                                          .source_port = big16(header),
                                          .destination_port = port,
                                          .point = frame.point,
                                          .protocol = kUdp});
    if (number == kNoFlow) return;
    const std::size_t payload = end - at - 8;
    count(flows_[number], frame, payload, 0, payload, 1);
}

namespace {

// What stands between the base transport header and the payload, by operation; -1 where there is
// no payload (InfiniBand specification, volume 1, chapter 9).
int roce_extension(std::uint8_t opcode) {
    static constexpr std::array<std::int8_t, 24> kBytes{
        0, 0, 0, 4, 0, 4,        // send: first, middle, last, with immediate, only, with immediate
        16, 0, 0, 4, 16, 20,     // write: the same
        -1,                      // read request
        4, 0, 4, 4,              // read response
        -1, -1, -1, -1,          // acknowledgement, atomics
        -1, 4, 4};               // reserved; send with invalidate
    const int operation = opcode & 31;
    const int service = opcode >> 5;
    if (service > 3 || operation >= 24 || kBytes[operation] < 0) return -1;
    return kBytes[operation] + (service == 3 ? 8 : 0);  // datagrams name their queue
}

}  // namespace

void PacketScan::roce(const Frame& frame, std::size_t at, std::size_t end,
                      const Addresses& between) {
    const std::uint8_t* const header = frame.data.data() + at;
    const int operation = header[0] & 31;
    const bool is_answer = operation >= 13 && operation <= 16;  // numbered by the other side
    const std::uint32_t number =
        flow_of({.source = between.source,
                 .destination = between.destination,
                 .destination_port = kRocePort,
                 .queue_pair = (big32(header + 4) & 0xffffff) | (is_answer ? 1u << 31 : 0),
                 .point = frame.point,
                 .protocol = kRoce});
    if (number == kNoFlow) return;
    Flow& flow = flows_[number];
    const int extension = roce_extension(header[0]);
    const std::size_t pad = header[1] >> 4 & 3;
    const std::size_t around = 12 + static_cast<std::size_t>(std::max(extension, 0)) + pad + 4;
    if (extension < 0 || end < at + around) return count(flow, frame, 0, 0, 0, 1);
    const std::size_t payload = end - at - around;
    const std::uint32_t sequence = big32(header + 8) & 0xffffff;
    if (!flow.stream.has_begun()) flow.stream.begin(kStreamBase + sequence);
    const std::uint64_t furthest = flow.stream.furthest();
    // 24 bits wrap: the difference is taken as the nearer of both ways round.
    const std::int32_t leap =
        static_cast<std::int32_t>((sequence - static_cast<std::uint32_t>(furthest)) << 8) >> 8;
    const std::uint64_t packet = furthest + static_cast<std::uint64_t>(std::int64_t{leap});
    const Share share = flow.stream.add(packet, packet + 1, frame.time_ns);
    flow.largest_payload = std::max(flow.largest_payload, static_cast<std::uint32_t>(payload));
    flow.reordered_bytes += share.reordered * payload;
    count(flow, frame, share.fresh * payload, share.again * payload, payload, 1);
}

void PacketScan::count(Flow& flow, const Frame& frame, std::uint64_t fresh, std::uint64_t again,
                       std::size_t payload, std::uint32_t packets) {
    const auto length =
        static_cast<std::uint64_t>(static_cast<std::int64_t>(frame.length) + frame.link_bytes);
    const std::uint64_t wire = length + (packets - 1) * (length - std::min(length, payload));
    if (flow.packets == 0) flow.first_ns = flow.last_ns = frame.time_ns;
    flow.first_ns = std::min(flow.first_ns, frame.time_ns);
    flow.last_ns = std::max(flow.last_ns, frame.time_ns);
    flow.packets += packets;
    flow.payload_bytes += fresh;
    flow.wire_bytes += wire;
    flow.retransmitted_bytes += again;
    const std::int64_t number = frame.time_ns >> shift_;
    if (flow.now.packets == 0 || flow.now.number != number) {
        keep(flow.now);
        if (bins_.size() >= kMostBins) make_room();
        flow.now = {.number = frame.time_ns >> shift_,
                    .flow = static_cast<std::uint32_t>(&flow - flows_.data())};
    }
    flow.now.payload_bytes += static_cast<std::int64_t>(fresh);
    flow.now.wire_bytes += static_cast<std::int64_t>(wire);
    flow.now.packets += packets;
    flow.now.retransmits += again > 0;
}

// ---------------------------------------------------------------------------------------------
// Flows by their key, in open addressing; bins that get wider when they are too many.

std::size_t PacketScan::place_of(const FlowKey& key) const {
    std::uint64_t hash = mixed(key.source[0], key.source[1]);
    hash = mixed(hash, key.destination[0]);
    hash = mixed(hash, key.destination[1]);
    hash = mixed(hash, std::uint64_t{key.queue_pair} << 32 | std::uint64_t{key.source_port} << 16 |
                           key.destination_port);
    hash = mixed(hash, std::uint64_t{key.point} << 32 | key.protocol);
    std::size_t place = hash & (places_.size() - 1);
    while (places_[place] != kNoFlow && flows_[places_[place]].key != key) {
        place = (place + 1) & (places_.size() - 1);
    }
    return place;
}

std::uint32_t PacketScan::known_flow(const FlowKey& key) const { return places_[place_of(key)]; }

std::uint32_t PacketScan::flow_of(const FlowKey& key) {
    if (latest_ != kNoFlow && flows_[latest_].key == key) return latest_;
    std::size_t place = place_of(key);
    if (places_[place] == kNoFlow) {
        if (flows_.size() == kMostFlows) {
            ++counts_.crowded_packets;
            return kNoFlow;
        }
        if (flows_.size() * 2 >= places_.size()) {
            grow_places();
            place = place_of(key);
        }
        places_[place] = static_cast<std::uint32_t>(flows_.size());
        flows_.emplace_back().key = key;
    }
    return latest_ = places_[place];
}

void PacketScan::grow_places() {
    places_.assign(places_.size() * 2, kNoFlow);
    for (std::uint32_t number = 0; number < flows_.size(); ++number) {
        places_[place_of(flows_[number].key)] = number;
    }
}

void PacketScan::keep(Bin& bin) {
    if (bin.packets > 0) bins_.push_back(bin);
    bin.packets = 0;
}

// Puts the bins in order, one for each flow and time, and doubles their width while that leaves
// more than half of the room taken.
void PacketScan::make_room() {
    for (Flow& flow : flows_) keep(flow.now);
    const auto order = [](const Bin& a, const Bin& b) {
        return std::tie(a.flow, a.number) < std::tie(b.flow, b.number);
    };
    std::sort(bins_.begin(), bins_.end(), order);
    const auto merge = [this] {
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
    };
    merge();
    while (bins_.size() > kMostBins / 2 && shift_ < 62) {
        ++shift_;
        for (Bin& bin : bins_) bin.number >>= 1;
        merge();
    }
}

// Bytes that the other side acknowledged did arrive: where they were not seen, the capture lost
// them and not the network.
void PacketScan::find_missed() {
    for (Flow& flow : flows_) {
        const std::uint64_t holes = flow.stream.holes();
        if (holes == 0) continue;
        if (flow.key.protocol == kRoce) {
            flow.lost_bytes = holes * flow.largest_payload;
            continue;
        }
        const FlowKey& key = flow.key;
        const std::uint32_t back = known_flow({key.destination, key.source, key.destination_port,
                                               key.source_port, 0, key.point, kTcp});
        const auto end = static_cast<std::uint32_t>(flow.stream.last_hole_end());
        const bool is_acknowledged =
            back != kNoFlow && flows_[back].has_acknowledged &&
            static_cast<std::int32_t>(flows_[back].acknowledged - end) >= 0;
        (is_acknowledged ? flow.missed_bytes : flow.lost_bytes) = holes;
    }
}

}  // namespace fullwire
