#include "packets/packet_headers.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <random>
#include <utility>

namespace fullwire {
namespace {

constexpr std::uint16_t kIp4 = 0x0800;
constexpr std::uint16_t kIp6 = 0x86dd;
constexpr std::uint16_t kTaggedEthernet = 0x6558;  // a whole frame within GRE or Geneve
constexpr std::uint16_t kVxlanPort = 4789;
constexpr std::uint16_t kVxlanPortOfLinux = 8472;  // unless asked for the other
constexpr std::uint16_t kVxlanGpePort = 4790;
constexpr std::uint16_t kGenevePort = 6081;
constexpr std::uint16_t kMpls = 0x8847, kMplsMulticast = 0x8848;
constexpr std::uint16_t kPppoeSession = 0x8864;
constexpr std::uint16_t kRocePort = 4791;
constexpr std::int64_t kEthernetHeader = 14;
constexpr std::size_t kAhead = 8;  // packets: memory that is wanted soon

// The second half of an IPv4 address that is mapped into IPv6; the first is 0.
std::uint64_t mapped(const std::uint8_t* address) {
    const std::uint64_t plain = raw<std::uint32_t>(address);
    if constexpr (std::endian::native == std::endian::big) return 0xffff'0000'0000 | plain;
    return 0xffff'0000 | plain << 32;
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

std::int64_t time_of(const Layout::Interface& interface, std::uint64_t ticks) {
    const int power = interface.resolution & 0x7f;
    std::uint64_t ns = 0;
    if (interface.resolution & 0x80) {
        const std::uint64_t whole = ticks >> power;
        const std::uint64_t rest = ticks - (whole << power);
        // Halved until the product fits: beyond 2^-34 s a nanosecond has all it can have.
        const int excess = std::max(0, power - 34);
        ns = whole * 1'000'000'000 + ((rest >> excess) * 1'000'000'000 >> (power - excess));
    } else if (power == 9) {
        ns = ticks;
    } else {
        ns = power < 9 ? ticks * power_of_ten(9 - power) : ticks / power_of_ten(power - 9);
    }
    return since_epoch(ns + static_cast<std::uint64_t>(interface.offset_s) * 1'000'000'000);
}

// Both halves of a product: what depends on all bits of both factors.
std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

// The segment size that the options of a SYN announce, 0 if none.
std::uint16_t announced_in(Bytes options) {
    while (options.size() >= 2 && options[0] != 0) {
        if (options[0] == 1) {
            options = options.subspan(1);
            continue;
        }
        const std::size_t length = options[1];
        if (length < 2 || length > options.size()) break;
        if (options[0] == 2 && length == 4) return big16(options.data() + 2);
        options = options.subspan(length);
    }
    return 0;
}

// Services by number: reliable, and extended reliable (XRC), which processes of a host share.
constexpr int kConnected = 0, kExtended = 5;

// Answers to reads, which the other side numbers.
bool is_roce_answer(int operation) { return operation >= 13 && operation <= 16; }

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
    if ((service > 3 && service != kExtended) || operation >= 24 || kBytes[operation] < 0) return -1;
    // Datagrams name their queue, and what is extended, in all but answers, the one that it is for.
    const bool is_asked = service == kExtended && !is_roce_answer(operation);
    return kBytes[operation] + (service == 3 ? 8 : 0) + (is_asked ? 4 : 0);
}

// So that nobody can write a capture whose flows all have one place.
const std::uint64_t kSecret = std::uint64_t{std::random_device{}()} << 32 | 0x9e3779b9;

}  // namespace

// Linux cooked captures say how a packet came: 0 is to this host, 4 is from it.
Direction direction_of(unsigned kind) {
    return kind == 4 ? Direction::sent : kind == 0 ? Direction::received : Direction::unknown;
}

// Reads one batch. `end` is where the layer above says that its contents end; what was captured may
// end before, and padding may follow.
class Reader {
  public:
    Reader(Segments& found) : found_(found) {}

    void read(const Batch& batch);

