#include "events/folding.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

namespace fullwire {
namespace {

// ---------------------------------------------------------------------------------------------
// Refinement as Hopcroft, and Paige and Tarjan, do it. Seats, connections and links are the nodes of
// one graph. A class that has split off is looked at from its neighbours: those of one class that meet
// it unequally often are parted, and of the parts all but the largest are looked at in turn. So a node
// is looked at only when its class has become at most half as large.

// What a meeting counts: two kinds of meetings fit side by side into one number.
constexpr std::uint64_t kOneKind = 1, kOtherKind = std::uint64_t{1} << 32;

class Refinement {
  public:
    Refinement(std::uint32_t seats, const Meeting& meeting,
               std::span<const std::int32_t> connections, std::span<const std::int32_t> links)
        : first_connection_(seats),
          first_link_(seats + static_cast<std::uint32_t>(connections.size())),
          nodes_(first_link_ + static_cast<std::uint32_t>(links.size())),
          class_of_(nodes_), position_(nodes_), meetings_(nodes_, 0) {
        connect(meeting);
        if (seats > 0) begin(0, std::vector<std::int32_t>(seats, 0));
        begin(first_connection_, connections);
        begin(first_link_, links);
        while (!pending_.empty()) {
            const std::uint32_t splitter = pending_.back();
            pending_.pop_back();
            split_by(splitter);
        }
    }

    Classes classes() const {
        return {numbered(0, first_connection_), numbered(first_connection_, first_link_),
                numbered(first_link_, nodes_)};
    }

  private:
    // Calls `visit` with both nodes of every meeting, and with its kind.
    template <typename Visit>
    void each_meeting(const Meeting& meeting, Visit visit) const {
        for (std::uint32_t id = 0; id < meeting.source.size(); ++id) {
            const std::uint32_t connection = first_connection_ + id;
            visit(connection, static_cast<std::uint32_t>(meeting.source[id]), false);
            visit(connection, static_cast<std::uint32_t>(meeting.target[id]), true);
            for (auto each = meeting.crossings_begin[id]; each < meeting.crossings_begin[id + 1];
                 ++each) {
                visit(connection, first_link_ + static_cast<std::uint32_t>(meeting.link[each]),
                      false);
            }
        }
    }

    void connect(const Meeting& meeting) {
        neighbours_begin_.assign(std::size_t{nodes_} + 1, 0);
        each_meeting(meeting, [&](std::uint32_t one, std::uint32_t other, bool) {
            ++neighbours_begin_[one + 1];
            ++neighbours_begin_[other + 1];
        });
        for (std::uint32_t node = 0; node < nodes_; ++node) {
            neighbours_begin_[node + 1] += neighbours_begin_[node];
        }
        neighbours_.resize(neighbours_begin_.back());
        is_other_kind_.resize(neighbours_begin_.back());
        std::vector<std::uint64_t> next(neighbours_begin_.begin(), neighbours_begin_.end() - 1);
        each_meeting(meeting, [&](std::uint32_t one, std::uint32_t other, bool is_other_kind) {
            for (const auto& [from, to] : {std::pair{one, other}, std::pair{other, one}}) {
                is_other_kind_[next[from]] = is_other_kind;
                neighbours_[next[from]++] = to;
            }
        });
    }

    // Makes a class of all nodes of one number, from `first` on.
    template <typename Numbers>
    void begin(std::uint32_t first, const Numbers& numbers) {
        std::unordered_map<std::int32_t, std::uint32_t> known;
        for (std::uint32_t each = 0; each < numbers.size(); ++each) {
            const auto [found, is_new] =
                known.try_emplace(numbers[each], static_cast<std::uint32_t>(members_.size()));
            if (is_new) open();
            add(first + each, found->second);
        }
    }

    std::uint32_t open() {
        members_.emplace_back();
        pending_.push_back(static_cast<std::uint32_t>(members_.size() - 1));
        return pending_.back();
    }

    void add(std::uint32_t node, std::uint32_t number) {
        class_of_[node] = number;
        position_[node] = static_cast<std::uint32_t>(members_[number].size());
        members_[number].push_back(node);
    }

    void move(std::uint32_t node, std::uint32_t number) {
        std::vector<std::uint32_t>& left = members_[class_of_[node]];
        position_[left.back()] = position_[node];
        left[position_[node]] = left.back();
        left.pop_back();
        add(node, number);
    }

    void split_by(std::uint32_t splitter) {
        touched_.clear();
        for (const std::uint32_t node : members_[splitter]) {
            for (auto each = neighbours_begin_[node]; each < neighbours_begin_[node + 1]; ++each) {
                const std::uint32_t neighbour = neighbours_[each];
                if (meetings_[neighbour] == 0) touched_.push_back(neighbour);
                meetings_[neighbour] += is_other_kind_[each] ? kOtherKind : kOneKind;
            }
        }
        std::sort(touched_.begin(), touched_.end(), [&](std::uint32_t one, std::uint32_t other) {
            return std::tuple(class_of_[one], meetings_[one], one) <
                   std::tuple(class_of_[other], meetings_[other], other);
        });
        for (std::size_t from = 0; from < touched_.size();) from = part(from);
        for (const std::uint32_t node : touched_) meetings_[node] = 0;
    }

