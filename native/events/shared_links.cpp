#include "events/shared_links.hpp"

#include <algorithm>
#include <cmath>

namespace fullwire {
namespace {

// Shares closer than this are one share computed in two ways: far more than rounding leaves
// behind, far less than anyone could measure.
constexpr double kSameShare = 1e-12;

bool is_different(double one, double other) {
    return std::abs(one - other) > kSameShare * one;
}

}  // namespace

SharedLinks::SharedLinks(std::span<const double> bytes_per_s,
                         std::span<const std::int64_t> crossings_begin,
                         std::span<const std::int32_t> link, std::span<const std::int32_t> weight)
    : links_(bytes_per_s.size()), connections_(crossings_begin.size() - 1) {
    for (std::size_t number = 0; number < links_.size(); ++number) {
        links_[number].bytes_per_s = bytes_per_s[number];
    }
    crossings_.reserve(link.size());
    for (std::uint32_t id = 0; id < connections_.size(); ++id) {
        connections_[id].first = static_cast<std::uint32_t>(crossings_begin[id]);
        connections_[id].end = static_cast<std::uint32_t>(crossings_begin[id + 1]);
        for (std::uint32_t each = connections_[id].first; each < connections_[id].end; ++each) {
            crossings_.push_back({.link = static_cast<std::uint32_t>(link[each]),
                                  .connection = id,
                                  .weight = static_cast<double>(weight[each])});
            connections_[id].alone =
                std::min(connections_[id].alone, bytes_per_s[link[each]] / weight[each]);
        }
    }
}

template <typename Visit>
void SharedLinks::each_crossing(std::uint32_t connection, Visit visit) const {
    const Connection& of = connections_[connection];
    for (std::uint32_t each = of.first; each < of.end; ++each) visit(crossings_[each]);
}

template <typename Visit>
void SharedLinks::each_busy(std::uint32_t link, Visit visit) const {
    std::uint32_t each = links_[link].first;
    for (std::uint32_t left = links_[link].busy; left > 0; --left) {
        visit(crossings_[each]);
        each = crossings_[each].after;
    }
}

void SharedLinks::join(std::uint32_t id) {
    Connection& connection = connections_[id];
    connection.rate = 0;
    connection.is_new = true;
    joined_.push_back(id);
    for (std::uint32_t each = connection.first; each < connection.end; ++each) {
        Link& link = links_[crossings_[each].link];
        crossings_[each].before = kNone;
        crossings_[each].after = link.first;
        if (link.busy++ > 0) {
            crossings_[link.first].before = each;
            changed_.push_back(crossings_[each].link);
        } else {
            link.level = kUnlimited;
        }
        link.first = each;
    }
}

void SharedLinks::leave(std::uint32_t id) {
    Connection& connection = connections_[id];
    connection.is_new = false;
    for (std::uint32_t each = connection.first; each < connection.end; ++each) {
        const auto [number, owner, weight, before, after] = crossings_[each];
        Link& link = links_[number];
        (before == kNone ? link.first : crossings_[before].after) = after;
        if (after != kNone) crossings_[after].before = before;
        if (--link.busy > 0) changed_.push_back(number);
    }
}

const std::vector<std::uint32_t>& SharedLinks::settle() {
    different_.clear();
    if (!changed_.empty()) share();
    for (const std::uint32_t id : joined_) {
        Connection& connection = connections_[id];
        if (!connection.is_new) continue;  // it met others, or has left within the same instant
        connection.is_new = false;
        connection.rate = connection.alone;
        different_.push_back(id);
    }
    joined_.clear();
    return different_;
}

void SharedLinks::share() {
    ++region_;
    inside_.clear();
    for (const std::uint32_t link : changed_) include(link);
    changed_.clear();
    for (std::size_t filled = 0; filled < inside_.size();) {
        filled = inside_.size();
        fill();
        widen();
    }
    for (const std::uint32_t id : settled_) {
        Connection& connection = connections_[id];
        connection.is_new = false;
        if (!is_different(connection.share, connection.rate)) continue;
        connection.rate = connection.share;
        different_.push_back(id);
    }
}

void SharedLinks::include(std::uint32_t number) {
    if (is_inside(number)) return;
    links_[number].region = region_;
    inside_.push_back(number);
}

// Progressive filling of the region: of all that links can offer per connection the least is taken
// up first, again and again. Links around the region keep their levels.
void SharedLinks::fill() {
    ++filling_;
    settled_.clear();
    for (const std::uint32_t number : inside_) offer_afresh(number);
    while (!offers_.empty()) {
        const Offer least = offers_.top();
        offers_.pop();
        if (least.only == kNone) {
            take_up(least);
        } else if (!is_settled(least.only)) {
            settle_on(least.only, least.share);
        }
    }
}

void SharedLinks::offer_afresh(std::uint32_t number) {
    Link& link = links_[number];
    link.level = kUnlimited;
    if (link.busy == 0) return;
    link.free_rate = link.bytes_per_s;
    link.unsettled = 0;
    each_busy(number, [&](const Crossing& each) { link.unsettled += each.weight; });
    const double offer = link.offer();
    offers_.push({offer, number, kNone});
    each_busy(number, [&](const Crossing& each) {
        if (connections_[each.connection].bounded == filling_) return;
        connections_[each.connection].bounded = filling_;
        const double bound = bound_outside(each.connection);
        if (bound < kUnlimited) offers_.push({bound, number, each.connection});
    });
}

// What the links around the region leave to a connection at most.
double SharedLinks::bound_outside(std::uint32_t connection) const {
    double bound = kUnlimited;
    each_crossing(connection, [&](const Crossing& each) {
        const Link& link = links_[each.link];
        if (!is_inside(each.link)) {
            bound = std::min({bound, link.level, link.bytes_per_s / each.weight});
        }
    });
    return bound;
}

void SharedLinks::take_up(const Offer& least) {
    Link& link = links_[least.link];
    if (link.unsettled == 0) return;
    if (least.share != link.offer()) {  // others on it have settled since
        offers_.push({link.offer(), least.link, kNone});
        return;
    }
    link.level = least.share;
    each_busy(least.link, [&](const Crossing& each) {
        if (!is_settled(each.connection)) settle_on(each.connection, least.share);
    });
}

void SharedLinks::settle_on(std::uint32_t id, double share) {
    connections_[id].filling = filling_;
    connections_[id].share = share;
    settled_.push_back(id);
    each_crossing(id, [&](const Crossing& each) {
        Link& link = links_[each.link];
        link.free_rate = std::max(0.0, link.free_rate - each.weight * share);
        link.unsettled -= each.weight;
    });
}

// Takes in the links that feel the difference.
void SharedLinks::widen() {
    for (const std::uint32_t id : settled_) {
        if (!is_different(connections_[id].share, connections_[id].rate)) continue;
        each_crossing(id, [&](const Crossing& each) {
            if (is_inside(each.link) || links_[each.link].busy < 2) return;
            const bool limits = links_[each.link].level < kUnlimited;
            if (limits || is_overfull(each.link)) include(each.link);
        });
    }
}

bool SharedLinks::is_overfull(std::uint32_t number) const {
    double load = 0;
    each_busy(number, [&](const Crossing& each) {
        const Connection& connection = connections_[each.connection];
        load += each.weight * (is_settled(each.connection) ? connection.share : connection.rate);
    });
    return load > links_[number].bytes_per_s * (1 + kSameShare);
}

}  // namespace fullwire
