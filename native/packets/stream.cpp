#include "packets/stream.hpp"

#include <algorithm>

namespace fullwire {
namespace {

// A hole that fills sooner was reordering: retransmission takes longer than a round trip. The same
// limit as Wireshark's, which is there for captures without round-trip times, too.
constexpr std::int64_t kReorderedWithin_ns = 3'000'000;

}  // namespace

void Stream::begin(std::uint64_t next) {
    next_ = next;
    ahead_.clear();
    begun_ = true;
}

Share Stream::add_out_of_order(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns) {
    if (!ahead_.empty() && begin == ahead_.back().end) {
        ahead_.back().end = end;
        return {.fresh = end - begin};
    }
    Share share;
    if (begin < next_) {
        share.again = std::min(end, next_) - begin;
        begin = next_;
    }
    return begin < end ? add_among(begin, end, time_ns, share) : share;
}

Share Stream::add_among(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns,
                        Share share) {
    // Pieces that touch or overlap [begin, end) become one with it.
    auto first = std::find_if(ahead_.begin(), ahead_.end(),
                              [&](const Piece& piece) { return piece.end >= begin; });
    Piece whole{begin, end, time_ns};
    std::uint64_t reached = begin;
    auto last = first;
    for (; last != ahead_.end() && last->begin <= end; ++last) {
        const std::uint64_t seen_from = std::max(last->begin, begin);
        const std::uint64_t seen_to = std::min(last->end, end);
        const std::uint64_t filled = seen_from > reached ? seen_from - reached : 0;
        const bool is_soon = time_ns - last->opened_ns <= kReorderedWithin_ns;
        share.fresh += filled;
        (is_soon ? share.reordered : share.again) += filled;
        if (seen_to > seen_from) share.again += seen_to - seen_from;
        reached = std::max(reached, seen_to);
        whole.begin = std::min(whole.begin, last->begin);
        whole.end = std::max(whole.end, last->end);
        whole.opened_ns = std::min(whole.opened_ns, last->opened_ns);
    }
    if (end > reached) {
        const std::uint64_t rest = end - reached;
        share.fresh += rest;
        if (last != ahead_.end()) {  // it lies in a hole, and fills part of it
            const bool is_soon = time_ns - last->opened_ns <= kReorderedWithin_ns;
            (is_soon ? share.reordered : share.again) += rest;
            whole.opened_ns = std::min(whole.opened_ns, last->opened_ns);
        }
    }
    first = ahead_.erase(first, last);
    if (whole.begin <= next_) {
        next_ = whole.end;
    } else {
        ahead_.insert(first, whole);
    }
    return share;
}

Hole Stream::give_up_oldest() {
    const Hole oldest{next_, ahead_.front().begin, ahead_.front().opened_ns};
    next_ = ahead_.front().end;
    ahead_.erase(ahead_.begin());
    return oldest;
}

std::vector<Hole> Stream::holes() const {
    std::vector<Hole> found;
    std::uint64_t reached = next_;
    for (const Piece& piece : ahead_) {
        found.push_back({reached, piece.begin, piece.opened_ns});
        reached = piece.end;
    }
    return found;
}

}  // namespace fullwire
