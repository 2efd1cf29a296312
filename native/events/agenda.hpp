// What is to happen, by time. Connections that do the same do it at the same times, so the events of
// one time wait together as a batch, in the order in which they were added, and only batches are kept
// in a heap. The batch of a time is found in a small table; where two times claim one place in it, the
// older batch can no longer be found and gets a successor, which is taken after it. So the order of
// events depends on nothing but the input.

#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <vector>

namespace fullwire {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

template <typename Event>
class Agenda {
  public:
    // Returns the batch, which is what `cancel` asks for.
    std::uint32_t add(double time_s, const Event& event) {
        if (time_s != batches_[latest_].time_s) latest_ = batch_at(time_s);
        Batch& batch = batches_[latest_];
        batch.events.push_back(event);
        ++batch.live;
        return latest_;
    }

    // Says that an event of a batch will not happen. It stays in the batch: the caller knows it.
    void cancel(std::uint32_t batch) { --batches_[batch].live; }

    // When something happens next; never, if nothing does.
    double next_time_s() {
        while (!due_.empty() && batches_[due_.top().batch].live == 0) close();
        return due_.empty() ? kNever : due_.top().time_s;
    }

    // Hands every event of the next batch to `visit`, and forgets it.
    template <typename Visit>
    void take(Visit visit) {
        taken_.swap(batches_[due_.top().batch].events);
        close();
        for (const Event& event : taken_) visit(event);
        taken_.clear();
    }

  private:
    static constexpr double kClosed = -1;
    static constexpr int kPlaceBits = 10;

    struct Batch {
        double time_s = kClosed;
        std::uint32_t live = 0;
        std::vector<Event> events;
    };

    struct Due {
        double time_s;
        std::uint64_t order;
        std::uint32_t batch;
        bool operator>(const Due& other) const {
            return time_s != other.time_s ? time_s > other.time_s : order > other.order;
        }
    };

    std::uint32_t batch_at(double time_s) {
        // Multiplicative hashing: the upper bits of the product depend on every bit of the time.
        const std::uint64_t product = std::bit_cast<std::uint64_t>(time_s) * 0x9e3779b97f4a7c15;
        std::uint32_t& known = table_[product >> (64 - kPlaceBits)];
        if (batches_[known].time_s != time_s) known = open(time_s);
        return known;
    }

    std::uint32_t open(double time_s) {
        if (free_.empty()) {
            free_.push_back(static_cast<std::uint32_t>(batches_.size()));
            batches_.emplace_back();
        }
        const std::uint32_t batch = free_.back();
        free_.pop_back();
        batches_[batch].time_s = time_s;
        due_.push({time_s, opened_++, batch});
        return batch;
    }

    void close() {
        Batch& batch = batches_[due_.top().batch];
        batch.time_s = kClosed;
        batch.live = 0;
        batch.events.clear();
        free_.push_back(due_.top().batch);
        due_.pop();
    }

    std::vector<Batch> batches_ = std::vector<Batch>(1);  // batch 0 stays closed
    std::vector<std::uint32_t> free_;
    std::array<std::uint32_t, 1 << kPlaceBits> table_{};
    std::uint32_t latest_ = 0;  // the batch last added to
    std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
    std::uint64_t opened_ = 0;
    std::vector<Event> taken_;  // whose storage serves another batch
};

}  // namespace fullwire
