// What the kernel counts of a running job's ranks, looked at from outside, again and again.
//
// Two things are read of each rank: how long its threads ran and waited for a processor, and what its
// TCP connections carried. Threads and connections that do nothing are read once a second, and the
// threads of a backend every few looks, so that a look costs some microseconds a rank. Who owns which
// thread and connection is told by the caller.

#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

struct inet_diag_msg;

namespace fullwire {

class RankCounters {
  public:
    // What a look notes of a rank, in this order. Times in ns, totals since the first look. Those of
    // its connections are added up: in `sending` they had bytes that were not yet acknowledged, and
    // `round_trips` has the smoothed time of a round trip for each byte that was.
    enum Column {
        time, computed, delayed, communicated, sent, received, retransmits, quiet_s, sending,
        limited_by_receiver, limited_by_buffer, round_trips, elsewhere, unclear, kColumns
    };

    explicit RankCounters(std::size_t ranks);
    ~RankCounters();
    RankCounters(const RankCounters&) = delete;
    RankCounters& operator=(const RankCounters&) = delete;

    // Read a thread's schedstat from an open file, which is ours from now on.
    void add_thread(std::size_t rank, int file, bool communicates);

    // Read where a rank's main thread sleeps from an open /proc/PID/wchan, which is ours from now on.
    // Where ranks may poll for each other's bytes, it is unclear what a rank that polls waits for.
    void add_main_thread(std::size_t rank, int file, bool polls_for_ranks);

    // Ask for connections in another network, through a netlink socket that is ours from now on.
    void add_network(int socket);

    // Whose connections are whose: pairs of a socket's inode and a rank.
    void set_owners(std::size_t network, const std::vector<std::pair<std::uint32_t, std::size_t>>& owners);

    // Share among ranks the counters of interfaces, an open /proc/PID/net/dev that is ours from now on.
    void add_interfaces(int file, std::vector<std::size_t> ranks, bool with_loopback);

    // Share among ranks the counters of RDMA ports: open files of words sent and received that are
    // ours from now on.
    void add_ports(std::vector<std::pair<int, int>> files, std::vector<std::size_t> ranks);

    // Look for so long. Looks take that share of a processor together, and a look at all may take half
    // as much again. The mean distance between looks is within limits. Returns the rank whose threads
    // have ended, or -1.
    int watch(double seconds, double share, double least_s, double most_s);

    // The looks since the last taking, kColumns numbers a rank, rank after rank, look after look.
    std::vector<double> take() { return std::exchange(rows_, {}); }
    double took_s() const { return took_s_; }

  private:
    struct Thread {
        std::size_t rank;
        int file;
        bool communicates;
        int stays_busy;  // for so many more looks at all
        std::int64_t ran = -1, delayed = 0, ran_at_all = -1;
    };
    struct MainThread {
        std::size_t rank;
        int file;
        bool polls_for_ranks;
        bool worked = false;  // the rank, until the last look
        std::size_t unread = 0;   // looks since it was last read
        Column waits = kColumns;  // the column that its present wait belongs to; kColumns: none
        double time_ns = -1, busy_ns = 0, carried = 0;  // of its rank, at the last look
    };
    // One end of a connection. If a rank of ours has the other end, the two are asked in turns: either
    // tells the bytes of both.
    struct Connection {
        std::size_t rank;
        std::string request;
        int stays_busy;  // for so many more looks at all, whatever it carries
        Connection* other_end = nullptr;
        bool is_first = true;
        std::uint64_t sent = 0, received = 0;  // as either end told last
        std::uint64_t acknowledged = 0, again = 0, busy_us = 0, receiver_us = 0, buffer_us = 0;
        double quiet_s = 0;
        int unseen = 0;  // looks at all since the kernel last told of it
    };
    struct Network {
        int socket = -1;
        std::unordered_map<std::uint32_t, std::size_t> owners;
        std::unordered_map<std::uint32_t, Connection> connections;
        std::unordered_map<std::string, Connection*> by_addresses;
        // A look at all chooses these. Other looks use only them: other memory is no longer in the
        // cache. Of a connection whose two ends we know, the ends are asked in turns.
        std::vector<Connection*> busy;
        std::array<std::string, 2> requests;
        std::unordered_map<std::size_t, double> others_quiet_s;  // by rank, of the other connections
        bool was_listed = false;
        int until_listed = 0;  // looks at all, after which the kernel lists all connections
        int lists_again_after = 1;
    };
    struct Shared {
        int file;
        std::vector<std::size_t> ranks;
        bool with_loopback;
        double sent = -1, received = -1;

        void give(double sent_now, double received_now, RankCounters& counters);
    };
    struct Ports {
        std::vector<std::pair<int, int>> files;
        Shared shared;
    };

    double& of(std::size_t rank, Column column) { return counted_[rank * kColumns + column]; }
    void look(bool at_all);
    void choose_busy_threads();
    void read_thread(Thread& thread, bool at_all);
    void read_main_thread(MainThread& thread);
    Column wait_of(const MainThread& thread);
    void ask(Network& network, bool at_all);
    void ask_for_all(Network& network);
    void send(Network& network, const std::string& requests);
    void choose_busy(Network& network);
    void receive(Network& network, std::size_t answers);
    void take_answer(Network& network, const char* message, std::size_t bytes);
    Connection& begin(Network& network, const inet_diag_msg& told, std::size_t rank);
    void forget_ended(Network& network);
    void count(Connection& connection, std::uint64_t sent, std::uint64_t received);
    void read_interfaces(Shared& shared);
    void read_ports(Ports& ports);

    std::minstd_rand random_;
    std::vector<double> counted_;
    std::vector<double> rows_;
    std::vector<Thread> threads_;
    std::vector<std::size_t> busy_threads_;  // their places, chosen by a look at all
    std::vector<MainThread> main_threads_;
    std::vector<Network> networks_;
    std::vector<Shared> shared_;
    std::vector<Ports> ports_;
    std::vector<int> left_;  // threads that are left, by rank
    std::vector<char> answer_;
    std::size_t looks_ = 0;
    double look_at_all_s_ = 0.0;
    double usual_s_ = 0.0;  // that another look takes
    double left_s_ = 0.0;   // of the processor's time, for the rest of a call; below 0 a debt
    double took_s_ = 0.0;
};

}  // namespace fullwire
