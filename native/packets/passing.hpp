// When bytes pass the place of a capture: round trips from acknowledgements, and moments by which
// the clocks of two captures of one connection can be compared.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace fullwire {

// Round trips of one direction's segments, one at a time, as TCP itself times them. What was sent
// again is not timed (Karn): nobody can say which of both was acknowledged.
class RoundTrips {
  public:
    void sent(std::uint32_t end, std::int64_t time_ns) {
        if (is_timing_) return;
        is_timing_ = true;
        end_ = end;
        sent_ns_ = time_ns;
    }
    void sent_again() { is_timing_ = false; }
    void acknowledged(std::uint32_t upto, std::int64_t time_ns) {
        if (!is_timing_ || static_cast<std::int32_t>(upto - end_) < 0) return;
        is_timing_ = false;
        if (time_ns < sent_ns_) return;  // packets out of their order in the capture
        add(time_ns - sent_ns_);
    }
    std::int64_t samples() const { return samples_; }
    std::int64_t least_ns() const { return samples_ ? least_ns_ : 0; }

    // The round trip that a share of the samples does not exceed, as exactly as an eighth of it.
    std::int64_t quantile_ns(double share) const {
        const auto wanted = static_cast<std::int64_t>(share * static_cast<double>(samples_));
        std::int64_t reached = 0;
        for (std::size_t cell = 0; cell < counts_.size(); ++cell) {
            reached += counts_[cell];
            if (reached > wanted) return std::max(middle_ns(cell), least_ns_);
        }
        return 0;
    }

  private:
    static constexpr int kFinest = 10;  // powers of two: 1 us
    static constexpr std::size_t kCells = 26 * 4;

    // Four cells for each power of two.
    static std::size_t cell_of(std::int64_t ns) {
        const auto from = static_cast<std::uint64_t>(std::max<std::int64_t>(ns, 1 << kFinest));
        const int power = std::bit_width(from) - 1;
        const std::uint64_t quarter = from >> (power - 2) & 3;
        return std::min<std::size_t>((power - kFinest) * 4u + quarter, kCells - 1);
    }
    static std::int64_t middle_ns(std::size_t cell) {
        const std::int64_t power = std::int64_t{1} << (cell / 4 + kFinest);
        return power + power / 8 * static_cast<std::int64_t>(2 * (cell % 4) + 1);
    }
    void add(std::int64_t ns) {
        if (counts_.empty()) counts_.resize(kCells);
        ++counts_[cell_of(ns)];
        least_ns_ = samples_++ ? std::min(least_ns_, ns) : ns;
    }

    std::vector<std::uint32_t> counts_;
    std::int64_t samples_ = 0;
    std::int64_t least_ns_ = 0;
    std::int64_t sent_ns_ = 0;
    std::uint32_t end_ = 0;
    bool is_timing_ = false;
};

// When a flow first passed certain sequence numbers, the same ones wherever it is captured.
struct Passage {
    std::int64_t time_ns = 0;
    std::uint32_t flow = 0;
    std::uint32_t sequence = 0;
    bool is_acknowledgement = false;
};

class Passages {
  public:
    void passed(std::uint32_t flow, std::uint32_t from, std::uint32_t to, bool is_acknowledgement,
                std::int64_t time_ns) {
        if ((from ^ to) >> shift_ == 0) return;
        if (passages_.size() == kMost) thin();
        passages_.push_back({time_ns, flow, to >> shift_ << shift_, is_acknowledgement});
    }
    const std::vector<Passage>& all() const { return passages_; }

  private:
    static constexpr std::size_t kMost = 1 << 16;

    void thin() {
        while (passages_.size() > kMost / 2 && shift_ < 31) {
            ++shift_;
            const std::uint32_t below = (std::uint32_t{1} << shift_) - 1;
            std::erase_if(passages_, [=](const Passage& each) { return each.sequence & below; });
        }
        // What is left of one sequence number of each of many flows: no clock needs more.
        if (passages_.size() > kMost / 2) passages_.resize(kMost / 2);
    }

    std::vector<Passage> passages_;
    int shift_ = 14;
};

}  // namespace fullwire
