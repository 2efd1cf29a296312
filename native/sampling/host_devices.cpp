#include "sampling/host_devices.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/if_link.h>
#include <linux/rtnetlink.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstring>
#include <ctime>

namespace fullwire {

namespace {

constexpr std::size_t kLinkColumns = 6;
constexpr std::size_t kMostContentBytes = 1 << 18;  // /proc/stat of a thousand processors

// The next number in a text, which loses all up to its end; zero where there is none.
std::int64_t next_number(std::string_view& text) {
    const std::size_t begin = text.find_first_of("0123456789");
    if (begin == std::string_view::npos) {
        text = {};
        return 0;
    }
    text.remove_prefix(begin);
    std::uint64_t number = 0;
    const auto [end, _] = std::from_chars(text.data(), text.data() + text.size(), number);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return static_cast<std::int64_t>(number);
}

std::string_view next_line(std::string_view& text) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return line;
}

bool is_one_processor(std::string_view line) {
    return line.size() > 3 && line.starts_with("cpu") && line[3] != ' ';
}

}  // namespace

std::int64_t monotonic_ns() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

std::int64_t number_after(std::string_view text, std::string_view word,
                          std::string_view line_begin) {
    while (!text.empty()) {
        std::string_view line = next_line(text);
        const std::size_t at = line.find(word);
        if (!line.starts_with(line_begin) || at == std::string_view::npos) continue;
        line.remove_prefix(at);
        return next_number(line);
    }
    return 0;
}

KeptFile::KeptFile(const std::string& path) : file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

KeptFile::~KeptFile() {
    if (file_ >= 0) ::close(file_);
}

std::string_view KeptFile::content() const {
    static std::array<char, kMostContentBytes> content;
    const ssize_t bytes = ::pread(file_, content.data(), content.size(), 0);
    return {content.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0))};
}

Interfaces::Interfaces(const std::vector<int>& indexes) : netlink_(NETLINK_ROUTE) {
    for (const int index : indexes) {
        const auto number = static_cast<std::int64_t>(interfaces_.size());
        interfaces_.push_back({index, Series(Kind::link, number, kLinkColumns)});
    }
}

std::int64_t Interfaces::bytes() const {
    std::int64_t all = 0;
    for (const Interface& each : interfaces_) all += each.bytes;
    return all;
}

void Interfaces::sample() {
    for (const Interface& each : interfaces_) {
        if_stats_msg body{};
        body.ifindex = static_cast<std::uint32_t>(each.index);
        body.filter_mask = IFLA_STATS_FILTER_BIT(IFLA_STATS_LINK_64);
        netlink_.put(RTM_GETSTATS, 0, 0, body);
    }
    netlink_.ask([&](const nlmsghdr& answer) {
        if (answer.nlmsg_type == RTM_NEWSTATS) take_answer(answer);
    });
}

void Interfaces::take_answer(const nlmsghdr& answer) {
    const auto index = static_cast<const if_stats_msg*>(NLMSG_DATA(&answer))->ifindex;
    each_attribute<if_stats_msg>(answer, [&](int type, std::string_view attribute) {
        if (type != IFLA_STATS_LINK_64) return;
        rtnl_link_stats64 counted{};
        std::memcpy(&counted, attribute.data(), std::min(attribute.size(), sizeof counted));
        for (Interface& each : interfaces_) {
            if (each.index != static_cast<int>(index)) continue;
            each.bytes = static_cast<std::int64_t>(counted.tx_bytes + counted.rx_bytes);
            each.series.add({monotonic_ns(), static_cast<std::int64_t>(counted.tx_bytes),
                             static_cast<std::int64_t>(counted.rx_bytes),
                             static_cast<std::int64_t>(counted.tx_packets),
                             static_cast<std::int64_t>(counted.rx_packets),
                             static_cast<std::int64_t>(counted.tx_dropped + counted.rx_dropped)});
        }
    });
}

void Interfaces::move_into(SampleFile& file) {
    for (Interface& each : interfaces_) each.series.move_into(file);
}

RdmaPorts::RdmaPorts(const std::vector<std::string>& directories, std::int64_t first_number) {
    for (const std::string& directory : directories) {
        std::vector<KeptFile> counters;
        for (const char* name : {"port_xmit_data", "port_rcv_data", "port_xmit_packets",
                                 "port_rcv_packets", "port_xmit_discards"}) {
            counters.emplace_back(directory + "/" + name);
        }
        const auto number = first_number + static_cast<std::int64_t>(ports_.size());
        ports_.push_back({std::move(counters), Series(Kind::link, number, kLinkColumns)});
    }
}

