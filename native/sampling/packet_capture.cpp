#include "sampling/packet_capture.hpp"

#include <ifaddrs.h>
#include <linux/filter.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include <arpa/inet.h>

namespace fullwire {
namespace {

// 16 MiB for each interface hold some 46,000 packets, with what the kernel adds to each.
constexpr std::size_t kBlockBytes = 1 << 20;
constexpr unsigned kBlocks = 16;
constexpr unsigned kRetire_ms = 50;  // a block that does not fill is handed over after so long
constexpr std::size_t kWriteBytes = 1 << 18;
constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::uint32_t kEthernet = 1;
constexpr std::uint32_t kRawIp = 101;

volatile sig_atomic_t is_told_to_end = 0;

void note_signal(int) { is_told_to_end = 1; }

std::int64_t clock_ns(clockid_t clock) {
    timespec now;
    ::clock_gettime(clock, &now);
    return now.tv_sec * kSecond + now.tv_nsec;
}

void checked(int result, const char* what) {
    if (result < 0) throw std::system_error(errno, std::generic_category(), what);
}

template <typename T>
void option(int socket, int name, const T& value, const char* what, int level = SOL_PACKET) {
    checked(::setsockopt(socket, level, name, &value, sizeof value), what);
}

// The blocks of pcapng (draft-ietf-opsawg-pcapng), in this machine's order of bytes.
class Blocks {
  public:
    explicit Blocks(std::vector<std::uint8_t>& into) : into_(into) {}

    void begin(std::uint32_t type) {
        start_ = into_.size();
        u32(type);
        u32(0);
    }
    void end() {
        pad();
        const auto length = static_cast<std::uint32_t>(into_.size() + 4 - start_);
        u32(length);
        std::memcpy(into_.data() + start_ + 4, &length, 4);
    }
    void u16(std::uint16_t value) { bytes(&value, 2); }
    void u32(std::uint32_t value) { bytes(&value, 4); }
    void bytes(const void* from, std::size_t count) {
        const auto* const first = static_cast<const std::uint8_t*>(from);
        into_.insert(into_.end(), first, first + count);
    }
    void option(std::uint16_t code, const void* value, std::size_t count) {
        u16(code);
        u16(static_cast<std::uint16_t>(count));
        bytes(value, count);
        pad();
    }
    void ticks(std::int64_t time_ns) {
        u32(static_cast<std::uint32_t>(time_ns >> 32));
        u32(static_cast<std::uint32_t>(time_ns));
    }
    void pad() { into_.resize((into_.size() + 3) / 4 * 4); }

