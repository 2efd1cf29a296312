#include "packets/capture_file.hpp"

#include <algorithm>

namespace fullwire {
namespace {

constexpr std::size_t kMostInterfaces = 1 << 12;
constexpr std::uint32_t kLongestBlock = CaptureFile::kLongestFrame + (1 << 16);
// Half of a usual second-level cache, and room for the longest unit.
constexpr std::size_t kBatchBytes = 1 << 19;

constexpr std::uint32_t kPcapMicro = 0xa1b2c3d4;
constexpr std::uint32_t kPcapNano = 0xa1b23c4d;
constexpr std::uint32_t kPcapng = 0x0a0d0d0a;
constexpr std::uint32_t kOrder = 0x1a2b3c4d;
constexpr std::size_t kPcapHeader = 24;
constexpr std::size_t kRecordHeader = 16;
constexpr std::size_t kBlockHeader = 8;

}  // namespace

void CaptureFile::begin(Batch& batch, std::size_t coming) {
    const std::size_t needed = std::min(kBatchBytes, rest_.size() + coming);
    if (batch.bytes.size() < needed) batch.bytes.resize(needed);
    std::copy(rest_.begin(), rest_.end(), batch.bytes.begin());
    batch.size = rest_.size();
    batch.packets.clear();
    batch.parts.clear();
    batch.untimed = batch.untimed_bytes = 0;
    rest_.clear();
}

void CaptureFile::cut(Batch& batch) {
    Bytes rest(batch.bytes.data(), batch.size);
    while (!rest.empty() && damage_.empty()) {
        const std::size_t used = unit(rest, batch);
        if (used == 0) break;
        position_ += used;
        rest = rest.subspan(used);
    }
    if (damage_.empty()) rest_.assign(rest.begin(), rest.end());
    end_part(batch);
}

void CaptureFile::end_part(Batch& batch) {
    const std::size_t ended = batch.parts.empty() ? 0 : batch.parts.back().end;
    if (batch.packets.size() == ended) return;
    if (!layout_.interfaces || layout_.interfaces->size() != interfaces_.size()) {
        layout_.interfaces = std::make_shared<const std::vector<Layout::Interface>>(interfaces_);
    }
    batch.parts.push_back({layout_, batch.packets.size()});
}

// Takes what comes next and returns how much that was; 0 where more is needed first.
std::size_t CaptureFile::unit(Bytes rest, Batch& batch) {
    if (skip_ > 0) {
        const std::size_t skipped = std::min<std::uint64_t>(skip_, rest.size());
        skip_ -= skipped;
        return skipped;
    }
    if (layout_.format == Layout::Format::pcap) return records(rest, batch);
    if (rest.size() < 4) return 0;
    const bool is_blocks = layout_.format == Layout::Format::pcapng || big32(rest.data()) == kPcapng;
    return is_blocks ? block(rest, batch) : file_header(rest);
}

void CaptureFile::finish() {
    if (!damage_.empty()) return;
    if (layout_.format == Layout::Format::unknown) {
        stop(position_ + rest_.size() == 0 ? "the file is empty" : "not a capture");
    } else if (!rest_.empty() || skip_ > 0) {
        stop("the file ends within a packet");
    }
}

void CaptureFile::stop(const std::string& problem) {
    if (!damage_.empty()) return;
    damage_ = problem + ", after " + std::to_string(packets_) + " packets, at byte " +
              std::to_string(position_);
}

std::uint64_t CaptureFile::dropped() const {
    std::uint64_t total = dropped_before_;
    for (const std::uint64_t each : dropped_) total += each;
    return total;
}

std::size_t CaptureFile::file_header(Bytes rest) {
    if (rest.size() < kPcapHeader) return 0;
    const auto magic = raw<std::uint32_t>(rest.data());
    const std::uint32_t turned = __builtin_bswap32(magic);
    layout_.is_foreign = turned == kPcapMicro || turned == kPcapNano;
    const std::uint32_t plain = layout_.is_foreign ? turned : magic;
    if (plain != kPcapMicro && plain != kPcapNano) {
        stop("not a capture: expected pcap or pcapng");
        return 0;
    }
    layout_.format = Layout::Format::pcap;
    layout_.is_nano = plain == kPcapNano;
    // The upper half says how long the frame check sequence is, where there is one.
    interfaces_.push_back({.link = layout_.u32(rest.data() + 20) & 0xffff});
    return kPcapHeader;
}

// The hot loop: whole records, as many as there are.
std::size_t CaptureFile::records(Bytes rest, Batch& batch) {
    const Layout layout = layout_;
    const std::size_t begin = batch.size - rest.size();
    const std::size_t already = batch.packets.size();
    std::size_t used = 0;
    while (rest.size() - used >= kRecordHeader) {
        const std::uint32_t captured = layout.u32(rest.data() + used + 8);
        if (captured > kLongestFrame) {
            packets_ += batch.packets.size() - already;
            position_ += used;
            stop("a packet claims " + std::to_string(captured) + " bytes");
            return used;
        }
        if (rest.size() - used - kRecordHeader < captured) break;
        batch.packets.push_back(static_cast<std::uint32_t>(begin + used));
        used += kRecordHeader + captured;
    }
    packets_ += batch.packets.size() - already;
    return used;
}

std::size_t CaptureFile::block(Bytes rest, Batch& batch) {
    if (rest.size() < 12) return 0;
    const bool is_section = big32(rest.data()) == kPcapng;
    if (is_section) {
        section(rest, batch);
        if (!damage_.empty()) return 0;
    }
    const std::uint32_t type = layout_.u32(rest.data());
    const std::uint32_t length = layout_.u32(rest.data() + 4);
    const bool is_read = type <= 6 || is_section;
    if (length < 12 || length % 4 != 0 || (is_read && length > kLongestBlock)) {
        stop("a block claims " + std::to_string(length) + " bytes");
        return 0;
    }
    if (!is_read) {
        const std::size_t here = std::min<std::size_t>(rest.size(), length);
        skip_ = length - here;
        return here;
    }
    if (rest.size() < length) return 0;
    if (layout_.u32(rest.data() + length - 4) != length) {
        stop("a block whose two lengths differ");
        return 0;
    }
    const Bytes body = rest.subspan(kBlockHeader, length - 12);
    if (type == 1) {
        interface(body);
    } else if (type == 6 || type == 2) {
        if (is_packet(body, type == 2)) {
            batch.packets.push_back(static_cast<std::uint32_t>(batch.size - rest.size()));
            ++packets_;
        }
    } else if (type == 3) {
        untimed(body, batch);
    } else if (type == 5) {
        statistics(body);
    }
    return damage_.empty() ? length : 0;
}

void CaptureFile::section(Bytes rest, Batch& batch) {
    // The order of bytes may change with every section.
    const auto order = raw<std::uint32_t>(rest.data() + 8);
    if (order != kOrder && order != __builtin_bswap32(kOrder)) {
        return stop("a section of unknown byte order");
    }
    end_part(batch);
    dropped_before_ = dropped();
    dropped_.clear();
    interfaces_.clear();
    layout_ = Layout{.format = Layout::Format::pcapng, .is_foreign = order != kOrder};
}

namespace {

// Calls `use(code, value)` for each option of a block.
template <typename Use>
void each_option(const Layout& layout, Bytes options, Use use) {
    while (options.size() >= 4) {
        const std::uint16_t code = layout.u16(options.data());
        const std::size_t length = layout.u16(options.data() + 2);
        if (code == 0 || length > options.size() - 4) return;
        use(code, options.subspan(4, length));
        options = options.subspan(std::min(options.size(), 4 + (length + 3) / 4 * 4));
    }
}

}  // namespace

void CaptureFile::interface(Bytes body) {
    if (body.size() < 8) return stop("an interface without a link type");
    if (interfaces_.size() == kMostInterfaces) return stop("more than 4096 interfaces");
    Layout::Interface found{.link = layout_.u16(body.data())};
    each_option(layout_, body.subspan(8), [&](std::uint16_t code, Bytes value) {
        if (code == 9 && !value.empty()) found.resolution = value[0];
        if (code == 14 && value.size() == 8) {
            found.offset_s = static_cast<std::int64_t>(layout_.u64(value.data()));
        }
        if (addresses_.size() == kMostInterfaces) return;
        if (code == 4 && value.size() == 8) {
            auto& address = addresses_.emplace_back();
            address[10] = address[11] = 0xff;
            std::copy_n(value.begin(), 4, address.begin() + 12);
        }
        if (code == 5 && value.size() == 17) {
            std::copy_n(value.begin(), 16, addresses_.emplace_back().begin());
        }
    });
    const bool is_binary = found.resolution & 0x80;
    if ((found.resolution & 0x7f) > (is_binary ? 63 : 19)) {
        return stop("an interface whose clock is finer than any");
    }
    interfaces_.push_back(found);
    dropped_.push_back(0);
}

bool CaptureFile::is_packet(Bytes body, bool is_old) {
    if (body.size() < 20) {
        stop("a packet block without its header");
        return false;
    }
    const std::uint32_t number = is_old ? layout_.u16(body.data()) : layout_.u32(body.data());
    if (number >= interfaces_.size()) {
        stop("a packet of an interface that is not described");
        return false;
    }
    if (layout_.u32(body.data() + 12) > body.size() - 20) {
        stop("a packet longer than its block");
        return false;
    }
    return true;
}

void CaptureFile::untimed(Bytes body, Batch& batch) {
    if (body.size() < 4 || interfaces_.empty()) return stop("a packet of no interface");
    ++packets_;
    ++batch.untimed;
    batch.untimed_bytes += layout_.u32(body.data());
}

void CaptureFile::statistics(Bytes body) {
    if (body.size() < 12) return stop("statistics without their header");
    const std::uint32_t number = layout_.u32(body.data());
    if (number >= dropped_.size()) return stop("statistics of an interface that is not described");
    std::uint64_t dropped = 0;
    each_option(layout_, body.subspan(12), [&](std::uint16_t code, Bytes value) {
        const bool counts_drops = code == 5 || code == 7;  // by the interface, by the system
        if (counts_drops && value.size() == 8) {
            dropped += layout_.u64(value.data()) & 0xffffffff;  // 4 billion are enough to say so
        }
    });
    dropped_[number] = std::max(dropped_[number], dropped);
}

}  // namespace fullwire
