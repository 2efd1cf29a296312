#include "sampling/rank_counters.hpp"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <limits>
#include <string_view>

namespace fullwire {

namespace {

constexpr double kAtAllEvery_s = 1.0;
constexpr int kStaysBusy = 5;        // looks at all, after a thread last ran or a connection began
constexpr double kStaysBusy_s = 10;  // after a connection last carried
constexpr int kUntilGone = 3;        // looks at all without word of a connection
constexpr double kBytes = 4096;      // between two looks, for a rank that sends or receives
// Looks, for what need not be known to the millisecond: where the main thread of a rank that works
// sleeps, and how long the threads of its backend ran.
constexpr std::size_t kSeldom = 16;
constexpr std::size_t kAsked = 64;  // connections at once: the kernel drops answers without room
constexpr std::size_t kMostAsked = 1024;  // of a network; to list more of them takes less time
constexpr int kMostUntilListed = 16;      // looks at all, to a list of a network's connections
constexpr std::uint32_t kCarriesData = 1u << 1 | 1u << 4 | 1u << 5 | 1u << 8;  // as in job_sockets.cpp
constexpr timeval kLongestWait{1, 0};
// Parts of the names of the kernel's functions in which a thread sleeps: one that waits for another
// thread, as for that of a backend, for bytes of a connection, or for one of several files.
constexpr std::array<std::string_view, 1> kWaitsForThreads{"futex"};
constexpr std::array<std::string_view, 3> kWaitsForBytes{"sk_wait", "tcp_", "wait_woken"};
constexpr std::array<std::string_view, 2> kPolls{"poll", "select"};

double seconds_of(clockid_t clock) {
    timespec now{};
    ::clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

double nanoseconds_now() {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

// The next whole number of a text, which is cut off there; -1 without any.
std::int64_t next_number(std::string_view& text) {
    while (!text.empty() && (text.front() < '0' || text.front() > '9')) text.remove_prefix(1);
    std::int64_t value = -1;
    const auto [end, _] = std::from_chars(text.data(), text.data() + text.size(), value);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return value;
}

struct Request {
    nlmsghdr header;
    inet_diag_req_v2 body;
};
constexpr std::size_t kRequestBytes = sizeof(Request);

std::string request_for(std::uint8_t family, const inet_diag_sockid* id) {
    Request message{};
    message.header.nlmsg_len = sizeof message;
    message.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
    message.header.nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | (id ? 0 : NLM_F_DUMP));
    message.body.sdiag_family = family;
    message.body.sdiag_protocol = IPPROTO_TCP;
    message.body.idiag_ext = 1 << (INET_DIAG_INFO - 1);
    message.body.idiag_states = kCarriesData;
    if (id) message.body.id = *id;
    return {reinterpret_cast<const char*>(&message), sizeof message};
}

}  // namespace

RankCounters::RankCounters(std::size_t ranks)
    : counted_(ranks * kColumns), left_(ranks), answer_(1 << 17) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        of(rank, quiet_s) = std::numeric_limits<double>::infinity();
        of(rank, elsewhere) = std::numeric_limits<double>::quiet_NaN();
    }
}

RankCounters::~RankCounters() {
    for (const Thread& each : threads_) ::close(each.file);
    for (const MainThread& each : main_threads_) ::close(each.file);
    for (const Network& each : networks_) ::close(each.socket);
    for (const Shared& each : shared_) ::close(each.file);
    for (const Ports& each : ports_) {
        for (const auto& [sent_file, received_file] : each.files) {
            ::close(sent_file);
            ::close(received_file);
        }
    }
}

void RankCounters::add_thread(std::size_t rank, int file, bool communicates) {
    busy_threads_.push_back(threads_.size());
    threads_.push_back({rank, file, communicates, kStaysBusy});
    ++left_[rank];
}

void RankCounters::add_main_thread(std::size_t rank, int file, bool polls_for_ranks) {
    main_threads_.push_back({rank, file, polls_for_ranks});
}

void RankCounters::add_network(int socket) {
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &kLongestWait, sizeof kLongestWait);
    networks_.emplace_back().socket = socket;
}

void RankCounters::set_owners(std::size_t network,
                              const std::vector<std::pair<std::uint32_t, std::size_t>>& owners) {
    Network& changed = networks_.at(network);
    std::unordered_map<std::uint32_t, std::size_t> now(owners.begin(), owners.end());
    if (now == changed.owners) return;
    changed.owners = std::move(now);
    changed.until_listed = 0;
    changed.lists_again_after = 1;
    look_at_all_s_ = 0.0;
}