  private:
    std::vector<std::uint8_t>& into_;
    std::size_t start_ = 0;
};

// Writes the addresses of an interface, so that a reader knows which end of a flow is this host.
// An address of one link alone tells nothing.
void write_addresses(Blocks& blocks, const std::string& name) {
    ifaddrs* all = nullptr;
    checked(::getifaddrs(&all), "the addresses of interfaces");
    const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
    for (const ifaddrs* each = all; each; each = each->ifa_next) {
        if (!each->ifa_addr || !each->ifa_netmask || name != each->ifa_name) continue;
        if (each->ifa_addr->sa_family == AF_INET) {
            const auto address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
            const auto mask = reinterpret_cast<const sockaddr_in*>(each->ifa_netmask)->sin_addr;
            const std::array<in_addr, 2> both{address, mask};
            blocks.option(4, both.data(), sizeof both);
        } else if (each->ifa_addr->sa_family == AF_INET6) {
            const auto address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
            const auto mask = reinterpret_cast<const sockaddr_in6*>(each->ifa_netmask)->sin6_addr;
            if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
            std::array<std::uint8_t, 17> both{};
            std::memcpy(both.data(), &address, sizeof address);
            for (const std::uint8_t part : mask.s6_addr) {
                both[16] = static_cast<std::uint8_t>(both[16] + std::popcount(part));
            }
            blocks.option(5, both.data(), both.size());
        }
    }
}

}  // namespace

// One interface: its socket, and the blocks that it shares with the kernel.
struct PacketCapture::Ring {
    Ring(const std::string& name, int socket) : name(name), socket(socket) {
        const unsigned index = ::if_nametoindex(name.c_str());
        if (index == 0) throw std::system_error(errno, std::generic_category(), name);
        option(socket, PACKET_VERSION, int{TPACKET_V3}, "TPACKET_V3");
        cut_packets();
        tpacket_req3 wanted{};
        wanted.tp_block_size = kBlockBytes;
        wanted.tp_block_nr = kBlocks;
        wanted.tp_frame_size = 2048;  // says little in this version: packets lie one after another
        wanted.tp_frame_nr = kBlockBytes / 2048 * kBlocks;
        wanted.tp_retire_blk_tov = kRetire_ms;
        option(socket, PACKET_RX_RING, wanted, "a ring of packets");
        void* const shared = ::mmap(nullptr, kBlockBytes * kBlocks, PROT_READ | PROT_WRITE,
                                    MAP_SHARED, socket, 0);
        if (shared == MAP_FAILED) checked(-1, "the memory of a ring of packets");
        memory = static_cast<std::uint8_t*>(shared);
        sockaddr_ll address{};
        address.sll_family = AF_PACKET;
        address.sll_protocol = htons(ETH_P_ALL);
        address.sll_ifindex = static_cast<int>(index);
        checked(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address),
                name.c_str());
        link = link_type();
    }
    ~Ring() {
        if (memory) ::munmap(memory, kBlockBytes * kBlocks);
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // A filter of one instruction, which takes this much of each packet.
    void cut_packets() const {
        sock_filter take{BPF_RET | BPF_K, 0, 0, kCapturedBytes};
        const sock_fprog program{1, &take};
        option(socket, SO_ATTACH_FILTER, program, "a filter", SOL_SOCKET);
    }

    std::uint32_t link_type() const {
        ifreq asked{};
        std::strncpy(asked.ifr_name, name.c_str(), sizeof asked.ifr_name - 1);
        checked(::ioctl(socket, SIOCGIFHWADDR, &asked), name.c_str());
        const bool has_header = asked.ifr_hwaddr.sa_family == ARPHRD_ETHER ||
                                asked.ifr_hwaddr.sa_family == ARPHRD_LOOPBACK;
        return has_header ? kEthernet : kRawIp;
    }

    // The block that comes next, if the kernel has handed it over.
    tpacket_block_desc* ready() const {
        auto* const block = reinterpret_cast<tpacket_block_desc*>(memory + next * kBlockBytes);
        const std::atomic_ref<std::uint32_t> status(block->hdr.bh1.block_status);
        return status.load(std::memory_order_acquire) & TP_STATUS_USER ? block : nullptr;
    }
    void give_back(tpacket_block_desc* block) {
        const std::atomic_ref<std::uint32_t> status(block->hdr.bh1.block_status);
        status.store(TP_STATUS_KERNEL, std::memory_order_release);
        next = (next + 1) % kBlocks;
    }

    // The kernel counts anew each time that it is asked.
    void ask_for_counts() {
        tpacket_stats_v3 counts{};
        socklen_t size = sizeof counts;
        checked(::getsockopt(socket, SOL_PACKET, PACKET_STATISTICS, &counts, &size), "statistics");
        received += counts.tp_packets;
        dropped += counts.tp_drops;
    }

    std::string name;
    int socket;
    std::uint8_t* memory = nullptr;
    unsigned next = 0;
    std::uint32_t link = kEthernet;
    std::uint64_t received = 0;
    std::uint64_t dropped = 0;
};

namespace {

// The VLAN tag that the kernel took out of a frame goes back to its place.
void add_frame(Blocks& blocks, const tpacket3_hdr& header, std::uint32_t number) {
    const auto* const data = reinterpret_cast<const std::uint8_t*>(&header) + header.tp_mac;
    const bool is_tagged = (header.tp_status & TP_STATUS_VLAN_VALID) && header.tp_snaplen >= 12;
    const std::uint32_t tag = is_tagged ? 4 : 0;
    blocks.begin(6);
    blocks.u32(number);
    blocks.ticks(header.tp_sec * kSecond + header.tp_nsec);
    blocks.u32(header.tp_snaplen + tag);
    blocks.u32(header.tp_len + tag);
    if (is_tagged) {
        const bool has_kind = header.tp_status & TP_STATUS_VLAN_TPID_VALID;
        const std::uint16_t inserted[2] = {
            htons(has_kind ? header.hv1.tp_vlan_tpid : std::uint16_t{ETH_P_8021Q}),
            htons(static_cast<std::uint16_t>(header.hv1.tp_vlan_tci))};
        blocks.bytes(data, 12);
        blocks.bytes(inserted, 4);
        blocks.bytes(data + 12, header.tp_snaplen - 12);
    } else {
        blocks.bytes(data, header.tp_snaplen);
    }
    blocks.end();
}

}  // namespace

PacketCapture::PacketCapture(int file, const std::vector<std::pair<std::string, int>>& sockets)
    : file_(file) {
    Blocks blocks(waiting_);
    blocks.begin(0x0a0d0d0a);
    blocks.u32(0x1a2b3c4d);
    blocks.u16(1);
    blocks.u16(0);
    const std::int64_t unknown_length = -1;
    blocks.bytes(&unknown_length, 8);
    blocks.end();
    for (const auto& [name, socket] : sockets) {
        rings_.push_back(std::make_unique<Ring>(name, socket));
        const std::uint8_t nanoseconds = 9;
        blocks.begin(1);
        blocks.u16(static_cast<std::uint16_t>(rings_.back()->link));
        blocks.u16(0);
        blocks.u32(kCapturedBytes);
        blocks.option(2, name.data(), name.size());
        write_addresses(blocks, name);
        blocks.option(9, &nanoseconds, 1);
        blocks.option(0, nullptr, 0);
        blocks.end();
    }
    flush();
    struct sigaction action {};  // now, for whoever sees that we capture may want us to end
    action.sa_handler = note_signal;  // without SA_RESTART: it ends a wait
    ::sigaction(SIGTERM, &action, nullptr);
}

PacketCapture::~PacketCapture() = default;

void PacketCapture::run(pid_t watched) {
    std::vector<pollfd> wakes;
    for (const auto& ring : rings_) wakes.push_back({ring->socket, POLLIN | POLLERR, 0});
    const int handle = static_cast<int>(::syscall(SYS_pidfd_open, watched, 0));  // Linux 5.3
    wakes.push_back({handle, POLLIN, 0});
    std::int64_t counted_ns = clock_ns(CLOCK_MONOTONIC);
    bool is_over = false;
    // Once it is over: what the kernel has not handed over yet comes within its timeout.
    for (std::int64_t until_ns = 0; !is_over || clock_ns(CLOCK_MONOTONIC) < until_ns;) {
        const bool was_there = write_what_is_there();
        const std::int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
        if (now_ns - counted_ns >= kSecond) {
            write_statistics();
            flush();
            counted_ns = now_ns;
        }
        if (!was_there) ::poll(wakes.data(), wakes.size() - (is_over ? 1 : 0), kRetire_ms);
        const bool has_ended =
            handle >= 0 ? wakes.back().revents != 0 : ::kill(watched, 0) != 0 && errno == ESRCH;
        if (!is_over && (has_ended || is_told_to_end)) {
            is_over = true;
            until_ns = clock_ns(CLOCK_MONOTONIC) + 3 * kRetire_ms * (kSecond / 1000);
        }
    }
    write_what_is_there();
    write_statistics();
    flush();
    if (handle >= 0) ::close(handle);
}

bool PacketCapture::write_what_is_there() {
    bool was_there = false;
    Blocks blocks(waiting_);
    for (std::uint32_t number = 0; number < rings_.size(); ++number) {
        Ring& ring = *rings_[number];
        // Of each no more than a round, so that one with much to say does not silence the others.
        for (unsigned round = 0; round < kBlocks; ++round) {
            tpacket_block_desc* const block = ring.ready();
            if (!block) break;
            const auto* packet = reinterpret_cast<const std::uint8_t*>(block) +
                                 block->hdr.bh1.offset_to_first_pkt;
            for (std::uint32_t left = block->hdr.bh1.num_pkts; left > 0; --left) {
                const auto& header = *reinterpret_cast<const tpacket3_hdr*>(packet);
                add_frame(blocks, header, number);
                packet += header.tp_next_offset;
            }
            ring.give_back(block);
            was_there = true;
            if (waiting_.size() >= kWriteBytes) flush();
        }
    }
    return was_there;
}

void PacketCapture::write_statistics() {
    Blocks blocks(waiting_);
    const std::int64_t now_ns = clock_ns(CLOCK_REALTIME);
    for (std::uint32_t number = 0; number < rings_.size(); ++number) {
        Ring& ring = *rings_[number];
        ring.ask_for_counts();
        blocks.begin(5);
        blocks.u32(number);
        blocks.ticks(now_ns);
        blocks.option(4, &ring.received, 8);
        blocks.option(7, &ring.dropped, 8);
        blocks.option(0, nullptr, 0);
        blocks.end();
    }
}

void PacketCapture::flush() {
    std::size_t written = 0;
    while (written < waiting_.size()) {
        const ssize_t some = ::write(file_, waiting_.data() + written, waiting_.size() - written);
        if (some < 0 && errno == EINTR) continue;
        checked(static_cast<int>(std::min<ssize_t>(some, 1)), "the capture");
        written += static_cast<std::size_t>(some);
    }
    waiting_.clear();
}

}  // namespace fullwire
