#include "sampling/sampler.hpp"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "sampling/host_devices.hpp"
#include "sampling/job_sockets.hpp"
#include "sampling/sample_file.hpp"

namespace fullwire {

namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
// Asking for an interface costs 3 us, for a connection 3 us, for processors 10 us and for a GPU more
// than all that: each as often as it can be for next to nothing.
constexpr std::int64_t kTick = 10 * kMillisecond;  // the interfaces, for which it all is done
// A wake-up costs more than all the questions. Where links have been all but still for a second,
// four of five ticks are left out until bytes move again. After ten seconds, as with ranks on one
// host, all are left out but four a second. Then connections and devices are asked as rarely.
constexpr std::int64_t kCalmTick = 50 * kMillisecond;
constexpr std::int64_t kCalmAfter = 1000 * kMillisecond;
constexpr std::int64_t kStillTick = 250 * kMillisecond;
constexpr std::int64_t kStillAfter = 10'000 * kMillisecond;
constexpr std::int64_t kFewBytes = 16 * 1024;  // in a tick
constexpr std::int64_t kSocketsEvery = 50 * kMillisecond;
constexpr std::int64_t kDevicesEvery = 100 * kMillisecond;  // processors count in ticks of 10 ms
constexpr std::int64_t kWriteEvery = 1000 * kMillisecond;   // what kill -9 may take with it
constexpr std::int64_t kLookEvery = 500 * kMillisecond;     // whether there are new connections
constexpr std::int64_t kSearchEvery = 8000 * kMillisecond;  // for them in any case: 0.5 ms
constexpr std::size_t kProcessorsAtOnce = 16;  // of more, rows are as many in all

volatile sig_atomic_t is_told_to_end = 0;

void note_signal(int) { is_told_to_end = 1; }

class Due {
  public:
    explicit Due(std::int64_t every_ns) : every_ns_(every_ns) {}

    bool is_now(std::int64_t now_ns) {
        if (now_ns < next_ns_) return false;
        next_ns_ = now_ns - now_ns % every_ns_ + every_ns_;
        return true;
    }

  private:
    std::int64_t every_ns_;
    std::int64_t next_ns_ = 0;
};

std::int64_t own_cpu_ns() {
    timespec used;
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return used.tv_sec * std::int64_t{1'000'000'000} + used.tv_nsec;
}

// A handle of a process, by number -1 where the kernel is older than 5.3 and has none.
struct ProcessHandle {
    explicit ProcessHandle(pid_t process)
        : file(static_cast<int>(::syscall(SYS_pidfd_open, process, 0))) {}
    ~ProcessHandle() {
        if (file >= 0) ::close(file);
    }
    ProcessHandle(const ProcessHandle&) = delete;
    ProcessHandle& operator=(const ProcessHandle&) = delete;

    int file;
};

class Sampler {
  public:
    explicit Sampler(const SampledHost& host)
        : host_(host),
          file_(host.file),
          interfaces_(host.interfaces),
          rdma_(host.rdma_directories, static_cast<std::int64_t>(host.interfaces.size())),
          sockets_(host.mark) {
        const std::size_t groups = (processors_.count() + kProcessorsAtOnce - 1) / kProcessorsAtOnce;
        processors_due_ = Due(kDevicesEvery * static_cast<std::int64_t>(std::max<std::size_t>(groups, 1)));
    }

    void run() {
        file_.define(host_.links);
        do {
            sample_what_is_due(monotonic_ns());
        } while (!is_over_before_next_tick());
        sample_once_more();
    }

  private:
    void sample_what_is_due(std::int64_t now_ns) {
        interfaces_.sample();
        const std::int64_t bytes = interfaces_.bytes();
        if (bytes - bytes_ > kFewBytes) moved_ns_ = now_ns;
        bytes_ = bytes;
        if (look_due_.is_now(now_ns)) sockets_.find_if_changed(file_);
        if (search_due_.is_now(now_ns)) sockets_.find(file_);
        if (sockets_due_.is_now(now_ns)) sockets_.sample(file_);
        if (devices_due_.is_now(now_ns)) sample_devices();
        if (processors_due_.is_now(now_ns)) processors_.sample();
        if (write_due_.is_now(now_ns)) write();
    }

    void sample_devices() {
        rdma_.sample();
        gpus_.sample();
    }

    void sample_once_more() {
        interfaces_.sample();
        sockets_.sample(file_);
        sample_devices();
        processors_.sample();
        write();
    }

    void write() {
        memory_.sample();
        own_cost_.add({monotonic_ns(), own_cpu_ns()});
        interfaces_.move_into(file_);
        rdma_.move_into(file_);
        sockets_.move_into(file_);
        processors_.move_into(file_);
        memory_.move_into(file_);
        gpus_.move_into(file_);
        own_cost_.move_into(file_);
        file_.write();
    }

    std::int64_t tick_ns(std::int64_t now_ns) const {
        const std::int64_t still_ns = now_ns - moved_ns_;
        if (still_ns < kCalmAfter) return kTick;
        // A job may send over RDMA, whose bytes no interface counts.
        const bool may_be_still = still_ns >= kStillAfter && host_.rdma_directories.empty();
        return may_be_still ? kStillTick : kCalmTick;
    }

    // Sleep until the next tick or the end, in one call. Ticks are whole multiples on the machine's
    // clock, so that several samplers of one machine wake at the same time and disturb the job once.
    bool is_over_before_next_tick() const {
        const std::int64_t now_ns = monotonic_ns();
        const std::int64_t tick = tick_ns(now_ns);
        const timespec left{0, tick - now_ns % tick};
        pollfd end{watched_.file, POLLIN, 0};  // also of a process that nobody has reaped
        const bool has_ended = ::ppoll(&end, 1, &left, nullptr) > 0;
        if (is_told_to_end) return true;
        return watched_.file < 0 ? ::kill(host_.watched, 0) != 0 && errno == ESRCH : has_ended;
    }

    const SampledHost& host_;
    ProcessHandle watched_{host_.watched};
    SampleFile file_;
    Interfaces interfaces_;
    std::int64_t bytes_ = 0;
    std::int64_t moved_ns_ = monotonic_ns();  // when links last moved more than a few bytes
    RdmaPorts rdma_;
    JobSockets sockets_;
    Processors processors_;
    Memory memory_;
    Gpus gpus_;
    Series own_cost_{Kind::own_cost, 0, 2};
    Due look_due_{kLookEvery};
    Due search_due_{kSearchEvery};
    Due sockets_due_{kSocketsEvery};
    Due devices_due_{kDevicesEvery};
    Due processors_due_{kDevicesEvery};
    Due write_due_{kWriteEvery};
};

}  // namespace

void sample(const SampledHost& host) {
    struct sigaction action {};
    action.sa_handler = note_signal;  // without SA_RESTART: it ends a sleep
    ::sigaction(SIGTERM, &action, nullptr);
    const sched_param no_priority{};
    ::sched_setscheduler(0, SCHED_BATCH, &no_priority);  // never in front of the job's threads
    Sampler(host).run();
}

}  // namespace fullwire