    // Parts one class, whose touched nodes begin at `from`; returns where the next class begins. The
    // largest part, which may be those that were not touched, keeps the class.
    std::size_t part(std::size_t from) {
        const std::uint32_t number = class_of_[touched_[from]];
        groups_.clear();
        std::size_t to = from;
        for (; to < touched_.size() && class_of_[touched_[to]] == number; ++to) {
            const bool goes_on =
                to > from && meetings_[touched_[to]] == meetings_[touched_[to - 1]];
            if (!goes_on) groups_.push_back(to);
        }
        groups_.push_back(to);
        const std::size_t untouched = members_[number].size() - (to - from);
        std::size_t largest = 0;
        for (std::size_t each = 1; each + 1 < groups_.size(); ++each) {
            if (size_of_group(each) > size_of_group(largest)) largest = each;
        }
        const bool untouched_stay = untouched >= size_of_group(largest);
        if (!untouched_stay && untouched > 0) part_untouched(number);
        for (std::size_t each = 0; each + 1 < groups_.size(); ++each) {
            if (each == largest && !untouched_stay) continue;
            const std::uint32_t opened = open();
            for (std::size_t at = groups_[each]; at < groups_[each + 1]; ++at) {
                move(touched_[at], opened);
            }
        }
        return to;
    }

    std::size_t size_of_group(std::size_t each) const { return groups_[each + 1] - groups_[each]; }

    void part_untouched(std::uint32_t number) {
        std::vector<std::uint32_t> rest;
        for (const std::uint32_t node : members_[number]) {
            if (meetings_[node] == 0) rest.push_back(node);
        }
        const std::uint32_t opened = open();
        for (const std::uint32_t node : rest) move(node, opened);
    }

    std::vector<std::int32_t> numbered(std::uint32_t first, std::uint32_t end) const {
        std::vector<std::int32_t> number_of(members_.size(), -1);
        std::vector<std::int32_t> numbers;
        std::int32_t next = 0;
        for (std::uint32_t node = first; node < end; ++node) {
            std::int32_t& number = number_of[class_of_[node]];
            if (number < 0) number = next++;
            numbers.push_back(number);
        }
        return numbers;
    }

    std::uint32_t first_connection_, first_link_, nodes_;
    std::vector<std::uint64_t> neighbours_begin_;
    std::vector<std::uint32_t> neighbours_;
    std::vector<std::uint8_t> is_other_kind_;
    std::vector<std::uint32_t> class_of_, position_;
    std::vector<std::uint64_t> meetings_;  // with the class that is looked at
    std::vector<std::vector<std::uint32_t>> members_;
    std::vector<std::uint32_t> pending_;
    std::vector<std::uint32_t> touched_;
    std::vector<std::size_t> groups_;  // where each begins among the touched; one more
};

void check(std::uint32_t seats, const Meeting& meeting, std::size_t connections,
           std::size_t links) {
    const auto refuse_unless = [](bool holds, const char* expected) {
        if (!holds) throw std::invalid_argument(expected);
    };
    refuse_unless(meeting.source.size() == connections && meeting.target.size() == connections &&
                      meeting.crossings_begin.size() == connections + 1,
                  "columns of connections differ in length");
    refuse_unless(double(seats) + double(connections) + double(links) <
                      std::numeric_limits<std::uint32_t>::max(),
                  "expected fewer than four thousand million seats, connections and links");
    std::int64_t begin = 0;
    for (std::size_t id = 0; id < connections; ++id) {
        for (const std::int32_t seat : {meeting.source[id], meeting.target[id]}) {
            refuse_unless(seat >= 0 && static_cast<std::uint32_t>(seat) < seats,
                          "a connection names a seat that cannot be");
        }
        refuse_unless(meeting.crossings_begin[id] == begin &&
                          meeting.crossings_begin[id + 1] >= begin,
                      "links of connections: expected them one after another");
        begin = meeting.crossings_begin[id + 1];
    }
    refuse_unless(static_cast<std::size_t>(begin) == meeting.link.size(),
                  "links of connections: expected them one after another");
    for (const std::int32_t link : meeting.link) {
        refuse_unless(link >= 0 && static_cast<std::size_t>(link) < links,
                      "a connection crosses a link that cannot be");
    }
}

}  // namespace

Classes folded(std::uint32_t seats, const Meeting& meeting,
               std::span<const std::int32_t> connections, std::span<const std::int32_t> links) {
    check(seats, meeting, connections.size(), links.size());
    return Refinement(seats, meeting, connections, links).classes();
}

}  // namespace fullwire
