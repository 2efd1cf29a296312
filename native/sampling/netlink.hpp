// Asking the kernel questions over netlink, several at once.

#pragma once

#include <linux/netlink.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace fullwire {

class Netlink {
  public:
    explicit Netlink(int protocol);
    ~Netlink();
    Netlink(const Netlink&) = delete;
    Netlink& operator=(const Netlink&) = delete;

    // Add a question to the next asking; its answer is told by the number.
    template <typename Body>
    void put(std::uint16_t type, std::uint16_t flags, std::uint32_t number, const Body& body) {
        nlmsghdr header{};
        header.nlmsg_len = NLMSG_LENGTH(sizeof(Body));
        header.nlmsg_type = type;
        header.nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
        header.nlmsg_seq = number;
        append(header, {reinterpret_cast<const char*>(&body), sizeof(Body)});
    }

    // Ask what was put, and hand every answer over. A question that the kernel refuses is handed
    // over with the type NLMSG_ERROR. Returns false where answers were lost.
    template <typename Take>
    bool ask(Take take) {
        if (!send()) return false;
        while (awaited_ > 0) {
            const std::string_view received = receive();
            if (received.empty()) return false;
            auto left = static_cast<unsigned>(received.size());
            for (auto* each = reinterpret_cast<const nlmsghdr*>(received.data());
                 NLMSG_OK(each, left); each = NLMSG_NEXT(each, left)) {
                const bool is_part = each->nlmsg_flags & NLM_F_MULTI;
                if (!is_part || each->nlmsg_type == NLMSG_DONE) --awaited_;
                if (each->nlmsg_type != NLMSG_DONE) take(*each);
            }
        }
        return true;
    }

  private:
    void append(const nlmsghdr& header, std::string_view body);
    bool send();
    std::string_view receive();

    int socket_;
    int awaited_ = 0;
    std::string questions_;
    std::vector<char> answer_;
};

// Go through the attributes that follow a message's body.
template <typename Body, typename Take>
void each_attribute(const nlmsghdr& message, Take take) {
    const auto* at = static_cast<const char*>(NLMSG_DATA(&message)) + NLMSG_ALIGN(sizeof(Body));
    const auto* end = reinterpret_cast<const char*>(&message) + message.nlmsg_len;
    while (end - at >= NLA_HDRLEN) {
        const auto* attribute = reinterpret_cast<const nlattr*>(at);
        if (attribute->nla_len < NLA_HDRLEN || attribute->nla_len > end - at) return;
        take(attribute->nla_type & NLA_TYPE_MASK,
             std::string_view(at + NLA_HDRLEN, attribute->nla_len - NLA_HDRLEN));
        at += NLA_ALIGN(attribute->nla_len);
    }
}

}  // namespace fullwire