void RdmaPorts::sample() {
    constexpr std::int64_t kWordBytes = 4;  // InfiniBand counts data in words
    for (Port& port : ports_) {
        std::array<std::int64_t, kLinkColumns> row{monotonic_ns()};
        for (std::size_t counter = 0; counter < port.counters.size(); ++counter) {
            std::string_view content = port.counters[counter].content();
            row[counter + 1] = next_number(content) * (counter < 2 ? kWordBytes : 1);
        }
        port.series.add(row);
    }
}

void RdmaPorts::move_into(SampleFile& file) {
    for (Port& port : ports_) port.series.move_into(file);
}

Processors::Processors() : stat_("/proc/stat") {
    std::string_view content = stat_.content();
    while (!content.empty()) {
        std::string_view line = next_line(content);
        if (is_one_processor(line)) series_.emplace_back(Kind::processor, next_number(line), 3);
    }
}

void Processors::sample() {
    const std::int64_t now_ns = monotonic_ns();
    std::string_view content = stat_.content();
    std::size_t at = 0;
    while (!content.empty() && at < series_.size()) {
        std::string_view line = next_line(content);
        if (!is_one_processor(line)) continue;
        next_number(line);  // its own
        // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already
        std::array<std::int64_t, 8> ticks;
        std::int64_t all = 0;
        for (std::int64_t& each : ticks) all += each = next_number(line);
        series_[at++].add({now_ns, all - ticks[3] - ticks[4], all});
    }
}

void Processors::move_into(SampleFile& file) {
    for (Series& each : series_) each.move_into(file);
}

Memory::Memory() : meminfo_("/proc/meminfo"), series_(Kind::memory, 0, 3) {}

void Memory::sample() {
    const std::string_view content = meminfo_.content();
    const std::int64_t all = number_after(content, "MemTotal:") * 1024;
    const std::int64_t available = number_after(content, "MemAvailable:") * 1024;
    if (all > 0) series_.add({monotonic_ns(), all - available, all});
}

void Memory::move_into(SampleFile& file) { series_.move_into(file); }

// As in NVIDIA's nvml.h; the library is loaded where it is there, and nothing of it is built in.
struct Gpus::Library {
    struct Utilization {
        unsigned gpu, memory;  // percent
    };
    struct Memory {
        unsigned long long total, free, used;
    };

    explicit Library(void* opened) : handle(opened) {
        find("nvmlInit_v2", init);
        find("nvmlShutdown", shutdown);
        find("nvmlDeviceGetCount_v2", count);
        find("nvmlDeviceGetHandleByIndex_v2", device_at);
        find("nvmlDeviceGetUtilizationRates", utilization);
        find("nvmlDeviceGetMemoryInfo", memory);
    }
    ~Library() {
        if (is_up) shutdown();
        ::dlclose(handle);
    }

    template <typename Function>
    void find(const char* name, Function*& function) {
        function = reinterpret_cast<Function*>(::dlsym(handle, name));
        is_whole = is_whole && function;
    }
    bool start() { return is_up = is_whole && init() == 0; }

    void* handle;
    bool is_whole = true;
    bool is_up = false;
    int (*init)();
    int (*shutdown)();
    int (*count)(unsigned*);
    int (*device_at)(unsigned, void**);
    int (*utilization)(void*, Utilization*);
    int (*memory)(void*, Memory*);
    std::vector<void*> devices;
};

Gpus::Gpus() {
    void* opened = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!opened) return;
    library_ = std::make_unique<Library>(opened);
    unsigned count = 0;
    if (!library_->start() || library_->count(&count) != 0) return;
    for (unsigned index = 0; index < count; ++index) {
        void* device = nullptr;
        if (library_->device_at(index, &device) != 0) continue;
        library_->devices.push_back(device);
        series_.emplace_back(Kind::gpu, index, 3);
    }
}

Gpus::~Gpus() = default;

void Gpus::sample() {
    for (std::size_t at = 0; at < series_.size(); ++at) {
        Library::Utilization used{};
        Library::Memory memory{};
        if (library_->utilization(library_->devices[at], &used) != 0) continue;
        if (library_->memory(library_->devices[at], &memory) != 0) continue;
        series_[at].add({monotonic_ns(), used.gpu, static_cast<std::int64_t>(memory.used)});
    }
}

void Gpus::move_into(SampleFile& file) {
    for (Series& each : series_) each.move_into(file);
}

}  // namespace fullwire
