#include "transport/records.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace fullwire {
namespace {

// As <openssl/evp.h> and <openssl/hmac.h> of OpenSSL 3 declare them.
constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG
constexpr int kX25519 = 1034;                  // EVP_PKEY_X25519
constexpr const char* kLibrary = "libcrypto.so.3";

struct Crypto {
    void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    std::string problem;

    template <typename Function>
    Function* named(const char* name) {
        void* found = library ? ::dlsym(library, name) : nullptr;
        if (library && !found && problem.empty()) {
            problem = std::string(kLibrary) + " of OpenSSL 3: it has no " + name;
        }
        return reinterpret_cast<Function*>(found);
    }

    using Update = int(void*, unsigned char*, int*, const unsigned char*, int);
    using Begin = int(void*, const void*, void*, const unsigned char*, const unsigned char*);
    using Final = int(void*, unsigned char*, int*);
    using RawKey = void*(int, void*, const unsigned char*, std::size_t);

    void* (*new_context)() = named<void*()>("EVP_CIPHER_CTX_new");
    void (*free_context)(void*) = named<void(void*)>("EVP_CIPHER_CTX_free");
    const void* (*aes_256_gcm)() = named<const void*()>("EVP_aes_256_gcm");
    int (*control)(void*, int, int, void*) = named<int(void*, int, int, void*)>("EVP_CIPHER_CTX_ctrl");
    Begin* begin_sealing = named<Begin>("EVP_EncryptInit_ex");
    Update* seal = named<Update>("EVP_EncryptUpdate");
    Final* end_sealing = named<Final>("EVP_EncryptFinal_ex");
    Begin* begin_opening = named<Begin>("EVP_DecryptInit_ex");
    Update* open = named<Update>("EVP_DecryptUpdate");
    Final* end_opening = named<Final>("EVP_DecryptFinal_ex");
    const void* (*sha256)() = named<const void*()>("EVP_sha256");
    unsigned char* (*hmac)(const void*, const void*, int, const unsigned char*, std::size_t,
                           unsigned char*, unsigned*) =
        named<unsigned char*(const void*, const void*, int, const unsigned char*, std::size_t,
                             unsigned char*, unsigned*)>("HMAC");
    void (*cleanse)(void*, std::size_t) = named<void(void*, std::size_t)>("OPENSSL_cleanse");
    RawKey* private_key = named<RawKey>("EVP_PKEY_new_raw_private_key");
    RawKey* public_key = named<RawKey>("EVP_PKEY_new_raw_public_key");
    int (*get_public_key)(const void*, unsigned char*, std::size_t*) =
        named<int(const void*, unsigned char*, std::size_t*)>("EVP_PKEY_get_raw_public_key");
    void (*free_key)(void*) = named<void(void*)>("EVP_PKEY_free");
    void* (*new_exchange)(void*, void*) = named<void*(void*, void*)>("EVP_PKEY_CTX_new");
    void (*free_exchange)(void*) = named<void(void*)>("EVP_PKEY_CTX_free");
    int (*begin_exchange)(void*) = named<int(void*)>("EVP_PKEY_derive_init");
    int (*set_other)(void*, void*) = named<int(void*, void*)>("EVP_PKEY_derive_set_peer");
    int (*derive)(void*, unsigned char*, std::size_t*) =
        named<int(void*, unsigned char*, std::size_t*)>("EVP_PKEY_derive");

    Crypto() {
        if (!library) problem = std::string(kLibrary) + " of OpenSSL 3 was not found";
    }
};

const Crypto& found_crypto() {
    static const Crypto crypto;
    return crypto;
}

const Crypto& crypto() {
    const Crypto& found = found_crypto();
    if (!found.problem.empty()) throw std::runtime_error(found.problem);
    return found;
}

// What fails here is libcrypto's own memory: all that it is given is of the right size.
void require(bool is_good) {
    if (!is_good) throw std::bad_alloc();
}

const unsigned char* bytes_at(const void* from) { return static_cast<const unsigned char*>(from); }
unsigned char* bytes_at(void* from) { return static_cast<unsigned char*>(from); }

template <typename Free>
std::unique_ptr<void, Free> held(void* made, Free free) {
    return {made, free};
}

auto key_of(Crypto::RawKey* make, const std::string& raw) {
    auto key = held(make(kX25519, nullptr, bytes_at(raw.data()), raw.size()), crypto().free_key);
    if (!key) throw std::runtime_error("X25519: expected a key of 32 bytes");
    return key;
}

}  // namespace