void RankCounters::add_interfaces(int file, std::vector<std::size_t> ranks, bool with_loopback) {
    shared_.push_back({file, std::move(ranks), with_loopback});
}

void RankCounters::add_ports(std::vector<std::pair<int, int>> files, std::vector<std::size_t> ranks) {
    ports_.push_back({std::move(files), {-1, std::move(ranks), false}});
}

int RankCounters::watch(double seconds, double share, double least_s, double most_s) {
    const double end_s = seconds_of(CLOCK_MONOTONIC) + seconds;
    left_s_ = std::min(left_s_, 0.0) + share * seconds;
    for (double now_s; (now_s = seconds_of(CLOCK_MONOTONIC)) < end_s;) {
        const double before_s = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        const bool at_all = now_s >= look_at_all_s_;
        if (at_all) look_at_all_s_ = now_s + kAtAllEvery_s;
        look(at_all);
        const auto ended = std::find(left_.begin(), left_.end(), 0);
        if (ended != left_.end()) return static_cast<int>(ended - left_.begin());
        rows_.insert(rows_.end(), counted_.begin(), counted_.end());
        const double took_s = seconds_of(CLOCK_THREAD_CPUTIME_ID) - before_s;
        took_s_ += took_s;
        left_s_ -= took_s;
        if (!at_all) usual_s_ += usual_s_ > 0 ? (took_s - usual_s_) / 8 : took_s;
        // At equal distances, looks and steps that are nearly as short would make a beat, which looks
        // like much longer steps. So each distance is drawn anew.
        const double drawn = std::uniform_real_distribution<>(0.5, 1.5)(random_);
        // Busy processors let looks come late. The time that these have left goes to the next ones.
        const double rest_s = end_s - now_s;
        const double looks_s = std::max(left_s_, share / 2 * rest_s);
        const double mean_s = std::max(usual_s_ * rest_s / looks_s, least_s);
        const double between_s = std::min(drawn * mean_s, most_s);
        const double wait_s = std::min(now_s + between_s, end_s) - seconds_of(CLOCK_MONOTONIC);
        if (wait_s > 0) ::usleep(static_cast<useconds_t>(wait_s * 1e6));
    }
    return -1;
}

void RankCounters::look(bool at_all) {
    ++looks_;
    for (Network& each : networks_) ask(each, at_all);
    for (Shared& each : shared_) read_interfaces(each);
    for (Ports& each : ports_) read_ports(each);
    const double now_ns = nanoseconds_now();
    for (std::size_t rank = 0; rank < left_.size(); ++rank) of(rank, time) = now_ns;
    const bool at_backends = at_all || looks_ % kSeldom == 0;
    if (at_all) {
        for (Thread& each : threads_) read_thread(each, at_all);
        choose_busy_threads();
    } else {
        for (const std::size_t place : busy_threads_) {
            Thread& each = threads_[place];
            if (at_backends || !each.communicates) read_thread(each, at_all);
        }
    }
    for (MainThread& each : main_threads_) read_main_thread(each);
}

void RankCounters::choose_busy_threads() {
    std::erase_if(threads_, [](const Thread& each) { return each.file < 0; });
    busy_threads_.clear();
    for (std::size_t place = 0; place < threads_.size(); ++place) {
        if (threads_[place].stays_busy > 0) busy_threads_.push_back(place);
    }
}

void RankCounters::read_thread(Thread& thread, bool at_all) {
    if (thread.file < 0) return;
    std::array<char, 64> text;
    const ssize_t bytes = ::pread(thread.file, text.data(), text.size(), 0);
    if (bytes <= 0) {  // it ended
        ::close(thread.file);
        thread.file = -1;
        --left_[thread.rank];
        return;
    }
    std::string_view left(text.data(), static_cast<std::size_t>(bytes));
    const std::int64_t ran = next_number(left), delay = next_number(left);
    if (thread.ran >= 0) {
        const auto did = static_cast<double>(ran - thread.ran);
        of(thread.rank, thread.communicates ? communicated : computed) += did;
        if (!thread.communicates) {
            of(thread.rank, delayed) += static_cast<double>(delay - thread.delayed);
        }
    }
    thread.ran = ran;
    thread.delayed = delay;
    if (!at_all) return;
    thread.stays_busy = ran > thread.ran_at_all && thread.ran_at_all >= 0
                            ? kStaysBusy
                            : std::max(thread.stays_busy - 1, 0);
    thread.ran_at_all = ran;
}

