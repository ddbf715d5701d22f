// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>

namespace spillway::torch {

/// A copy of the state of a CPU generator, which determines the numbers that it will draw next.
///
/// The engine (Mersenne Twister) changes its 624 words only once for every 624 numbers, and counts
/// otherwise. States between two such changes share the words, so that remembering the state before
/// each of many operations takes a few dozen bytes each.
class TwisterState {
 public:
  TwisterState() = default;
  /// The caller holds the generator's lock.
  ///
  /// @param like  an earlier state, which may have the same words
  TwisterState(at::Generator const& generator, TwisterState const& like)
      : TwisterState{of(generator).engine().data(), like} {
    next_float_ = of(generator).next_float_normal_sample();
    next_double_ = of(generator).next_double_normal_sample();
  }

  /// Whether this class can hold the state of a generator.
  [[nodiscard]] static bool is_known(at::Generator const& generator) {
    return dynamic_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl()) != nullptr;
  }
  /// Whether an operation draws from the generator that it is given, or that an operation inside of
  /// it is given. On the CPU every operation does.
  [[nodiscard]] static bool draws_as_told(c10::OperatorHandle const& /*op*/,
                                          bool /*has_generator*/) noexcept {
    return true;
  }
  [[nodiscard]] static at::Generator make_generator(c10::Device /*device*/) {
    return at::make_generator<at::CPUGeneratorImpl>();
  }

  /// Sets the state of a generator to this one. The caller holds its lock, or is the only user of
  /// the generator.
  void restore(at::Generator const& generator) const {
    at::mt19937_data_pod data{};
    data.seed_ = seed_;
    data.left_ = left_;
    data.seeded_ = is_seeded_;
    data.next_ = next_;
    std::copy(words_->begin(), words_->end(), data.state_.begin());
    at::mt19937 engine;
    engine.set_data(data);
    of(generator).set_engine(engine);
    of(generator).set_next_float_normal_sample(next_float_);
    of(generator).set_next_double_normal_sample(next_double_);
  }
  /// Whether a generator has this state. The caller holds its lock.
  [[nodiscard]] bool is_of(at::Generator const& generator) const {
    at::mt19937_data_pod const data = of(generator).engine().data();
    return data.seed_ == seed_ && data.left_ == left_ && data.seeded_ == is_seeded_ &&
           data.next_ == next_ && next_float_ == of(generator).next_float_normal_sample() &&
           next_double_ == of(generator).next_double_normal_sample() && has_words(data);
  }
  /// Copies the state of `from` to `to`. The caller holds the lock of `to`.
  static void copy(at::Generator const& to, at::Generator const& from) {
    of(to).set_engine(of(from).engine());
    of(to).set_next_float_normal_sample(of(from).next_float_normal_sample());
    of(to).set_next_double_normal_sample(of(from).next_double_normal_sample());
  }

 private:
  using Words = std::array<std::uint32_t, at::MERSENNE_STATE_N>;

  [[nodiscard]] static at::CPUGeneratorImpl& of(at::Generator const& generator) {
    return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  }
  TwisterState(at::mt19937_data_pod const& data, TwisterState const& like)
      : seed_{data.seed_}, left_{data.left_}, is_seeded_{data.seeded_}, next_{data.next_} {
    if (like.words_ != nullptr && like.has_words(data)) {
      words_ = like.words_;
      return;
    }
    auto const words = std::make_shared<Words>();
    std::copy(data.state_.begin(), data.state_.end(), words->begin());
    words_ = words;
  }
  [[nodiscard]] bool has_words(at::mt19937_data_pod const& data) const {
    return std::equal(words_->begin(), words_->end(), data.state_.begin());
  }

  std::shared_ptr<Words const> words_;
  std::uint64_t seed_ = 0;
  int left_ = 0;
  bool is_seeded_ = false;
  std::uint32_t next_ = 0;
  std::optional<float> next_float_;    // the second number of a pair, kept for the next draw
  std::optional<double> next_double_;  // the same
};

/// The state of a counter-based generator (Philox), such as those of CUDA devices. Its numbers are
/// a function of a seed and a counter.
class PhiloxState {
 public:
  PhiloxState() = default;
  /// The caller holds the generator's lock.
  PhiloxState(at::Generator const& generator, PhiloxState const& /*like*/)
      : seed_{generator.current_seed()}, offset_{generator.get_offset()} {}

  [[nodiscard]] static bool is_known(at::Generator const& generator) {
    return generator.device().is_cuda();
  }
  /// A CUDA kernel that takes no generator uses the default one, which cannot be replaced.
  [[nodiscard]] static bool draws_as_told(c10::OperatorHandle const& op, bool has_generator) {
    return has_generator || !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  }
  [[nodiscard]] static at::Generator make_generator(c10::Device device) {
    at::Generator program = at::globalContext().defaultGenerator(device);
    std::lock_guard const guard{program.mutex()};
    return program.clone();
  }

