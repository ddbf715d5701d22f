// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/host/posix_file_io.hpp>
#include <spillway/host/swap_file.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <support/fork.hpp>
#include <support/syscall_filter.hpp>
#include <support/temporary_folder.hpp>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

using namespace spillway;
using namespace spillway::detail;
using spillway::testing::FaultyFileIo;

namespace {

using File = SwapFile<PosixFileIo>;
using FaultyFile = SwapFile<FaultyFileIo>;

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<std::byte>((i * 31 + seed * 97 + i / 251) & 0xFF);
  }
  return data;
}

std::string message_of(auto const& action) {
  try {
    action();
  } catch (FileTierError const& error) {
    return error.what();
  }
  return {};
}

/// Calls `action` on a thread on which the system answers fallocate() with `error`.
void on_thread_where_fallocate_fails(int error, auto const& action) {
  std::thread{[&] {
    REQUIRE(support::try_fail_calls(SYS_fallocate, error));
    action();
  }}.join();
}

}  // namespace

TEST_SUITE("swap_file") {
  TEST_CASE("SwapFile: bytes come back from where they were written") {
    TemporaryFolder folder;
    File file{folder.path(), false, {}};
    auto queue = file.make_queue({});
    CHECK(file.try_reserve(1000) == 0);
    CHECK(file.try_reserve(500) == 1000);
    auto const first = pattern(1000, 1);
    auto const second = pattern(500, 2);

    REQUIRE(queue.write(second.data(), 500, 1000) == 0);
    REQUIRE(queue.write(first.data(), 1000, 0) == 0);

    std::vector<std::byte> back(1500);
    REQUIRE(queue.read(back.data(), 1500, 0) == 0);
    CHECK(std::equal(first.begin(), first.end(), back.begin()));
    CHECK(std::equal(second.begin(), second.end(), back.begin() + 1000));
  }

  TEST_CASE("SwapFile: a file in a folder has no name") {
    TemporaryFolder folder;
    File file{folder.path(), false, {}};
    REQUIRE(file.try_reserve(10));

    CHECK(folder.entries() == 0);
  }

  TEST_CASE("SwapFile: a named file exists while it is used, and is removed at the end") {
    TemporaryFolder folder;
    {
      File file{folder.path() / "swap", false, {}};
      CHECK(std::filesystem::exists(folder.path() / "swap"));
    }
    CHECK(folder.entries() == 0);
  }

  TEST_CASE("SwapFile: a relative path stays the same file after a change of directory") {
    TemporaryFolder folder;
    auto const before = std::filesystem::current_path();
    std::filesystem::create_directory(folder.path() / "other");
    std::filesystem::current_path(folder.path());
    {
      File file{"swap", false, {}};
      std::filesystem::current_path("other");
      std::ofstream{"swap"} << "somebody else's";
    }
    std::filesystem::current_path(before);
    CHECK_FALSE(std::filesystem::exists(folder.path() / "swap"));
    CHECK(std::filesystem::exists(folder.path() / "other" / "swap"));
  }

  TEST_CASE("SwapFile: another file that took over the name is not removed") {
    TemporaryFolder folder;
    auto const path = folder.path() / "swap";
    {
      File file{path, false, {}};
      std::filesystem::remove(path);
      std::ofstream{path} << "somebody else's";
    }
    CHECK(std::filesystem::exists(path));
  }

  TEST_CASE("SwapFile: a forked child does not remove its parent's file") {
    TemporaryFolder folder;
    auto const path = folder.path() / "swap";
    auto file = std::make_unique<File>(path, false, PosixFileIo{});
    auto queue = std::make_optional(file->make_queue({}));
    auto const written = pattern(4096, 1);
    REQUIRE(file->try_reserve(8192) == 0);
    REQUIRE(queue->write(written.data(), 4096, 0) == 0);

    spillway::test::ForkedChild const child{[&] {
      auto data = pattern(4096, 2);
      bool const is_left = queue->read(data.data(), 4096, 0) == File::is_parents &&
                           queue->write(data.data(), 4096, 0) == File::is_parents &&
                           data == pattern(4096, 2) && !file->try_reserve(4096) &&
                           file->refusal() == File::is_parents;
      file->release(0, 8192);
      queue.reset();
      file.reset();
      return is_left;
    }};

    CHECK(child.status() == 0);
    CHECK(std::filesystem::exists(path));
    std::vector<std::byte> back(4096);
    CHECK(queue->read(back.data(), 4096, 0) == 0);
    CHECK(back == written);
    CHECK(file->try_reserve(4096) == 8192);
  }

  TEST_CASE("SwapFile: room can be reserved where fallocate is not supported") {
    for (bool const is_direct : {false, true}) {
      TemporaryFolder folder;
      auto const path = folder.path() / "swap";
      File file{path, is_direct, {}};
      on_thread_where_fallocate_fails(EOPNOTSUPP, [&] {
        CHECK(file.try_reserve(192 << 10) == 0);
        CHECK(std::filesystem::file_size(path) == 192 << 10);
        CHECK(file.try_reserve(4096) == 192 << 10);
        CHECK(std::filesystem::file_size(path) == 196 << 10);
      });
    }
  }

  TEST_CASE("SwapFile: fallocate that is interrupted every time is given up") {
    TemporaryFolder folder;
    File file{folder.path(), false, {}};
    on_thread_where_fallocate_fails(EINTR, [&] { CHECK_FALSE(file.try_reserve(4096)); });
    CHECK(file.refusal() == EINTR);
    CHECK(file.try_reserve(4096) == 0);
  }

  TEST_CASE("SwapFile: a file that exists is neither used nor removed") {
    TemporaryFolder folder;
    auto const path = folder.path() / "precious";
    std::ofstream{path} << "data";

    auto const message = message_of([&] { File file{path, false, {}}; });

    CHECK(message.find(path.string()) != std::string::npos);
    CHECK(message.find("File exists") != std::string::npos);
    std::string content;
    std::ifstream{path} >> content;
    CHECK(content == "data");
  }

  TEST_CASE("SwapFile: the error for a path that cannot be opened names path and reason") {
    TemporaryFolder folder;
    auto const path = folder.path() / "missing" / "swap";

    auto const message = message_of([&] { File file{path, false, {}}; });

    CHECK(message.find(path.string()) != std::string::npos);
    CHECK(message.find("No such file or directory") != std::string::npos);
  }

  TEST_CASE("SwapFile: interrupted and partial calls are continued") {
    TemporaryFolder folder;
    FaultyFileIo io;
    FaultyFile file{folder.path(), false, io};
    auto queue = file.make_queue({});
    REQUIRE(file.try_reserve(1000));
    auto const data = pattern(1000, 3);
    io.plant({.most_bytes = 7, .interrupt_every = 3});

    REQUIRE(queue.write(data.data(), data.size(), 0) == 0);
    std::vector<std::byte> back(1000);
    REQUIRE(queue.read(back.data(), back.size(), 0) == 0);

    CHECK(back == data);
    CHECK(io.calls().writes > 1000 / 7);
    CHECK(io.calls().reads > 1000 / 7);
  }

  TEST_CASE("SwapFile: errors are returned as their numbers") {
    TemporaryFolder folder;
    FaultyFileIo io;
    FaultyFile file{folder.path(), false, io};
    auto queue = file.make_queue({});
    REQUIRE(file.try_reserve(100));
    auto data = pattern(100, 4);

    io.plant({.write_error = ENOSPC});
    CHECK(queue.write(data.data(), data.size(), 0) == ENOSPC);
    io.plant({.read_error = EIO});
    CHECK(queue.read(data.data(), data.size(), 0) == EIO);
    io.plant({.is_truncated = true});
    CHECK(queue.read(data.data(), data.size(), 0) == EIO);
  }

  TEST_CASE("SwapFile: if there is no room, the size is unchanged and the attempt undone") {
    TemporaryFolder folder;
    FaultyFileIo io;
    FaultyFile file{folder.path(), false, io};
    REQUIRE(file.try_reserve(100));
    io.plant({.allocate_error = ENOSPC});

    CHECK_FALSE(file.try_reserve(100));

    CHECK(io.calls().discards == 1);
    CHECK(file.refusal() == ENOSPC);
    io.plant({});
    CHECK(file.try_reserve(100) == 100);
    CHECK(file.refusal() == 0);
  }

  TEST_CASE("SwapFile: the system's limit on file sizes is detected when the file grows") {
    TemporaryFolder folder;
    File file{folder.path(), false, {}};
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    rlimit limited = before;
    limited.rlim_cur = 64 << 10;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limited) == 0);

    auto const small = file.try_reserve(32 << 10);
    auto const large = file.try_reserve(64 << 10);

    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(small == 0);
    CHECK_FALSE(large.has_value());
    CHECK(file.refusal() == EFBIG);
  }

  TEST_CASE("SwapFile: released room is removed from the disk and used again first") {
    TemporaryFolder folder;
    File file{folder.path() / "swap", false, {}};
    auto queue = file.make_queue({});
    constexpr std::size_t part = 256 << 10;
    std::vector<std::byte> const data(part, std::byte{7});
    for (std::uint64_t const offset : {0U, 1U, 2U, 3U}) {
      REQUIRE(file.try_reserve(part) == offset * part);
      REQUIRE(queue.write(data.data(), part, offset * part) == 0);
    }
    auto const on_disk = [&] {
      struct stat status {};
      REQUIRE(::stat((folder.path() / "swap").c_str(), &status) == 0);
      return static_cast<std::size_t>(status.st_blocks) * 512;
    };
    std::size_t const before = on_disk();

    file.release(part, part);
    file.release(2 * part, part);

    CHECK(on_disk() <= before - 2 * part);
    CHECK(file.try_reserve(2 * part) == part);  // the two became one
    CHECK(file.try_reserve(part) == 4 * part);
    file.release(0, part);
    CHECK(file.try_reserve(part / 2) == 0);
    CHECK(file.try_reserve(part / 2) == part / 2);
  }

  TEST_CASE("SwapFile: trying whether the file takes writes keeps no room") {
    TemporaryFolder folder;
    FaultyFileIo io;
    FaultyFile file{folder.path(), false, io};
    auto queue = file.make_queue({});
    for (int const error : {0, ENOSPC}) {
      io.plant({.write_error = error});
      CHECK(file.try_out(queue) == error);
    }
    CHECK(file.try_reserve(4096) == 0);
  }

  TEST_CASE("SwapFile: direct I/O is used and reported where the file system supports it") {
    TemporaryFolder folder;
    File direct{folder.path(), true, {}};
    File plain{folder.path(), false, {}};
    CHECK_FALSE(plain.is_direct());
    constexpr std::size_t bytes = 4 * File::unit_bytes;
    auto queue = direct.make_queue({});
    REQUIRE(direct.try_reserve(bytes));
    std::vector<std::byte> memory(3 * bytes);
    void* aligned = memory.data();
    std::size_t space = memory.size();
    auto* const data =
        static_cast<std::byte*>(std::align(File::unit_bytes, 2 * bytes, aligned, space));
    auto const expected = pattern(bytes, 5);
    std::copy(expected.begin(), expected.end(), data);

    REQUIRE(queue.write(data, bytes, 0) == 0);
    REQUIRE(queue.read(data + bytes, bytes, 0) == 0);

    CHECK(std::equal(expected.begin(), expected.end(), data + bytes));
  }
}
