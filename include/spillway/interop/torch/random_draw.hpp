// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>

namespace spillway::torch {

/// The state of a generator of the CPU: what it will draw next.
///
/// The engine (Mersenne Twister) changes its 624 words once for every 624 numbers, and otherwise
/// only counts. States that lie between two such changes share the words, so that the draws of
/// many operations are remembered in a few dozen bytes each.
class RandomState {
 public:
  RandomState() = default;
  /// The caller holds the generator's lock.
  ///
  /// @param like  a state that may have the same words
  RandomState(at::CPUGeneratorImpl& generator, RandomState const& like)
      : RandomState{generator.engine().data(), like} {
    next_float_ = generator.next_float_normal_sample();
    next_double_ = generator.next_double_normal_sample();
  }

  /// Makes a generator draw what the one that had this state would have drawn. The caller holds
  /// its lock, or is the only one that knows it.
  void restore(at::CPUGeneratorImpl& generator) const {
    at::mt19937_data_pod data{};
    data.seed_ = seed_;
    data.left_ = left_;
    data.seeded_ = is_seeded_;
    data.next_ = next_;
    std::copy(words_->begin(), words_->end(), data.state_.begin());
    at::mt19937 engine;
    engine.set_data(data);
    generator.set_engine(engine);
    generator.set_next_float_normal_sample(next_float_);
    generator.set_next_double_normal_sample(next_double_);
  }
  /// Whether a generator has this state. The caller holds its lock.
  [[nodiscard]] bool is_of(at::CPUGeneratorImpl& generator) const {
    at::mt19937_data_pod const data = generator.engine().data();
    return data.seed_ == seed_ && data.left_ == left_ && data.seeded_ == is_seeded_ &&
           data.next_ == next_ && next_float_ == generator.next_float_normal_sample() &&
           next_double_ == generator.next_double_normal_sample() && has_words(data);
  }

 private:
  using Words = std::array<std::uint32_t, at::MERSENNE_STATE_N>;

  RandomState(at::mt19937_data_pod const& data, RandomState const& like)
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
  std::optional<float> next_float_;    // the second one of a pair that was drawn
  std::optional<double> next_double_;  // the same
};

/// Generators that nobody but one thread knows.
///
/// Threads  thread-compatible.
class PrivateGenerators {
 public:
  /// One for an operation of the program, which draws in the place of the program's generator.
  [[nodiscard]] at::Generator& of_program() { return made(of_program_); }
  /// One for an operation that runs again, perhaps while one of the program is under way.
  [[nodiscard]] at::Generator& of_recipe() { return made(of_recipe_); }
  /// The last state that an operation has been seen to draw from.
  RandomState last;

 private:
  [[nodiscard]] static at::Generator& made(at::Generator& generator) {
    if (!generator.defined()) {
      generator = at::make_generator<at::CPUGeneratorImpl>();
    }
    return generator;
  }

  at::Generator of_program_;
  at::Generator of_recipe_;
};

/// Lets one operation draw its random numbers from a private generator, which begins with the state
/// of the program's, and gives that one the state in which the operation has left it.
///
/// So what the operation has drawn from is known: other threads draw from the same generator
/// whenever they like, and one that did between a look at the state and the operation would not
/// be seen. They cannot be kept away either, since operations allocate, and may wait for memory of
/// a thread that waits to draw.
///
/// Threads  the program's generator is locked while its state is read or set, and not meanwhile.
class RandomDraw {
 public:
  /// Whether a generator's state is known here.
  [[nodiscard]] static bool can_draw_for(at::Generator const& program) {
    return program.defined() &&
           dynamic_cast<at::CPUGeneratorImpl*>(program.unsafeGetGeneratorImpl()) != nullptr;
  }

  RandomDraw(at::Generator program, PrivateGenerators& own)
      : program_{std::move(program)}, drawn_from_{own.of_program()} {
    {
      std::lock_guard const guard{program_.mutex()};
      before_ = RandomState{of(program_), own.last};
    }
    own.last = before_;
    before_.restore(of(drawn_from_));
  }

  RandomDraw(RandomDraw const&) = delete;
  RandomDraw& operator=(RandomDraw const&) = delete;
  /// An operation that has failed half way has drawn, too.
  ~RandomDraw() {
    if (!has_ended_) {
      (void)try_end();
    }
  }

  /// What the operation has to draw from.
  [[nodiscard]] at::Generator const& generator() const noexcept { return drawn_from_; }
  [[nodiscard]] RandomState const& before() const noexcept { return before_; }
  /// Ends it when the operation has run. @returns false if another thread has drawn from the
  /// program's generator meanwhile; the operation must then draw anew, from that
  [[nodiscard]] bool try_end() {
    has_ended_ = true;
    std::lock_guard const guard{program_.mutex()};
    at::CPUGeneratorImpl& program = of(program_);
    if (!before_.is_of(program)) {
      return false;
    }
    at::CPUGeneratorImpl& drawn_from = of(drawn_from_);
    program.set_engine(drawn_from.engine());
    program.set_next_float_normal_sample(drawn_from.next_float_normal_sample());
    program.set_next_double_normal_sample(drawn_from.next_double_normal_sample());
    return true;
  }

 private:
  [[nodiscard]] static at::CPUGeneratorImpl& of(at::Generator const& generator) {
    return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  }

  at::Generator program_;
  at::Generator drawn_from_;
  RandomState before_;
  bool has_ended_ = false;
};

}  // namespace spillway::torch
