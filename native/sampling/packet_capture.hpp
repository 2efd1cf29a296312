// Writes the headers of all packets of some interfaces to a pcapng file while a process runs.
//
// The kernel puts packets into a ring of blocks that both share (packet_mmap.rst, TPACKET_V3); there
// they wait until this loop comes, and those for which there is no room are counted. The file grows
// by whole blocks only, so whenever the loop is killed it opens, and the counts of a second before
// are in it.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fullwire {

// Enough for any headers in use, tunnels included, and the beginning of what a message says.
inline constexpr std::uint32_t kCapturedBytes = 128;

class PacketCapture {
  public:
    // Packets are taken from here on. `sockets` are packet sockets that are bound to nothing yet,
    // by the name of the interface of each. Throws where the kernel refuses.
    PacketCapture(int file, const std::vector<std::pair<std::string, int>>& sockets);
    ~PacketCapture();
    PacketCapture(const PacketCapture&) = delete;
    PacketCapture& operator=(const PacketCapture&) = delete;

    // Writes until the watched process has ended or SIGTERM comes. Throws where the file takes no
    // more.
    void run(pid_t watched);

    struct Ring;

  private:
    bool write_what_is_there();
    void write_statistics();
    void flush();

    int file_;
    std::vector<std::unique_ptr<Ring>> rings_;
    std::vector<std::uint8_t> waiting_;  // whole blocks of the file
};

}  // namespace fullwire
