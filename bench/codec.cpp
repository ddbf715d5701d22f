// SPDX-License-Identifier: Apache-2.0
//
// Measures how fast the codecs are compared with memcpy, and how much smaller they make the bytes.
// The bytes are numbers with zeros among them, or the contents of files, such as those that
// dump_tensors.py writes; a file is repeated until there are enough bytes.
//
// usage: bench_codec [--mib N] [--rounds N] [--zeros SHARE] [FILE...]

#include <spillway/concepts/codec.hpp>
#include <spillway/core/streaming_store.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/byte_planes.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <ios>
#include <iostream>
#include <iterator>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "command_line.hpp"
#include <CLI/CLI.hpp>

namespace {

using Bytes = std::vector<std::byte>;

// the host pool encodes so many bytes at once
constexpr std::size_t stripe_bytes = std::size_t{64} << 10U;

/// Returns the processor time that `work` takes, in seconds. Other programs hardly affect it.
template <class Work>
[[nodiscard]] double seconds(Work work) {
  std::clock_t const start = std::clock();
  work();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

[[nodiscard]] double median(std::vector<double> of) {
  auto const middle = of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2);
  std::nth_element(of.begin(), middle, of.end());
  return *middle;
}

/// Makes bytes like those of activations after ReLU: zeros among positive numbers.
[[nodiscard]] Bytes activations(std::size_t bytes, double zeros) {
  Bytes made(bytes / 4 * 4);
  std::mt19937 random{1};
  std::normal_distribution<float> value;
  std::bernoulli_distribution is_zero{zeros};
  for (std::size_t i = 0; i < made.size(); i += 4) {
    float const x = is_zero(random) ? 0.0F : std::abs(value(random));
    std::memcpy(made.data() + i, &x, 4);
  }
  return made;
}

/// @throws std::invalid_argument if the file is empty
[[nodiscard]] Bytes read_file(std::string const& name) {
  std::ifstream file{name, std::ios::binary};
  std::vector<char> const all{std::istreambuf_iterator<char>{file}, {}};
  if (all.empty()) {
    throw std::invalid_argument{name + " cannot be read or is empty: there is nothing to encode"};
  }
  Bytes bytes(all.size());
  std::transform(
      all.begin(), all.end(), bytes.begin(), [](char c) { return static_cast<std::byte>(c); });
  return bytes;
}

/// Repeats bytes until there are as many as wanted. There must be some.
[[nodiscard]] Bytes repeated(Bytes const& bytes, std::size_t wanted) {
  Bytes made;
  made.reserve(wanted);
  while (made.size() < wanted) {
    std::size_t const part = std::min(bytes.size(), wanted - made.size());
    made.insert(made.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(part));
  }
  return made;
}

/// Measures encoding, decoding and memcpy in turns, so that changes of the machine's speed affect
/// all alike.
template <spillway::Codec C>
void measure(Bytes const& from, int rounds) {
  C codec;
  Bytes copied(from.size());
  Bytes decoded(from.size());
  std::size_t const stripes = (from.size() + stripe_bytes - 1) / stripe_bytes;
  Bytes encoded(stripes * C::worst_bytes(stripe_bytes));
  Bytes scratch(C::worst_bytes(stripe_bytes));
  std::vector<std::size_t> sizes(stripes);
  std::vector<double> copy;
  std::vector<double> encode;  // as a multiple of the time of memcpy in the same round
  std::vector<double> decode;
  auto const stripe = [](auto& bytes, std::size_t i) {
    std::size_t const at = i * stripe_bytes;
    return std::span{bytes}.subspan(at, std::min(stripe_bytes, bytes.size() - at));
  };
  std::size_t stored = 0;
  for (int round = 0; round < rounds; ++round) {
    copy.push_back(seconds([&] { std::memcpy(copied.data(), from.data(), from.size()); }));
    encode.push_back(copy.back() / seconds([&] {
                       stored = 0;
                       for (std::size_t i = 0; i < stripes; ++i) {
                         sizes[i] = codec.encode(stripe(from, i), scratch);
                         spillway::detail::copy_streaming(
                             encoded.data() + stored, scratch.data(), sizes[i]);
                         stored += sizes[i];
                       }
                     }));
    decode.push_back(
        copy.back() / seconds([&] {
          std::size_t at = 0;
          for (std::size_t i = 0; i < stripes; ++i) {
            if (!codec.decode(std::span{encoded}.subspan(at, sizes[i]), stripe(decoded, i))) {
              throw std::runtime_error{std::string{C::name()} +
                                       " does not decode what it has encoded"};
            }
            at += sizes[i];
          }
        }));
  }
  if (C::is_lossless && decoded != from) {
    throw std::runtime_error{std::string{C::name()} + " has lost bits"};
  }
  std::size_t kept = 0;  // as in the host pool: a stripe that would grow is stored as it is
  for (std::size_t i = 0; i < stripes; ++i) {
    kept += C::is_lossless ? std::min(sizes[i], stripe(from, i).size()) : sizes[i];
  }
  std::cout << std::left << std::setw(18) << C::name() << std::right << std::setw(10)
            << static_cast<double>(from.size()) / median(copy) / 1e9 << std::setw(10)
            << median(encode) << std::setw(10) << median(decode) << std::setw(10)
            << static_cast<double>(from.size()) / static_cast<double>(kept) << '\n';
}

void measure_all(Bytes const& from, int rounds) {
  std::cout << "codec             memcpy GB/s   encode    decode     ratio   (speeds: of memcpy's, "
               "medians)\n";
  measure<spillway::Identity>(from, rounds);
  measure<spillway::ZeroBitmap>(from, rounds);
  measure<spillway::AsBfloat16>(from, rounds);
#if defined(SPILLWAY_WITH_ZSTD) && SPILLWAY_WITH_ZSTD
  measure<spillway::BytePlanes<spillway::Zstd>>(from, rounds);
#endif
#if defined(SPILLWAY_WITH_LZ4) && SPILLWAY_WITH_LZ4
  measure<spillway::BytePlanes<spillway::Lz4>>(from, rounds);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t mib = 256;
  int rounds = 9;
  double zeros = 0.5;
  std::vector<std::string> files;
  CLI::App app{"How fast the codecs are beside memcpy, and how much smaller they make bytes.",
               "bench_codec"};
  app.add_option("--mib", mib, "bytes to encode, in MiB")
      ->check(CLI::Range(std::size_t{1}, std::size_t{65'536}))
      ->capture_default_str();
  app.add_option("--rounds", rounds, "rounds: memcpy, encode and decode in turns")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--zeros", zeros, "share of zeros among the elements")
      ->check(command_line::number_from(0, 1))
      ->capture_default_str();
  app.add_option("files", files, "raw tensors to encode instead")->check(CLI::ExistingFile);
  return command_line::run(app, argc, argv, [&] {
    std::cout << std::fixed << std::setprecision(2);
    if (files.empty()) {
      measure_all(activations(mib << 20U, zeros), rounds);
    }
    for (std::string const& name : files) {
      Bytes const bytes = read_file(name);
      std::cout << name << ": " << bytes.size() << " bytes\n";
      measure_all(repeated(bytes, mib << 20U), rounds);
    }
    return command_line::Exit::done;
  });
}
