// Encrypted records: AES-256-GCM, one key a direction of a connection, by the libcrypto of OpenSSL 3.
//
// A record is the length of what follows (4 bytes), the ciphertext of one frame, and a tag of 16
// bytes. Its nonce is its number, which is never sent: a record that is damaged, replayed, left out
// or moved does not open. libcrypto is loaded when a group first encrypts, so that the package is
// built and runs without it.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace fullwire {

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kTagBytes = 16;
constexpr std::size_t kRecordHeadBytes = 4;
// 2^20 records of 256 KiB are 2^34 blocks under one key, as many as TLS 1.3 allows AES-GCM (RFC 8446,
// 5.5): a stranger who sees them all tells them from noise with a chance of 2^-60.
constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 20;

// What one end needs to write and to read a connection.
struct Keys {
    std::string sends, receives;
};

// One direction of a connection, at one of its ends.
class RecordCipher {
public:
    enum class Way : std::uint8_t { seals, opens };
    RecordCipher(const std::string& key, Way way, std::uint64_t records_per_key = kRecordsPerKey);
    ~RecordCipher();
    RecordCipher(const RecordCipher&) = delete;
    RecordCipher& operator=(const RecordCipher&) = delete;

    static constexpr std::size_t sealed_bytes(std::size_t bytes) {
        return kRecordHeadBytes + bytes + kTagBytes;
    }
    // Writes a record of two pieces, one after the other, and returns how long it is.
    std::size_t seal(char* record, const void* first, std::size_t first_bytes, const void* second,
                     std::size_t second_bytes);
    // Replaces a record's ciphertext with what it says; false if it is not the next one of its sender.
    bool open(char* record, std::size_t bytes);

private:
    void begin_record();
    void take_key();
    void change_key_if_due();

    const Way way_;
    const std::uint64_t records_per_key_;
    std::array<unsigned char, kKeyBytes> key_{};
    std::uint64_t number_ = 0;
    void* context_ = nullptr;
};

// "" where groups can encrypt, else what is missing.
std::string encryption_problem();

// X25519 (RFC 7748). Keys are 32 bytes; both throw std::runtime_error at what is none.
std::string x25519_public(const std::string& private_key);
std::string x25519_shared(const std::string& private_key, const std::string& other_public_key);

}  // namespace fullwire
