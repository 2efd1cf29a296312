#include "packets/gloo_messages.hpp"

#include <algorithm>
#include <cstring>

namespace fullwire {
namespace {

constexpr std::size_t kMostTraffic = 1 << 18;
constexpr std::uint64_t kPreamble = 48;
constexpr std::size_t kReadOfIt = 24;
constexpr std::uint64_t kLongestMessage = 1ULL << 40;
enum Opcode : std::uint64_t { kSendBuffer, kSendUnbound, kSendReady, kReceiveReady };

}  // namespace

GlooBeginning gloo_beginning(std::span<const std::uint8_t> captured) {
    GlooBeginning found;
    if (captured.size() < kReadOfIt) return found;
    std::memcpy(&found, captured.data(), kReadOfIt);  // as x86 and Arm write them
    return found;
}

bool GlooBeginning::is_possible() const {
    if (bytes < kPreamble || bytes >= kLongestMessage) return false;
    return opcode <= kSendUnbound || (opcode <= kReceiveReady && bytes == kPreamble);
}

// Data may look like a beginning by chance, so one that nothing led to must be a collective's.
bool GlooBeginning::is_certain() const {
    const std::uint64_t collective = slot >> 56;
    return is_possible() && opcode != kSendBuffer && collective > 0 && collective < 16 &&
           (slot & 0xffffff) < 256;
}

void GlooMessages::take(std::uint32_t flow, std::uint64_t begin, std::uint64_t end,
                        const GlooBeginning& beginning, std::int64_t time_ns) {
    if (flow >= readers_.size()) {
        if (!beginning.is_certain()) return;  // not Gloo, most often
        readers_.resize(flow + 1);
    }
    Reader& reader = readers_[flow];
    if (reader.next < begin) {
        if (!beginning.is_certain()) {
            reader.next = 0;
            return carry(reader, static_cast<std::int64_t>(end - begin), false, time_ns);
        }
        reader.next = reader.body_from = begin;
    }
    std::uint64_t at = begin;
    while (true) {
        const std::uint64_t from = std::max(at, reader.body_from);
        const std::uint64_t upto = std::min(end, reader.next);
        if (upto > from) carry(reader, static_cast<std::int64_t>(upto - from), true, time_ns);
        if (reader.next >= end) return;
        at = reader.next;
        if (at != begin || !beginning.is_possible()) {  // it begins within the packet
            reader.next = 0;
            return carry(reader, static_cast<std::int64_t>(end - at), false, time_ns);
        }
        turn_to(reader, flow, beginning.slot, time_ns);
        reader.body_from = at + kPreamble;
        reader.next = at + beginning.bytes;
        if (GlooTraffic* const traffic = current(reader)) {
            traffic->messages += beginning.opcode <= kSendUnbound;
        }
    }
}

GlooTraffic* GlooMessages::current(const Reader& reader) {
    return reader.recent[0] == kNone ? nullptr : &traffic_[reader.recent[0]];
}

void GlooMessages::carry(const Reader& reader, std::int64_t bytes, bool is_read,
                         std::int64_t time_ns) {
    GlooTraffic* const traffic = current(reader);
    if (traffic == nullptr) return;
    (is_read ? traffic->payload_bytes : traffic->unread_bytes) += bytes;
    if (traffic->first_ns == 0) traffic->first_ns = time_ns;
    traffic->last_ns = std::max(traffic->last_ns, time_ns);
}

// Collectives take turns on a flow, but only a few at a time.
void GlooMessages::turn_to(Reader& reader, std::uint32_t flow, std::uint64_t slot,
                           std::int64_t time_ns) {
    const auto known = std::find_if(reader.recent.begin(), reader.recent.end(), [&](auto number) {
        return number != kNone && traffic_[number].slot == slot;
    });
    if (known != reader.recent.end()) {
        std::rotate(reader.recent.begin(), known, known + 1);
        return;
    }
    std::rotate(reader.recent.begin(), reader.recent.end() - 1, reader.recent.end());
    reader.recent[0] = kNone;
    if (traffic_.size() == kMostTraffic) return;
    reader.recent[0] = static_cast<std::uint32_t>(traffic_.size());
    traffic_.push_back({.slot = slot, .asked_ns = time_ns, .flow = flow});
}

}  // namespace fullwire
