#include "sampling/job_sockets.hpp"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <memory>
#include <string_view>

namespace fullwire {

namespace {

constexpr std::size_t kMostConnections = 1024;  // followed at the same time
constexpr std::size_t kAskedAtOnce = 64;        // bounds what one look costs: some 0.2 ms
constexpr int kTimesUntilStranger = 2;          // a descriptor may be on its way to its process
constexpr std::size_t kMostEnvironmentBytes = 1 << 20;
constexpr std::uint32_t kCarriesData = 1u << 1 | 1u << 4 | 1u << 5 | 1u << 8;  // TCP_ESTABLISHED,
                                                        // FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
constexpr std::string_view kSocketLink = "socket:[";
constexpr std::size_t kColumns = 10;

std::uint64_t cookie_of(const inet_diag_sockid& id) {
    return static_cast<std::uint64_t>(id.idiag_cookie[1]) << 32 | id.idiag_cookie[0];
}

inet_diag_req_v2 request(std::uint8_t family) {
    inet_diag_req_v2 body{};
    body.sdiag_family = family;
    body.sdiag_protocol = IPPROTO_TCP;
    body.idiag_states = kCarriesData;
    return body;
}

std::string endpoint(std::uint8_t family, const __be32* address, __be16 port) {
    std::array<char, INET6_ADDRSTRLEN> text{};
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(address);
    const std::array<std::uint8_t, 12> mapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
    const bool is_mapped = family == AF_INET6 && std::equal(mapped.begin(), mapped.end(), bytes);
    std::string colon_port(":");  // appended to: GCC 12 warns, wrongly, of ":" + std::to_string()
    colon_port += std::to_string(ntohs(port));
    if (family == AF_INET || is_mapped) {
        inet_ntop(AF_INET, is_mapped ? bytes + mapped.size() : bytes, text.data(), text.size());
        return text.data() + colon_port;
    }
    inet_ntop(AF_INET6, bytes, text.data(), text.size());
    return std::string("[") + text.data() + "]" + colon_port;
}

std::string flow_name(std::uint8_t family, const inet_diag_sockid& id) {
    return endpoint(family, id.idiag_src, id.idiag_sport) + ">" +
           endpoint(family, id.idiag_dst, id.idiag_dport);
}

std::string link_target(const std::string& path) {
    std::array<char, 128> target;
    const ssize_t bytes = ::readlink(path.c_str(), target.data(), target.size());
    return bytes < 0 ? std::string() : std::string(target.data(), static_cast<std::size_t>(bytes));
}

std::string content_of(const std::string& path, std::size_t most_bytes) {
    std::string content;
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return content;
    std::array<char, 4096> piece;
    ssize_t bytes;
    while (content.size() < most_bytes && (bytes = ::read(file, piece.data(), piece.size())) > 0) {
        content.append(piece.data(), static_cast<std::size_t>(bytes));
    }
    ::close(file);
    return content;
}

template <typename Take>
void each_entry(const std::string& directory, Take take) {
    const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(directory.c_str()), ::closedir);
    if (!open) return;
    while (const dirent* entry = ::readdir(open.get())) {
        if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') take(directory + "/" + entry->d_name);
    }
}

bool is_of_job(const std::string& process, const std::string& mark, const std::string& network) {
    if (link_target(process + "/ns/net") != network) return false;
    const std::string environment = '\0' + content_of(process + "/environ", kMostEnvironmentBytes);
    return environment.find('\0' + mark + '\0') != std::string::npos;
}

std::unordered_set<std::uint32_t> inodes_of_job(const std::string& mark,
                                                const std::string& network) {
    std::unordered_set<std::uint32_t> inodes;
    each_entry("/proc", [&](const std::string& process) {
        if (!is_of_job(process, mark, network)) return;
        each_entry(process + "/fd", [&](const std::string& descriptor) {
            const std::string target = link_target(descriptor);
            if (!target.starts_with(kSocketLink)) return;
            std::uint32_t inode = 0;
            std::from_chars(target.data() + kSocketLink.size(), target.data() + target.size(),
                            inode);
            inodes.insert(inode);
        });
    });
    return inodes;
}

// The kernel's tcp_info, as far as this kernel fills it; fields that it does not know are zero.
tcp_info known_part(std::string_view attribute) {
    tcp_info info{};
    std::memcpy(&info, attribute.data(), std::min(attribute.size(), sizeof info));
    return info;
}

std::int64_t whole(std::uint64_t value) { return static_cast<std::int64_t>(value); }


}  // namespace

JobSockets::JobSockets(std::string mark)
    : mark_(std::move(mark)),
      network_(link_target("/proc/self/ns/net")),
      netlink_(NETLINK_SOCK_DIAG) {
    statistics_.emplace_back("/proc/net/sockstat");
    statistics_.emplace_back("/proc/net/sockstat6");
}

