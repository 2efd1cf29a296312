// Engines of one group in one process, driven by many threads at once: built with a sanitizer, which
// says what is wrong. Ends with status 1 where a sum is.

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "transport/checksum.hpp"
#include "transport/transport.hpp"

using namespace fullwire;

namespace {

constexpr int kRanks = 3;

std::shared_ptr<const Program> ring(int rank) {
    auto program = std::make_shared<Program>();
    program->blocks = kRanks;
    program->signals = false;
    const int next = (rank + 1) % kRanks, before = (rank + kRanks - 1) % kRanks;
    for (int round = 0; round < 2 * (kRanks - 1); ++round) {
        const bool reduces = round < kRanks - 1;
        const int lead = reduces ? rank - 1 - round : rank - (round - (kRanks - 1));
        const auto sent = static_cast<std::uint32_t>((lead + 2 * kRanks) % kRanks);
        const auto got = static_cast<std::uint32_t>((lead - 1 + 2 * kRanks) % kRanks);
        program->sends.push_back({next, sent, 1, round - 1, 0});
        program->receives.push_back(
            {before, got, 1, reduces, false, round == kRanks - 2, -1, 0});
    }
    return program;
}

TaskPointer sum_of(std::vector<float>& values, int rank) {
    auto task = std::make_shared<Task>();
    task->description = "a sum of " + std::to_string(values.size());
    task->program = ring(rank);
    task->source = {{reinterpret_cast<std::uint64_t>(values.data()), 4 * values.size()}};
    task->work = task->source;
    task->reduction = Reduction::sum;
    task->number = Number::float32;
    task->timeout_s = 60;
    return task;
}

std::vector<std::vector<int>> connected() {
    std::vector<std::vector<int>> sockets(kRanks, std::vector<int>(kRanks, -1));
    for (int a = 0; a < kRanks; ++a) {
        for (int b = 0; b < a; ++b) {
            int ends[2];
            if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) std::abort();
            sockets[a][b] = ends[0];
            sockets[b][a] = ends[1];
        }
    }
    return sockets;
}

// Two connections between two ranks: the largest of the vectors goes over both.
std::vector<std::unique_ptr<Streams>> mesh() {
    std::vector<std::unique_ptr<Streams>> groups;
    const std::vector<std::string> names{"0", "1", "2"};
    const auto first = connected(), second = connected();
    for (int rank = 0; rank < kRanks; ++rank) {
        const Engine::Manner manner{rank, names, "race", 60.0, rank == 1 ? 20 : 0, rank == 2};
        groups.push_back(std::make_unique<Streams>(manner, first[rank]));
        groups.back()->add(second[rank]);
    }
    return groups;
}

// One thread issues, others wait for what it issued, another for any.
bool add_up(Streams& engine, int rank) {
    bool is_right = true;
    std::thread listener([&] { while (engine.wait_for_any()) {} });
    for (int turn = 0; turn < 30; ++turn) {
        std::vector<std::vector<float>> values;
        for (const std::size_t count : {1, 100, 200'000, 7, 30'001}) {
            values.emplace_back(count, static_cast<float>(rank + turn));
        }
        std::vector<TaskPointer> tasks;
        std::vector<std::thread> waiters;
        for (auto& each : values) {
            tasks.push_back(sum_of(each, rank));
            engine.issue(tasks.back(), static_cast<Engine::Caller>(turn % 3));
            waiters.emplace_back([&engine, task = tasks.back()] { engine.wait(task, -1); });
        }
        for (std::thread& waiter : waiters) waiter.join();
        const float expected = static_cast<float>(3 * turn + 3);
        for (const TaskPointer& task : tasks) is_right &= !task->has_failed();
        for (const auto& each : values) {
            for (const float value : each) is_right &= value == expected;
        }
    }
    std::vector<float> never(200'000, 1);
    const TaskPointer late = sum_of(never, rank);
    if (rank == 0) {
        engine.issue(late, Engine::Caller::goes_on);
        std::thread waiter([&] { engine.wait(late, -1); });
        ::usleep(20'000);
        engine.abort("enough");
        waiter.join();
        // Where processors are scarce it may have been added up, or the others have left, before that.
        is_right &= !late->has_failed() || late->problem == "enough" ||
                    late->problem.find(" has left the group") != std::string::npos;
    } else {
        ::usleep(10'000);
        engine.issue(late, Engine::Caller::waits);
        if (rank == 1) engine.wait(late, 0.001);
        ::usleep(30'000);
        engine.close();
        engine.wait(late, -1);
        is_right &= late->is_done();
    }
    listener.join();
    return is_right;
}

// What RFC 3720 expects, with and without the processor's instruction, in one piece and in two.
bool checksums_are_right() {
    const char* digits = "123456789";
    return crc32c(digits, 9) == 0xe3069283 && crc32c_by_table(digits, 9) == 0xe3069283 &&
           crc32c(digits + 3, 6, crc32c_by_table(digits, 3)) == 0xe3069283;
}

}  // namespace

int main() {
    if (!checksums_are_right()) {
        std::puts("a checksum is wrong");
        return 1;
    }
    auto engines = mesh();
    std::vector<std::thread> ranks;
    std::atomic<bool> is_right{true};
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
            if (!add_up(*engines[static_cast<std::size_t>(rank)], rank)) is_right = false;
        });
    }
    for (std::thread& rank : ranks) rank.join();
    engines.clear();
    if (!is_right) std::puts("a sum is wrong");
    return is_right ? 0 : 1;
}