void RankCounters::read_main_thread(MainThread& thread) {
    const double now_ns = of(thread.rank, time);
    const double busy_ns = of(thread.rank, computed) + of(thread.rank, delayed);
    const double carried = of(thread.rank, sent) + of(thread.rank, received);
    const double since_ns = thread.time_ns < 0 ? 0 : now_ns - thread.time_ns;
    // The kernel takes long to tell a place, and it matters where the rank is idle and no bytes flow.
    // Else it tells only whether this thread takes part in the training at all.
    const bool works = busy_ns - thread.busy_ns >= since_ns / 2 || carried - thread.carried >= kBytes;
    if (works && !thread.worked) thread.waits = kColumns;
    const bool sleeps_on = !works && !thread.worked && busy_ns == thread.busy_ns;
    if ((!works && !sleeps_on) || ++thread.unread == kSeldom) {
        thread.unread = 0;
        thread.waits = wait_of(thread);
    }
    if (thread.waits != kColumns) of(thread.rank, thread.waits) += since_ns;
    thread.worked = works;
    thread.time_ns = now_ns;
    thread.busy_ns = busy_ns;
    thread.carried = carried;
}

// The column to which the time belongs in which the thread sleeps as it does now.
RankCounters::Column RankCounters::wait_of(const MainThread& thread) {
    std::array<char, 64> text;
    const ssize_t bytes = ::pread(thread.file, text.data(), text.size(), 0);
    const std::string_view place(text.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
    if (place.empty() || place == "0") return kColumns;  // it runs, or may not be asked
    double& told = of(thread.rank, elsewhere);
    if (std::isnan(told)) told = 0;
    const auto is_in = [place](const auto& names) {
        return std::any_of(names.begin(), names.end(), [place](std::string_view name) {
            return place.find(name) != std::string_view::npos;
        });
    };
    if (is_in(kWaitsForThreads)) return kColumns;
    if (is_in(kWaitsForBytes) || (thread.polls_for_ranks && is_in(kPolls))) return unclear;
    return elsewhere;
}

void RankCounters::ask(Network& network, bool at_all) {
    if (at_all) {
        ask_for_all(network);
        choose_busy(network);
    } else {
        send(network, network.requests[looks_ % network.requests.size()]);
    }
    for (const auto& [rank, others_quiet_s] : network.others_quiet_s) of(rank, quiet_s) = others_quiet_s;
    for (const Connection* each : network.busy) {
        of(each->rank, quiet_s) = std::min(of(each->rank, quiet_s), each->quiet_s);
    }
}

void RankCounters::ask_for_all(Network& network) {
    for (auto& [_, each] : network.connections) {
        ++each.unseen;
        each.stays_busy = std::max(each.stays_busy - 1, 0);
    }
    // A list takes the kernel long: it goes through a table that is as large as the memory allows.
    if (--network.until_listed < 0 || network.connections.size() > kMostAsked) {
        network.until_listed = network.lists_again_after;
        network.lists_again_after = std::min(2 * network.lists_again_after, kMostUntilListed);
        for (const std::uint8_t family : {AF_INET, AF_INET6}) {
            const std::string request = request_for(family, nullptr);
            if (::send(network.socket, request.data(), request.size(), 0) < 0) continue;
            receive(network, 1);
        }
        network.was_listed = true;
    } else {
        std::string requests;
        for (const auto& [_, each] : network.connections) requests += each.request;
        send(network, requests);
    }
    forget_ended(network);
}

void RankCounters::send(Network& network, const std::string& requests) {
    for (std::size_t first = 0; first < requests.size(); first += kAsked * kRequestBytes) {
        const std::size_t bytes = std::min(kAsked * kRequestBytes, requests.size() - first);
        if (::send(network.socket, requests.data() + first, bytes, 0) < 0) break;
        receive(network, bytes / kRequestBytes);
    }
}

void RankCounters::choose_busy(Network& network) {
    network.busy.clear();
    for (std::string& each : network.requests) each.clear();
    network.others_quiet_s.clear();
    for (const auto& [_, rank] : network.owners) {
        network.others_quiet_s[rank] = std::numeric_limits<double>::infinity();
    }
    const auto is_busy = [](const Connection& each) {
        return each.stays_busy > 0 || each.quiet_s <= kStaysBusy_s;
    };
    for (auto& [_, each] : network.connections) {
        if (is_busy(each) || (each.other_end != nullptr && is_busy(*each.other_end))) {
            network.busy.push_back(&each);
            for (std::size_t turn = 0; turn < network.requests.size(); ++turn) {
                const bool is_due = each.other_end == nullptr || each.is_first == (turn == 0);
                if (is_due) network.requests[turn] += each.request;
            }
        } else {
            const double none = std::numeric_limits<double>::infinity();
            double& quiet_s = network.others_quiet_s.try_emplace(each.rank, none).first->second;
            quiet_s = std::min(quiet_s, each.quiet_s);
        }
    }
}

void RankCounters::receive(Network& network, std::size_t answers) {
    while (answers > 0) {  // a list ends with a word of its own; a connection that is gone, too
        const ssize_t bytes = ::recv(network.socket, answer_.data(), answer_.size(), 0);
        if (bytes <= 0) return;
        auto left = static_cast<unsigned>(bytes);
        for (auto* each = reinterpret_cast<const nlmsghdr*>(answer_.data());
             answers > 0 && NLMSG_OK(each, left); each = NLMSG_NEXT(each, left)) {
            const bool is_last = each->nlmsg_type == NLMSG_DONE || each->nlmsg_type == NLMSG_ERROR;
            if (is_last || !(each->nlmsg_flags & NLM_F_MULTI)) --answers;
            if (!is_last) {
                take_answer(network, static_cast<const char*>(NLMSG_DATA(each)),
                            each->nlmsg_len - NLMSG_HDRLEN);
            }
        }
    }
}

void RankCounters::take_answer(Network& network, const char* message, std::size_t bytes) {
    inet_diag_msg told;
    if (bytes < sizeof told) return;
    std::memcpy(&told, message, sizeof told);
    const auto owner = network.owners.find(told.idiag_inode);
    if (owner == network.owners.end()) return;
    tcp_info info{};
    for (std::size_t at = NLA_ALIGN(sizeof told); at + NLA_HDRLEN <= bytes;) {
        nlattr attribute;
        std::memcpy(&attribute, message + at, sizeof attribute);
        if (attribute.nla_len < NLA_HDRLEN || attribute.nla_len > bytes - at) return;
        if ((attribute.nla_type & NLA_TYPE_MASK) == INET_DIAG_INFO) {
            const std::size_t size = attribute.nla_len - NLA_HDRLEN;
            std::memcpy(&info, message + at + NLA_HDRLEN, std::min(size, sizeof info));
        }
        at += NLA_ALIGN(attribute.nla_len);
    }
    const std::size_t rank = owner->second;
    const std::uint64_t sent = info.tcpi_bytes_acked, received = info.tcpi_bytes_received;
    const auto found = network.connections.find(told.idiag_inode);
    const bool is_new = found == network.connections.end();
    Connection& each = is_new ? begin(network, told, rank) : found->second;
    if (is_new) {
        each.sent = sent;
        each.received = received;
    } else {
        count(each, sent, received);
        of(rank, retransmits) += static_cast<double>(info.tcpi_total_retrans) - static_cast<double>(each.again);
        of(rank, sending) += (static_cast<double>(info.tcpi_busy_time) - static_cast<double>(each.busy_us)) * 1e3;
        of(rank, limited_by_receiver) += (static_cast<double>(info.tcpi_rwnd_limited) - static_cast<double>(each.receiver_us)) * 1e3;
        of(rank, limited_by_buffer) += (static_cast<double>(info.tcpi_sndbuf_limited) - static_cast<double>(each.buffer_us)) * 1e3;
        of(rank, round_trips) += (static_cast<double>(sent) - static_cast<double>(each.acknowledged)) * info.tcpi_rtt * 1e3;
    }
    each.rank = rank;
    each.acknowledged = sent;
    each.again = info.tcpi_total_retrans;
    each.busy_us = info.tcpi_busy_time;
    each.receiver_us = info.tcpi_rwnd_limited;
    each.buffer_us = info.tcpi_sndbuf_limited;
    each.unseen = 0;
    each.quiet_s = sent + received > 0
                       ? std::min(info.tcpi_last_data_sent, info.tcpi_last_data_recv) / 1e3
                       : std::numeric_limits<double>::infinity();
}

RankCounters::Connection& RankCounters::begin(Network& network, const inet_diag_msg& told,
                                              std::size_t rank) {
    // The first list tells of old connections, and the kernel tells when those last carried.
    const int stays_busy = network.was_listed ? kStaysBusy : 0;
    const Connection made{rank, request_for(told.idiag_family, &told.id), stays_busy};
    Connection& begun = network.connections.emplace(told.idiag_inode, made).first->second;
    const auto addresses_of = [&told](const auto& from, auto from_port, const auto& to, auto to_port) {
        std::string addresses(1, static_cast<char>(told.idiag_family));
        for (const auto& [address, port] : {std::pair{&from, from_port}, std::pair{&to, to_port}}) {
            addresses.append(reinterpret_cast<const char*>(address), sizeof *address);
            addresses.append(reinterpret_cast<const char*>(&port), sizeof port);
        }
        return addresses;
    };
    const inet_diag_sockid& id = told.id;
    const std::string own = addresses_of(id.idiag_src, id.idiag_sport, id.idiag_dst, id.idiag_dport);
    const std::string from_there = addresses_of(id.idiag_dst, id.idiag_dport, id.idiag_src, id.idiag_sport);
    const auto other = network.by_addresses.find(from_there);
    if (other != network.by_addresses.end() && other->second->other_end == nullptr) {
        begun.other_end = other->second;
        begun.is_first = !other->second->is_first;
        other->second->other_end = &begun;
    }
    network.by_addresses[own] = &begun;
    return begun;
}

void RankCounters::forget_ended(Network& network) {
    const auto is_gone = [](const Connection& each) { return each.unseen > kUntilGone; };
    std::erase_if(network.by_addresses, [&](const auto& each) { return is_gone(*each.second); });
    for (auto& [_, each] : network.connections) {
        if (is_gone(each) && each.other_end != nullptr) each.other_end->other_end = nullptr;
    }
    std::erase_if(network.connections, [&](const auto& each) { return is_gone(each.second); });
}

// Bytes that one end has received may be more than those that the other end knows to be there. The
// beginning and the end of a connection may count as a byte.
void RankCounters::count(Connection& connection, std::uint64_t sent_now, std::uint64_t received_now) {
    const auto count_more = [this](std::size_t rank, Column column, std::uint64_t& before, std::uint64_t now) {
        if (now > before) {
            of(rank, column) += static_cast<double>(now - before);
            before = now;
        }
    };
    count_more(connection.rank, sent, connection.sent, sent_now);
    count_more(connection.rank, received, connection.received, received_now);
    if (Connection* other = connection.other_end) {
        count_more(other->rank, received, other->received, sent_now);
        count_more(other->rank, sent, other->sent, received_now);
    }
}

void RankCounters::read_interfaces(Shared& shared) {
    std::array<char, 1 << 14> text;
    const ssize_t bytes = ::pread(shared.file, text.data(), text.size(), 0);
    std::string_view left(text.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
    double sent = 0, received = 0;
    while (!left.empty()) {
        std::string_view line = left.substr(0, left.find('\n'));
        left.remove_prefix(std::min(line.size() + 1, left.size()));
        const std::size_t colon = line.find(':');
        if (colon == std::string_view::npos) continue;  // one of the two headings
        const bool is_loopback = line.substr(0, colon).ends_with("lo") && line.find_first_not_of(' ') + 2 == colon;
        if (is_loopback && !shared.with_loopback) continue;
        line.remove_prefix(colon + 1);
        for (int field = 0; field < 9; ++field) {
            const auto value = static_cast<double>(next_number(line));
            if (field == 0) received += value;
            if (field == 8) sent += value;
        }
    }
    shared.give(sent, received, *this);
}

void RankCounters::read_ports(Ports& ports) {
    constexpr double kWordBytes = 4;  // InfiniBand counts data in words
    const auto words_of = [](int file) {
        std::array<char, 32> text;
        const ssize_t bytes = ::pread(file, text.data(), text.size(), 0);
        std::string_view content(text.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
        return static_cast<double>(next_number(content));
    };
    double sent = 0, received = 0;
    for (const auto& [sent_file, received_file] : ports.files) {
        sent += kWordBytes * words_of(sent_file);
        received += kWordBytes * words_of(received_file);
    }
    ports.shared.give(sent, received, *this);
}

void RankCounters::Shared::give(double sent_now, double received_now, RankCounters& counters) {
    if (sent >= 0 && sent_now >= sent && received_now >= received) {
        const auto count = static_cast<double>(ranks.size());
        for (const std::size_t rank : ranks) {
            counters.of(rank, RankCounters::sent) += (sent_now - sent) / count;
            counters.of(rank, RankCounters::received) += (received_now - received) / count;
        }
    }
    sent = sent_now;
    received = received_now;
}

}  // namespace fullwire
