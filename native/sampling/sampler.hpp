// The loop that samples a host while a job runs on it. It listens on no network and keeps no more
// than a second of samples in memory.

#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace fullwire {

struct SampledHost {
    int file;                                  // where blocks are appended
    std::string links;                         // JSON that names the series of links
    std::string mark;                          // NAME=value in the environment of the job's processes
    std::vector<int> interfaces;               // by index; series of links count from here
    std::vector<std::string> rdma_directories; // and on here
    pid_t watched;                             // the process with whose end sampling ends
};

// Sample until the watched process has ended or SIGTERM comes. Throws where the file takes no more.
void sample(const SampledHost& host);

}  // namespace fullwire