void JobSockets::find_if_changed(SampleFile& file) {
    if (counts_in_use() != in_use_) find(file);
}

std::vector<std::int64_t> JobSockets::counts_in_use() {
    std::vector<std::int64_t> counts;
    for (const KeptFile& each : statistics_) {
        counts.push_back(number_after(each.content(), "inuse", "TCP"));
    }
    return counts;
}

void JobSockets::find(SampleFile& file) {
    in_use_ = counts_in_use();
    const std::vector<Found> unknown = unknown_connections();
    if (unknown.empty()) return;
    const std::unordered_set<std::uint32_t> ours = inodes_of_job(mark_, network_);
    for (const Found& each : unknown) {
        if (!ours.contains(each.inode)) {
            ++strangers_[each.inode];
            continue;
        }
        if (connections_.size() >= kMostConnections) continue;
        connections_.emplace(cookie_of(each.id),
                             Connection{each.family, each.id,
                                        Series(Kind::socket, found_, kColumns)});
        file.define("{\"kind\":\"flow\",\"number\":" + std::to_string(found_) + ",\"name\":\"" +
                    flow_name(each.family, each.id) + "\"}");
        ++found_;
    }
}

std::vector<JobSockets::Found> JobSockets::unknown_connections() {
    std::vector<Found> unknown;
    std::unordered_map<std::uint32_t, int> strangers;  // those still there: the others are forgotten
    for (const std::uint8_t family : {AF_INET, AF_INET6}) {
        look_through(family, unknown, strangers);
    }
    strangers_ = std::move(strangers);
    return unknown;
}

void JobSockets::look_through(std::uint8_t family, std::vector<Found>& unknown,
                              std::unordered_map<std::uint32_t, int>& strangers) {
    netlink_.put(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, 0, request(family));
    netlink_.ask([&](const nlmsghdr& answer) {
        if (answer.nlmsg_type != SOCK_DIAG_BY_FAMILY) return;
        const auto& found = *static_cast<const inet_diag_msg*>(NLMSG_DATA(&answer));
        const bool is_accepted = found.idiag_inode != 0;
        if (!is_accepted || connections_.contains(cookie_of(found.id))) return;
        const auto seen = strangers_.find(found.idiag_inode);
        if (seen != strangers_.end()) strangers.insert(*seen);
        if (seen != strangers_.end() && seen->second >= kTimesUntilStranger) return;
        unknown.push_back({found.idiag_family, found.id, found.idiag_inode});
    });
}

void JobSockets::sample(SampleFile& file) {
    if (turn_ >= turns_.size()) {
        turns_.clear();
        for (const auto& [cookie, _] : connections_) turns_.push_back(cookie);
        turn_ = 0;
    }
    const std::size_t end = std::min(turn_ + kAskedAtOnce, turns_.size());
    std::unordered_set<std::uint64_t> unanswered;
    for (; turn_ < end; ++turn_) {
        const auto at = connections_.find(turns_[turn_]);
        if (at == connections_.end()) continue;
        inet_diag_req_v2 body = request(at->second.family);
        body.id = at->second.id;
        body.idiag_ext = 1 << (INET_DIAG_INFO - 1);
        netlink_.put(SOCK_DIAG_BY_FAMILY, 0, 0, body);
        unanswered.insert(at->first);
    }
    const bool is_whole = netlink_.ask([&](const nlmsghdr& answer) {
        if (answer.nlmsg_type != SOCK_DIAG_BY_FAMILY) return;
        take_answer(answer);
        unanswered.erase(
            cookie_of(static_cast<const inet_diag_msg*>(NLMSG_DATA(&answer))->id));
    });
    if (!is_whole) return;
    for (const std::uint64_t gone : unanswered) {
        connections_.at(gone).series.move_into(file);
        connections_.erase(gone);
    }
}

void JobSockets::take_answer(const nlmsghdr& answer) {
    const auto& state = *static_cast<const inet_diag_msg*>(NLMSG_DATA(&answer));
    const auto at = connections_.find(cookie_of(state.id));
    if (at == connections_.end()) return;
    each_attribute<inet_diag_msg>(answer, [&](int type, std::string_view attribute) {
        if (type != INET_DIAG_INFO) return;
        const tcp_info info = known_part(attribute);
        at->second.series.add({monotonic_ns(), whole(info.tcpi_bytes_acked),
                               info.tcpi_total_retrans, info.tcpi_rtt, info.tcpi_snd_cwnd,
                               whole(info.tcpi_delivery_rate), info.tcpi_delivery_rate_app_limited,
                               whole(info.tcpi_busy_time), whole(info.tcpi_rwnd_limited),
                               whole(info.tcpi_sndbuf_limited)});
    });
}

void JobSockets::move_into(SampleFile& file) {
    for (auto& [_, connection] : connections_) connection.series.move_into(file);
}

}  // namespace fullwire