  void restore(at::Generator const& generator) const {
    at::Generator changed = generator;
    changed.set_current_seed(seed_);
    changed.set_offset(offset_);
  }
  [[nodiscard]] bool is_of(at::Generator const& generator) const {
    return generator.current_seed() == seed_ && generator.get_offset() == offset_;
  }
  static void copy(at::Generator const& to, at::Generator const& from) {
    at::Generator changed = to;
    changed.set_offset(from.get_offset());
  }

 private:
  std::uint64_t seed_ = 0;
  std::uint64_t offset_ = 0;
};

/// The private generators of one thread, one of each kind for a device.
///
/// Threads  thread-compatible.
template <class State>
class PrivateGenerators {
 public:
  /// For an operation of the program, which draws from it in place of the program's generator.
  [[nodiscard]] at::Generator& of_program(c10::Device device) { return made(of_program_, device); }
  /// For an operation that a recipe runs, perhaps while one of the program is under way.
  [[nodiscard]] at::Generator& of_recipe(c10::Device device) { return made(of_recipe_, device); }
  /// The last state that an operation of the program has drawn from.
  State last;

 private:
  [[nodiscard]] static at::Generator& made(at::Generator& generator, c10::Device device) {
    if (!generator.defined()) {
      generator = State::make_generator(device);
    }
    return generator;
  }

  at::Generator of_program_;
  at::Generator of_recipe_;
};

/// Tells whether an operation that has failed had drawn random numbers. If not, it can run again.
///
/// `State` is `TwisterState` or `PhiloxState`.
template <class State>
class DrawWatch {
 public:
  /// For an operation that draws nothing.
  DrawWatch() = default;
  explicit DrawWatch(at::Generator generator) : draws_{true}, generator_{std::move(generator)} {
    if (generator_.defined() && State::is_known(generator_)) {
      try {
        std::lock_guard const guard{generator_.mutex()};
        before_ = State{generator_, before_};
        is_known_ = true;
      } catch (c10::Error const&) {  // NOLINT(bugprone-empty-catch): a graph is being captured
      }
    }
  }

  /// Whether the operation, or another thread, may have drawn from the generator since
  /// construction.
  [[nodiscard]] bool has_drawn() {
    if (!draws_ || !is_known_) {
      return draws_;
    }
    std::lock_guard const guard{generator_.mutex()};
    return !before_.is_of(generator_);
  }

 private:
  bool draws_ = false;
  bool is_known_ = false;  // whether `before_` is the generator's state
  at::Generator generator_;
  State before_;
};

/// Lets one operation draw from a private generator that begins with the state of the program's
/// generator. Afterwards the program's generator gets the state that the operation has left.
///
/// This makes sure that the state which the operation has drawn from is known. Other threads may
/// draw from the program's generator at any time, also between a look at its state and the
/// operation. Its lock cannot be held during the operation, since the operation may wait for memory
/// of a thread that waits for the same lock.
///
/// `State` is `TwisterState` or `PhiloxState`.
///
/// Threads  the program's generator is locked only while its state is read or set.
template <class State>
class RandomDraw {
 public:
  /// @pre `State::is_known(program)`
  RandomDraw(at::Generator program, PrivateGenerators<State>& own)
      : program_{std::move(program)}, drawn_from_{own.of_program(program_.device())} {
    {
      std::lock_guard const guard{program_.mutex()};
      before_ = State{program_, own.last};
    }
    own.last = before_;
    before_.restore(drawn_from_);
  }

  RandomDraw(RandomDraw const&) = delete;
  RandomDraw& operator=(RandomDraw const&) = delete;
  /// Also ends the draw of an operation that has failed half way, since it may have drawn.
  ~RandomDraw() {
    if (!has_ended_) {
      try {
        (void)try_end();
      } catch (std::exception const&) {  // NOLINT(bugprone-empty-catch): the device has failed
      }
    }
  }

  /// Returns the generator that the operation has to draw from.
  [[nodiscard]] at::Generator const& generator() const noexcept { return drawn_from_; }
  [[nodiscard]] State const& before() const noexcept { return before_; }
  /// Ends the draw after the operation has run. @returns false if another thread has drawn from the
  /// program's generator meanwhile; the operation must then run again and draw from that
  [[nodiscard]] bool try_end() {
    has_ended_ = true;
    std::lock_guard const guard{program_.mutex()};
    if (!before_.is_of(program_)) {
      return false;
    }
    State::copy(program_, drawn_from_);
    return true;
  }

 private:
  at::Generator program_;
  at::Generator drawn_from_;
  State before_;
  bool has_ended_ = false;
};

}  // namespace spillway::torch
