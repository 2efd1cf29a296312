// Many short queues, first come first served, whose entries live in one store: to wait costs an entry
// and no allocation.

#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace fullwire {

struct Queue {
    static constexpr std::uint32_t kEnd = std::numeric_limits<std::uint32_t>::max();

    bool is_empty() const { return first == kEnd; }

    std::uint32_t first = kEnd;
    std::uint32_t last = kEnd;
};

template <typename Item>
class QueueStore {
  public:
    void push(Queue& queue, const Item& item) {
        const std::uint32_t place = free_place();
        entries_[place] = {item, Queue::kEnd};
        (queue.is_empty() ? queue.first : entries_[queue.last].next) = place;
        queue.last = place;
    }

    Item pop(Queue& queue) {
        Entry& entry = entries_[queue.first];
        const std::uint32_t place = std::exchange(queue.first, entry.next);
        entry.next = std::exchange(free_, place);
        return entry.item;
    }

  private:
    struct Entry {
        Item item;
        std::uint32_t next;
    };

    std::uint32_t free_place() {
        if (free_ != Queue::kEnd) return std::exchange(free_, entries_[free_].next);
        entries_.emplace_back();
        return static_cast<std::uint32_t>(entries_.size() - 1);
    }

    std::vector<Entry> entries_;
    std::uint32_t free_ = Queue::kEnd;
};

}  // namespace fullwire
