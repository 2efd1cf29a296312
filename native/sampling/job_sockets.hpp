// The TCP connections of a recorded job on this host, and what the kernel knows about each.
//
// A process is of the job if its environment says so, whoever started it: launchers do not always
// start what they launch as their own children. Its connections are found by the inodes of its open
// files, from time to time, for finding them means going through every connection of the host. What
// was found is then asked for one by one.

#pragma once

#include <linux/inet_diag.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "sampling/host_devices.hpp"
#include "sampling/netlink.hpp"
#include "sampling/sample_file.hpp"

namespace fullwire {

class JobSockets {
  public:
    // `mark` is the NAME=value in the environment of the job's processes.
    explicit JobSockets(std::string mark);

    // Look for new connections if the host has others than it had when we last did.
    void find_if_changed(SampleFile& file);

    // Look for new connections.
    void find(SampleFile& file);

    // Ask for the state of each connection, or of the next ones where there are very many.
    void sample(SampleFile& file);

    void move_into(SampleFile& file);

  private:
    struct Connection {
        std::uint8_t family;
        inet_diag_sockid id;
        Series series;
    };
    struct Found {
        std::uint8_t family;
        inet_diag_sockid id;
        std::uint32_t inode;
    };

    std::vector<std::int64_t> counts_in_use();
    std::vector<Found> unknown_connections();
    void look_through(std::uint8_t family, std::vector<Found>& unknown,
                      std::unordered_map<std::uint32_t, int>& strangers);
    void take_answer(const nlmsghdr& answer);

    std::string mark_;
    std::string network_;  // the network namespace that this process is in
    Netlink netlink_;
    std::vector<KeptFile> statistics_;
    std::vector<std::int64_t> in_use_;  // connections of the host, when we last looked
    std::unordered_map<std::uint64_t, Connection> connections_;  // by the kernel's cookie
    std::unordered_map<std::uint32_t, int> strangers_;  // inode: how often nobody of the job had it
    std::vector<std::uint64_t> turns_;
    std::size_t turn_ = 0;
    std::int64_t found_ = 0;
};

}  // namespace fullwire
