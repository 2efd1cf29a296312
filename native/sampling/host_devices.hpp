// What of a host is sampled besides its connections: network ports, processors, memory, GPUs.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sampling/netlink.hpp"
#include "sampling/sample_file.hpp"

namespace fullwire {

std::int64_t monotonic_ns();

// The first number after a line's beginning and a word, zero where there is none.
std::int64_t number_after(std::string_view text, std::string_view word,
                          std::string_view line_begin = {});

// A file of /proc or /sys that is read again and again.
class KeptFile {
  public:
    explicit KeptFile(const std::string& path);
    ~KeptFile();
    KeptFile(KeptFile&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
    KeptFile& operator=(KeptFile&&) = delete;

    // Its content now, empty if it cannot be read; it stays until the next reading of any.
    std::string_view content() const;

  private:
    int file_;
};

// Interfaces as the kernel counts them, all asked for at once.
class Interfaces {
  public:
    explicit Interfaces(const std::vector<int>& indexes);
    void sample();
    void move_into(SampleFile& file);

    // The bytes of all of them, both ways, at the last sample.
    std::int64_t bytes() const;

  private:
    struct Interface {
        int index;
        Series series;
        std::int64_t bytes = 0;
    };

    void take_answer(const nlmsghdr& answer);

    Netlink netlink_;
    std::vector<Interface> interfaces_;
};

// The counters of RDMA ports, which an InfiniBand or RoCE adapter keeps apart from its interface's.
class RdmaPorts {
  public:
    // Their series are numbered on from `first_number`, that of the first directory with counters.
    RdmaPorts(const std::vector<std::string>& directories, std::int64_t first_number);
    void sample();
    void move_into(SampleFile& file);

  private:
    struct Port {
        std::vector<KeptFile> counters;
        Series series;
    };

    std::vector<Port> ports_;
};

class Processors {
  public:
    Processors();
    void sample();
    void move_into(SampleFile& file);
    std::size_t count() const { return series_.size(); }

  private:
    KeptFile stat_;
    std::vector<Series> series_;
};

class Memory {
  public:
    Memory();
    void sample();
    void move_into(SampleFile& file);

  private:
    KeptFile meminfo_;
    Series series_;
};

// GPUs through NVIDIA's management library, where it is installed; else there are none.
class Gpus {
  public:
    Gpus();
    ~Gpus();
    void sample();
    void move_into(SampleFile& file);

  private:
    struct Library;
    std::unique_ptr<Library> library_;
    std::vector<Series> series_;
};

}  // namespace fullwire
