#include "sampling/netlink.hpp"

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace fullwire {

namespace {

constexpr std::size_t kAnswerBytes = 1 << 16;
constexpr timeval kLongestWait{1, 0};  // the kernel answers at once; a lost answer must not hang us

}  // namespace

Netlink::Netlink(int protocol)
    : socket_(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol)), answer_(kAnswerBytes) {
    if (socket_ < 0) throw std::system_error(errno, std::generic_category(), "netlink");
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &kLongestWait, sizeof kLongestWait);
}

Netlink::~Netlink() { ::close(socket_); }

void Netlink::append(const nlmsghdr& header, std::string_view body) {
    questions_.append(reinterpret_cast<const char*>(&header), NLMSG_HDRLEN);
    questions_ += body;
    questions_.resize(NLMSG_ALIGN(questions_.size()), '\0');
    ++awaited_;
}

bool Netlink::send() {
    const std::string questions = std::move(questions_);
    questions_.clear();
    if (questions.empty()) return true;
    if (::send(socket_, questions.data(), questions.size(), 0) >= 0) return true;
    awaited_ = 0;
    return false;
}

std::string_view Netlink::receive() {
    ssize_t bytes;
    do {
        bytes = ::recv(socket_, answer_.data(), answer_.size(), 0);
    } while (bytes < 0 && errno == EINTR);
    if (bytes > 0) return {answer_.data(), static_cast<std::size_t>(bytes)};
    awaited_ = 0;
    return {};
}

}  // namespace fullwire
