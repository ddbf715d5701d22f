// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/record.hpp>
#include <spillway/observe/snapshot.hpp>
#include <spillway/observe/timeline.hpp>

#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "data.hpp"

namespace beyond {

/// A timeline that records nothing until it is started, so that it does not slow down runs whose
/// speed is compared.
class Recorder {
 public:
  static constexpr bool is_enabled = true;

  void on_record(spillway::Record const& record) noexcept {
    if (is_recording_) {
      timeline_.on_record(record);
    }
  }

  /// Call before the allocator is used.
  void start() { is_recording_ = true; }

  [[nodiscard]] spillway::Timeline const& timeline() const { return timeline_; }

 private:
  spillway::Timeline timeline_;
  bool is_recording_ = false;
};

/// The output files that the user has asked for. They are opened before the training, so that a bad
/// path is reported before it and not after it.
class RecordFiles {
 public:
  /// @param timeline, snapshot  names of the files; empty: none
  /// @throws DataError if a file cannot be opened
  RecordFiles(std::filesystem::path const& timeline, std::filesystem::path const& snapshot)
      : timeline_{open(timeline)}, snapshot_{open(snapshot)} {}

  [[nodiscard]] bool are_wanted() const { return timeline_ || snapshot_; }

  /// Writes what the allocator's recorder knows. @throws DataError if a file does not take it
  template <class Allocator>
  void write(Allocator& allocator) {
    spillway::Timeline const& timeline = allocator.observer().timeline();
    if (timeline_) {
      std::vector<spillway::DeviceSpan> spans;
      if constexpr (requires { allocator.device().spans(); }) {
        spans = allocator.device().spans();
      }
      timeline.write(timeline_->out, allocator.stats(), spans);
      timeline_->finish();
    }
    if (snapshot_) {
      auto const records = timeline.records();
      spillway::write_json(snapshot_->out, spillway::snapshot(allocator, records));
      snapshot_->finish();
    }
  }

 private:
  struct File {
    std::filesystem::path path;
    std::ofstream out;

    void finish() {
      out.flush();
      if (!out) {
        throw DataError{path.string() + ": cannot be written"};
      }
    }
  };

  [[nodiscard]] static std::optional<File> open(std::filesystem::path const& path) {
    if (path.empty()) {
      return std::nullopt;
    }
    File file{path, std::ofstream{path}};
    if (!file.out) {
      throw DataError{path.string() + ": cannot be opened for writing"};
    }
    return file;
  }

  std::optional<File> timeline_;
  std::optional<File> snapshot_;
};

}  // namespace beyond