  private:
    // A frame on its way through the layers.
    struct Frame {
        Bytes data;               // as much as was captured
        std::size_t length;       // as long as it was
        std::int64_t link_bytes;  // what a wire carries more than `length`; may be below zero
        std::int64_t time_ns;
        std::uint32_t point;
        Direction direction = Direction::unknown;
    };

    struct Fragment {
        std::uint32_t identification;
        std::uint32_t offset;
        bool has_more;
    };

    void records(const Batch& batch, const Layout& layout, std::size_t from, std::size_t to);
    void blocks(const Batch& batch, const Layout& layout, std::size_t from, std::size_t to);
    void take(std::uint32_t link, Frame& frame);
    void other(const Frame& frame);
    void ethernet(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void network(const Frame& frame, std::size_t at, std::size_t end, std::uint16_t type, int depth);
    void ip4(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void ip6(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void datagram(const Frame& frame, std::size_t at, std::size_t end, std::uint32_t protocol,
                  FlowKey& key, const Fragment& fragment, int depth);
    void transport(const Frame& frame, std::size_t at, std::size_t end, std::uint32_t protocol,
                   FlowKey& key, int depth);
    bool tunnel(const Frame& frame, std::size_t at, std::size_t end, std::uint16_t port);
    void labelled(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void session(const Frame& frame, std::size_t at, std::size_t end, int depth);
    void gre(const Frame& frame, std::size_t at, std::size_t end);
    void mirrored(const Frame& frame, std::size_t at, std::size_t end);
    void tcp(const Frame& frame, std::size_t at, std::size_t end, FlowKey& key);
    void udp(const Frame& frame, std::size_t at, std::size_t end, FlowKey& key, int depth);
    void roce(const Frame& frame, std::size_t at, std::size_t end, FlowKey& key);
    Segment& add(const Frame& frame, FlowKey& key);

    Segments& found_;
};

void Reader::read(const Batch& batch) {
    std::size_t from = 0;
    for (const Batch::Part& part : batch.parts) {
        const bool is_pcap = part.layout.format == Layout::Format::pcap;
        is_pcap ? records(batch, part.layout, from, part.end)
                : blocks(batch, part.layout, from, part.end);
        from = part.end;
    }
}

void Reader::records(const Batch& batch, const Layout& layout, std::size_t from, std::size_t to) {
    const std::uint32_t link = layout.interfaces->front().link;
    const std::uint64_t tick_ns = layout.is_nano ? 1 : 1000;
    for (std::size_t each = from; each < to; ++each) {
        const std::uint8_t* const at = batch.bytes.data() + batch.packets[each];
        __builtin_prefetch(batch.bytes.data() + batch.packets[std::min(each + kAhead, to - 1)] + 64);
        const std::size_t captured = layout.u32(at + 8);
        const std::uint64_t time_ns =
            layout.u32(at) * std::uint64_t{1'000'000'000} + layout.u32(at + 4) * tick_ns;
        Frame frame{{at + 16, captured},
                    std::max<std::size_t>(layout.u32(at + 12), captured),
                    0,
                    static_cast<std::int64_t>(time_ns),
                    0};
        take(link, frame);
    }
}

void Reader::blocks(const Batch& batch, const Layout& layout, std::size_t from, std::size_t to) {
    for (std::size_t each = from; each < to; ++each) {
        const std::uint8_t* const at = batch.bytes.data() + batch.packets[each];
        const std::uint8_t* const body = at + 8;
        const bool is_old = layout.u32(at) == 2;
        const std::uint32_t number = is_old ? layout.u16(body) : layout.u32(body);
        const std::uint64_t ticks = std::uint64_t{layout.u32(body + 4)} << 32 | layout.u32(body + 8);
        const std::size_t captured = layout.u32(body + 12);
        const Layout::Interface& interface = (*layout.interfaces)[number];
        Frame frame{{body + 20, captured},
                    std::max<std::size_t>(layout.u32(body + 16), captured),
                    0,
                    time_of(interface, ticks),
                    number};
        take(interface.link, frame);
    }
}

void Reader::take(std::uint32_t link, Frame& frame) {
    found_.counts.bytes += frame.length;
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
            frame.direction = direction_of(big16(data));
            return network(frame, 16, end, big16(data + 14), 0);
        }
        case 276: {  // its second version, which names the interface
            if (size < 20) break;
            frame.link_bytes = kEthernetHeader - 20;
            frame.direction = direction_of(data[10]);
            frame.point = big32(data + 4);
            return network(frame, 20, end, big16(data), 0);
        }
        default:
            ++found_.counts.unread_links;
            found_.counts.unread_link = link;
            return other(frame);
    }
    ++found_.counts.cut_headers;
}

void Reader::other(const Frame& frame) {
    ++found_.counts.other_packets;
    found_.counts.other_bytes += frame.length;
}

void Reader::ethernet(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    if (frame.data.size() < at + 14) {
        ++found_.counts.cut_headers;
        return;
    }
    network(frame, at + 14, end, big16(frame.data.data() + at + 12), depth);
}

void Reader::network(const Frame& frame, std::size_t at, std::size_t end, std::uint16_t type,
                         int depth) {
    while (type == 0x8100 || type == 0x88a8 || type == 0x9100) {  // VLAN tags
        if (frame.data.size() < at + 4) {
            ++found_.counts.cut_headers;
            return;
        }
        type = big16(frame.data.data() + at + 2);
        at += 4;
    }
    if (type == kMpls || type == kMplsMulticast) return labelled(frame, at, end, depth);
    if (type == kPppoeSession) return session(frame, at, end, depth);
    if (type == kIp4) return ip4(frame, at, end, depth);
    if (type == kIp6) return ip6(frame, at, end, depth);
    other(frame);
}

// MPLS (RFC 3032): labels do not say what they carry, so the version of IP does.
void Reader::labelled(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    bool is_last = false;
    while (!is_last && frame.data.size() > at + 4) {
        is_last = frame.data[at + 2] & 1;
        at += 4;
    }
    if (!is_last) {
        ++found_.counts.cut_headers;
        return;
    }
    const int version = frame.data[at] >> 4;
    if (version == 4) return ip4(frame, at, end, depth);
    if (version == 6) return ip6(frame, at, end, depth);
    other(frame);
}

// PPPoE (RFC 2516): version and type, code, session, length, then the protocol of PPP.
void Reader::session(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    constexpr std::uint16_t kPppIp4 = 0x0021, kPppIp6 = 0x0057;
    if (frame.data.size() < at + 8) {
        ++found_.counts.cut_headers;
        return;
    }
    const std::uint8_t* const header = frame.data.data() + at;
    const std::uint16_t protocol = big16(header + 6);
    end = std::min(end, at + 6 + big16(header + 4));  // what is behind is padding
    if (protocol == kPppIp4) return ip4(frame, at + 8, end, depth);
    if (protocol == kPppIp6) return ip6(frame, at + 8, end, depth);
    other(frame);
}

void Reader::ip4(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    if (frame.data.size() < at + 20) {
        ++found_.counts.cut_headers;
        return;
    }
    const std::uint8_t* const ip = frame.data.data() + at;
    const std::size_t header = (ip[0] & 15) * 4u;
    // Offload leaves 0 where a length does not fit, or is filled in later.
    const std::size_t total = big16(ip + 2) ? big16(ip + 2) : end - at;
    if (ip[0] >> 4 != 4 || header < 20 || total < header || at > end || at + total > end) {
        ++found_.counts.impossible;
        return;
    }
    FlowKey key;
    key.source[1] = mapped(ip + 12);
    key.destination[1] = mapped(ip + 16);
    const std::uint16_t fragmented = big16(ip + 6) & 0x3fff;
    const Fragment fragment{big16(ip + 4), (fragmented & 0x1fffu) * 8, (fragmented & 0x2000) != 0};
    datagram(frame, at + header, at + total, ip[9], key, fragment, depth);
}

void Reader::ip6(const Frame& frame, std::size_t at, std::size_t end, int depth) {
    if (frame.data.size() < at + 40) {
        ++found_.counts.cut_headers;
        return;
    }
    const std::uint8_t* const ip = frame.data.data() + at;
    const std::size_t length = big16(ip + 4);  // 0 in jumbograms, which big TCP sends
    if (ip[0] >> 4 != 6 || at + 40 + length > end) {
        ++found_.counts.impossible;
        return;
    }
    if (length) end = at + 40 + length;
    FlowKey key;
    key.source = raw<std::array<std::uint64_t, 2>>(ip + 8);
    key.destination = raw<std::array<std::uint64_t, 2>>(ip + 24);
    std::uint32_t next = ip[6];
    Fragment fragment{};
    at += 40;
    while (next == 0 || next == 43 || next == 44 || next == 60) {  // extension headers
        if (frame.data.size() < at + 8) {
            ++found_.counts.cut_headers;
            return;
        }
        const std::uint8_t* const header = frame.data.data() + at;
        if (next == 44) {
            const std::uint32_t fragmented = big16(header + 2);
            fragment = {big32(header + 4), fragmented & 0xfff8, (fragmented & 1) != 0};
        }
        at += next == 44 ? 8 : 8 + header[1] * 8u;
        next = header[0];
        if (fragment.offset > 0) break;  // what follows is in the middle of something
    }
    if (at > end) {
        ++found_.counts.impossible;
        return;
    }
    datagram(frame, at, end, next, key, fragment, depth);
}

// A datagram, or a part of one.
void Reader::datagram(const Frame& frame, std::size_t at, std::size_t end, std::uint32_t protocol,
                      FlowKey& key, const Fragment& fragment, int depth) {
    if (fragment.offset == 0 && !fragment.has_more) {
        return transport(frame, at, end, protocol, key, depth);
    }
    FlowKey whole = key;
    if (fragment.offset == 0) {
        const std::size_t before = found_.count_;
        transport(frame, at, end, protocol, key, depth);
        if (found_.count_ == before) return;
    }
    whole.protocol = kFragment + protocol;
    whole.queue_pair = fragment.identification;
    Segment& segment = add(frame, whole);
    segment.payload = fragment.offset ? static_cast<std::uint32_t>(end - at) : 0;
    segment.sequence = fragment.offset;
}

void Reader::transport(const Frame& frame, std::size_t at, std::size_t end,
                           std::uint32_t protocol, FlowKey& key, int depth) {
    if (protocol == kTcp) return tcp(frame, at, end, key);
    if (protocol == kUdp) return udp(frame, at, end, key, depth);
    if (protocol == kIp4InIp && depth == 0) return ip4(frame, at, end, 1);
    if (protocol == kIp6InIp && depth == 0) return ip6(frame, at, end, 1);
    if (protocol == kGre && depth == 0) return gre(frame, at, end);
    other(frame);
}

// Whether a datagram to this port was a tunnel's, whose contents are read then.
bool Reader::tunnel(const Frame& frame, std::size_t at, std::size_t end, std::uint16_t port) {
    if (frame.data.size() < at + 8) return false;
    const std::uint8_t* const header = frame.data.data() + at;
    if (port == kVxlanPort || port == kVxlanPortOfLinux) {
        const bool is_vxlan = (header[0] & 8) && frame.data.size() >= at + 8 + 14;
        if (is_vxlan) ethernet(frame, at + 8, end, 1);
        return is_vxlan;
    }
    if (port == kVxlanGpePort) {  // draft-ietf-nvo3-vxlan-gpe: a flag says that the next one is told
        constexpr std::uint8_t kIp4Next = 1, kIp6Next = 2, kEthernetNext = 3;
        const std::uint8_t next = header[0] & 4 ? header[3] : kEthernetNext;
        if (!(header[0] & 8)) return false;
        if (next == kEthernetNext) ethernet(frame, at + 8, end, 1);
        else if (next == kIp4Next) network(frame, at + 8, end, kIp4, 1);
        else if (next == kIp6Next) network(frame, at + 8, end, kIp6, 1);
        return next >= kIp4Next && next <= kEthernetNext;
    }
    if (port != kGenevePort || header[0] >> 6 != 0) return false;
    const std::size_t inner = at + 8 + (header[0] & 63) * 4u;
    const std::uint16_t type = big16(header + 2);
    type == kTaggedEthernet ? ethernet(frame, inner, end, 1) : network(frame, inner, end, type, 1);
    return true;
}

// Generic routing encapsulation, and in it what switches send of the ports that they mirror.
void Reader::gre(const Frame& frame, std::size_t at, std::size_t end) {
    constexpr std::uint16_t kChecked = 0x8000, kKeyed = 0x2000, kNumbered = 0x1000, kVersion = 7;
    if (frame.data.size() < at + 4) {
        ++found_.counts.cut_headers;
        return;
    }
    const std::uint16_t flags = big16(frame.data.data() + at);
    const std::uint16_t type = big16(frame.data.data() + at + 2);
    at += 4;
    for (const std::uint16_t optional : {kChecked, kKeyed, kNumbered}) at += flags & optional ? 4 : 0;
    if (flags & kVersion) return other(frame);
    if (type == kTaggedEthernet) return ethernet(frame, at, end, 1);
    if (type == 0x88be) return mirrored(frame, at + (flags & kNumbered ? 8 : 0), end);  // I and II
    if (type != 0x22eb) return network(frame, at, end, type, 1);
    if (frame.data.size() < at + 12) {  // III
        ++found_.counts.cut_headers;
        return;
    }
    const bool has_more = frame.data[at + 11] & 1;
    mirrored(frame, at + 12 + (has_more ? 8 : 0), end);
}

// What is around a mirrored frame was not on the wire that it was mirrored from.
void Reader::mirrored(const Frame& frame, std::size_t at, std::size_t end) {
    Frame original = frame;
    original.link_bytes = -static_cast<std::int64_t>(std::min(at, frame.length));
    ethernet(original, at, end, 1);
}

void Reader::tcp(const Frame& frame, std::size_t at, std::size_t end,
                     FlowKey& key) {
    if (frame.data.size() < at + 14) {
        ++found_.counts.cut_headers;
        return;
    }
    const std::uint8_t* const header = frame.data.data() + at;
    const std::size_t size = (header[12] >> 4) * 4u;
    if (size < 20 || at + size > end) {
        ++found_.counts.impossible;
        return;
    }
    key.source_port = big16(header);
    key.destination_port = big16(header + 2);
    key.protocol = kTcp;
    Segment& segment = add(frame, key);
    segment.payload = static_cast<std::uint32_t>(end - at - size);
    segment.sequence = big32(header + 4);
    segment.acknowledged = big32(header + 8);
    segment.flags = header[13];
    segment.options = static_cast<std::uint8_t>(size - 20);
    if (segment.flags & kSyn) {
        const std::size_t seen = std::min(frame.data.size() - at, size);
        if (seen > 20) segment.announced = announced_in(frame.data.subspan(at + 20, seen - 20));
    }
    const std::size_t captured = std::min(frame.data.size(), end);
    if (captured <= at + size) return;
    const GlooBeginning gloo = gloo_beginning(frame.data.subspan(at + size, captured - at - size));
    if (gloo.is_possible()) found_.beginnings.push_back({found_.count_ - 1, gloo});
}

void Reader::udp(const Frame& frame, std::size_t at, std::size_t end,
                     FlowKey& key, int depth) {
    if (frame.data.size() < at + 8) {
        ++found_.counts.cut_headers;
        return;
    }
    const std::uint8_t* const header = frame.data.data() + at;
    const std::uint16_t port = big16(header + 2);
    const std::size_t length = big16(header + 4);
    if (at + 8 > end || (length != 0 && length < 8)) {
        ++found_.counts.impossible;
        return;
    }
    if (length != 0) end = std::min(end, at + length);
    if (depth == 0 && tunnel(frame, at + 8, end, port)) return;
    if (port == kRocePort && frame.data.size() >= at + 20 && end >= at + 24) {
        return roce(frame, at + 8, end, key);
    }
    key.source_port = big16(header);
    key.destination_port = port;
    key.protocol = kUdp;
    add(frame, key).payload = static_cast<std::uint32_t>(end - at - 8);
}

void Reader::roce(const Frame& frame, std::size_t at, std::size_t end,
                      FlowKey& key) {
    const std::uint8_t* const header = frame.data.data() + at;
    const int operation = header[0] & 31;
    const bool is_answer = is_roce_answer(operation);
    const int extension = roce_extension(header[0]);
    const std::size_t pad = header[1] >> 4 & 3;
    const std::size_t around = 12 + static_cast<std::size_t>(std::max(extension, 0)) + pad + 4;
    const bool has_data = extension >= 0 && end >= at + around;
    key.destination_port = kRocePort;
    key.queue_pair = (big32(header + 4) & 0xffffff) | (is_answer ? 1u << 31 : 0);
    key.protocol = kRoce;
    Segment& segment = add(frame, key);
    segment.sequence = big32(header + 8) & 0xffffff;
    if (has_data) {
        segment.payload = static_cast<std::uint32_t>(end - at - around);
        const int service = header[0] >> 5;
        segment.flags = service == kConnected || service == kExtended ? kReliable : 0;
    } else {
        segment.flags = kNoData;
    }
}

// The segment is written where it stays: copied, its words would be read before they are stored.
Segment& Reader::add(const Frame& frame, FlowKey& key) {
    constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
    key.point = frame.point;
    Segment& segment = found_.segments_[found_.count_++];
    segment.time_ns = frame.time_ns;
    segment.flow = found_.flows.number(key);
    segment.wire_bytes = static_cast<std::uint32_t>(
        std::min(static_cast<std::int64_t>(frame.length) + frame.link_bytes, kMost));
    segment.payload = segment.sequence = segment.acknowledged = 0;
    segment.announced = 0;
    segment.flags = segment.options = 0;
    if (frame.direction != Direction::unknown) {
        found_.directions.resize(found_.flows.keys().size());
        found_.directions[segment.flow] = frame.direction;
    }
    return segment;
}

void Segments::read(const Batch& batch) {
    const std::size_t most = 2 * batch.packets.size();  // a first fragment makes two
    if (segments_.size() < most) segments_.resize(most);
    count_ = 0;
    flows.clear();
    beginnings.clear();
    directions.clear();
    counts = {};
    counts.packets = batch.packets.size() + batch.untimed;
    counts.untimed = batch.untimed;
    counts.bytes = batch.untimed_bytes;
    Reader(*this).read(batch);
}

Counts& Counts::operator+=(const Counts& other) {
    packets += other.packets;
    bytes += other.bytes;
    other_packets += other.other_packets;
    other_bytes += other.other_bytes;
    unread_links += other.unread_links;
    if (other.unread_links > 0) unread_link = other.unread_link;
    fragments += other.fragments;
    cut_headers += other.cut_headers;
    impossible += other.impossible;
    crowded_packets += other.crowded_packets;
    dropped += other.dropped;
    untimed += other.untimed;
    return *this;
}

FlowKey FlowKey::turned() const {
    FlowKey other = *this;
    std::swap(other.source, other.destination);
    std::swap(other.source_port, other.destination_port);
    return other;
}

// ---------------------------------------------------------------------------------------------
// Keys in open addressing.

std::size_t FlowNumbers::place_of(const FlowKey& key) const {
    const std::uint64_t hash =
        folded(key.source[0] ^ kSecret, key.source[1] + key.ports()) +
        folded(key.destination[0] ^ ~kSecret, key.destination[1] + key.kind());
    std::size_t place = folded(hash, kSecret) & (places_.size() - 1);
    while (places_[place] != kNone && keys_[places_[place]] != key) {
        place = (place + 1) & (places_.size() - 1);
    }
    return place;
}

std::uint32_t FlowNumbers::add(const FlowKey& key) {
    if (keys_.size() * 2 >= places_.size()) {
        places_.assign(places_.size() * 2, kNone);
        for (std::uint32_t number = 0; number < keys_.size(); ++number) {
            places_[place_of(keys_[number])] = number;
        }
    }
    const auto number = static_cast<std::uint32_t>(keys_.size());
    places_[place_of(key)] = number;
    keys_.push_back(key);
    followers_.push_back(0);
    return number;
}

void FlowNumbers::clear() {
    keys_.clear();
    followers_.clear();
    latest_ = 0;
    places_.assign(256, kNone);
}

}  // namespace fullwire
