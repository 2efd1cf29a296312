// Which parts of a sequence space have been seen, so that each byte counts once.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fullwire {

// What became of the bytes, or packets, that one segment carried.
struct Share {
    std::uint64_t fresh = 0;      // never seen before
    std::uint64_t again = 0;      // seen before, or filling a hole long after it opened
    std::uint64_t reordered = 0;  // fresh, filling a hole soon after it opened
};

// A part of a stream that was not seen, and when it was first seen to be missing.
struct Hole {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::int64_t opened_ns = 0;
};

// A stream in order is one number; out of order it is that and the pieces ahead, up to a limit.
class Stream {
  public:
    bool has_begun() const { return begun_; }
    void begin(std::uint64_t next);
    std::uint64_t next() const { return next_; }
    std::uint64_t furthest() const { return ahead_.empty() ? next_ : ahead_.back().end; }
    Share add(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns) {
        if (begin == next_ && ahead_.empty()) {  // in order, as nearly everything is
            next_ = end;
            return {.fresh = end - begin};
        }
        return add_out_of_order(begin, end, time_ns);
    }
    // What is missing, the oldest first. Of too many holes the oldest is for whoever adds to give up.
    std::vector<Hole> holes() const;
    bool has_too_many_holes() const { return ahead_.size() > kMostPieces; }
    Hole give_up_oldest();

  private:
    static constexpr std::size_t kMostPieces = 64;

    struct Piece {
        std::uint64_t begin;
        std::uint64_t end;
        std::int64_t opened_ns;  // when the hole before it was first seen
    };

    Share add_out_of_order(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns);
    Share add_among(std::uint64_t begin, std::uint64_t end, std::int64_t time_ns, Share share);
    std::uint64_t next_ = 0;
    std::vector<Piece> ahead_;  // beyond a hole, in order, not touching
    bool begun_ = false;
};

}  // namespace fullwire
