// What is to happen, by time. Connections that do the same do it at the same times, so the events of
// one time wait together as a batch, in the order in which they were added, and only batches are kept
// in a heap. The batch of a time is found in a small table; where two times claim one place in it, the
// older batch can no longer be found and gets a successor, which is taken after it. So the order of
// events depends on nothing but the input.
//
// Where a host is slow, most events are alone at their time. So the heap is quick too: it has four
// branches of 16 bytes each at a fork, which is one line of the cache.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
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
        while (!due_.empty() && batches_[due_.front().batch].live == 0) close();
        return due_.empty() ? kNever : due_.front().time_s;
    }

    // Hands every event of the next batch to `visit`, and forgets it.
    template <typename Visit>
    void take(Visit visit) {
        taken_.swap(batches_[due_.front().batch].events);
        close();
        for (const Event& event : taken_) visit(event);
        taken_.clear();
    }

  private:
    static constexpr double kClosed = -1;
    static constexpr int kPlaceBits = 10;
    static constexpr std::size_t kBranches = 4;

    struct Batch {
        double time_s = kClosed;
        std::uint32_t live = 0;
        std::vector<Event> events;
    };

    struct Due {
        double time_s;
        std::uint32_t order;  // of opening; it may wrap, since the batches of one time are few
        std::uint32_t batch;
        // Without a branch, as nobody could guess which way it goes.
        bool is_before(const Due& other) const {
            const bool is_earlier = static_cast<std::int32_t>(order - other.order) < 0;
            return (time_s < other.time_s) | ((time_s == other.time_s) & is_earlier);
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
        due_.emplace_back();
        rise(due_.size() - 1, {time_s, opened_++, batch});
        return batch;
    }

    void rise(std::size_t place, const Due& due) {
        for (std::size_t above; place > 0; place = above) {
            above = (place - 1) / kBranches;
            if (!due.is_before(due_[above])) break;
            due_[place] = due_[above];
        }
        due_[place] = due;
    }

    // Removes the first. The last, which mostly belongs near the end, goes down a whole way and up.
    void sink() {
        const Due last = due_.back();
        due_.pop_back();
        const std::size_t size = due_.size();
        if (size == 0) return;
        std::size_t place = 0;
        for (std::size_t below; (below = kBranches * place + 1) < size;) {
            std::size_t next = below;
            if (below + kBranches <= size) {
                const std::size_t left = below + due_[below + 1].is_before(due_[below]);
                const std::size_t right = below + 2 + due_[below + 3].is_before(due_[below + 2]);
                next = due_[right].is_before(due_[left]) ? right : left;
            } else {
                while (++below < size) next = due_[below].is_before(due_[next]) ? below : next;
            }
            due_[place] = due_[next];
            place = next;
        }
        rise(place, last);
    }

    void close() {
        Batch& batch = batches_[due_.front().batch];
        batch.time_s = kClosed;
        batch.live = 0;
        batch.events.clear();
        free_.push_back(due_.front().batch);
        sink();
    }

    std::vector<Batch> batches_ = std::vector<Batch>(1);  // batch 0 stays closed
    std::vector<std::uint32_t> free_;
    std::array<std::uint32_t, 1 << kPlaceBits> table_{};
    std::uint32_t latest_ = 0;  // the batch last added to
    std::vector<Due> due_;  // a heap
    std::uint32_t opened_ = 0;
    std::vector<Event> taken_;  // whose storage serves another batch
};

}  // namespace fullwire