RecordCipher::RecordCipher(const std::string& key, Way way, std::uint64_t records_per_key)
    : way_(way), records_per_key_(records_per_key) {
    if (key.size() != kKeyBytes) throw std::invalid_argument("a key has 32 bytes");
    std::memcpy(key_.data(), key.data(), kKeyBytes);
    context_ = crypto().new_context();
    require(context_ != nullptr);
    take_key();
}

RecordCipher::~RecordCipher() {
    found_crypto().free_context(context_);
    found_crypto().cleanse(key_.data(), key_.size());
}

void RecordCipher::take_key() {
    const auto begin = way_ == Way::seals ? crypto().begin_sealing : crypto().begin_opening;
    require(begin(context_, crypto().aes_256_gcm(), nullptr, key_.data(), nullptr) == 1);
}

// Both ends count, so both change at the same record.
void RecordCipher::change_key_if_due() {
    if (number_ < records_per_key_) return;
    static constexpr char kNext[] = "fullwire next key";
    std::array<unsigned char, kKeyBytes> next;
    require(crypto().hmac(crypto().sha256(), key_.data(), kKeyBytes, bytes_at(kNext),
                          sizeof kNext - 1, next.data(), nullptr) != nullptr);
    key_ = next;
    crypto().cleanse(next.data(), next.size());
    take_key();
    number_ = 0;  // last, so that where the key is not taken no number is used twice with the old one
}

void RecordCipher::begin_record() {
    change_key_if_due();
    std::array<unsigned char, 12> nonce{};
    for (int byte = 0; byte < 8; ++byte) {
        nonce[static_cast<std::size_t>(4 + byte)] = static_cast<unsigned char>(number_ >> (8 * byte));
    }
    const auto begin = way_ == Way::seals ? crypto().begin_sealing : crypto().begin_opening;
    require(begin(context_, nullptr, nullptr, nullptr, nonce.data()) == 1);
    ++number_;
}

std::size_t RecordCipher::seal(char* record, const void* first, std::size_t first_bytes,
                               const void* second, std::size_t second_bytes) {
    begin_record();
    const auto length = static_cast<std::uint32_t>(first_bytes + second_bytes + kTagBytes);
    std::memcpy(record, &length, sizeof length);
    unsigned char* out = bytes_at(record);
    int done = 0;
    require(crypto().seal(context_, nullptr, &done, out, kRecordHeadBytes) == 1);
    out += kRecordHeadBytes;
    require(crypto().seal(context_, out, &done, bytes_at(first), static_cast<int>(first_bytes)) == 1);
    out += first_bytes;
    if (second_bytes) {
        require(crypto().seal(context_, out, &done, bytes_at(second),
                              static_cast<int>(second_bytes)) == 1);
        out += second_bytes;
    }
    require(crypto().end_sealing(context_, out, &done) == 1);
    require(crypto().control(context_, kGetTag, kTagBytes, out) == 1);
    return kRecordHeadBytes + length;
}

bool RecordCipher::open(char* record, std::size_t bytes) {
    if (bytes < kRecordHeadBytes + kTagBytes) return false;
    begin_record();
    unsigned char* text = bytes_at(record) + kRecordHeadBytes;
    const std::size_t text_bytes = bytes - kRecordHeadBytes - kTagBytes;
    int done = 0;
    require(crypto().open(context_, nullptr, &done, bytes_at(record), kRecordHeadBytes) == 1);
    require(crypto().open(context_, text, &done, text, static_cast<int>(text_bytes)) == 1);
    require(crypto().control(context_, kSetTag, kTagBytes, text + text_bytes) == 1);
    return crypto().end_opening(context_, text + text_bytes, &done) == 1;
}

std::string encryption_problem() { return found_crypto().problem; }

std::string x25519_public(const std::string& private_key) {
    const auto key = key_of(crypto().private_key, private_key);
    std::string found(kKeyBytes, '\0');
    std::size_t bytes = found.size();
    require(crypto().get_public_key(key.get(), bytes_at(found.data()), &bytes) == 1);
    return found;
}

std::string x25519_shared(const std::string& private_key, const std::string& other_public_key) {
    const auto own = key_of(crypto().private_key, private_key);
    const auto other = key_of(crypto().public_key, other_public_key);
    const auto exchange = held(crypto().new_exchange(own.get(), nullptr), crypto().free_exchange);
    require(exchange && crypto().begin_exchange(exchange.get()) == 1);
    std::string found(kKeyBytes, '\0');
    std::size_t bytes = found.size();
    // Refused: a public key of small order, of which the shared secret is zero for everybody.
    if (crypto().set_other(exchange.get(), other.get()) != 1 ||
        crypto().derive(exchange.get(), bytes_at(found.data()), &bytes) != 1) {
        throw std::runtime_error("X25519: the other end's key gives no secret");
    }
    return found;
}

}  // namespace fullwire
