// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/share/share_table.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <support/fork.hpp>
#include <support/syscall_filter.hpp>
#include <support/temporary_folder.hpp>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace spillway;
using namespace spillway::literals;
using spillway::detail::ShareTable;

namespace {

/// From now on the process is killed when it unlocks a part of a file.
bool try_die_at_unlock() {
  return support::try_filter_calls(std::array<sock_filter, 6>{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_OFD_SETLK, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }});
}

/// While it exists, the process cannot open files.
class NoMoreFiles {
 public:
  NoMoreFiles() {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    rlimit const none{0, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  }
  NoMoreFiles(NoMoreFiles const&) = delete;
  NoMoreFiles& operator=(NoMoreFiles const&) = delete;
  ~NoMoreFiles() { (void)::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

/// A pipe that tells a child to end, by its end.
class Leash {
 public:
  Leash() { REQUIRE(::pipe(ends_.data()) == 0); }
  Leash(Leash const&) = delete;
  Leash& operator=(Leash const&) = delete;
  ~Leash() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  /// For the child: waits until the parent's object has ended.
  void wait() const {
    ::close(ends_[1]);
    char byte = 0;
    (void)!::read(ends_[0], &byte, 1);
  }

 private:
  std::array<int, 2> ends_{};
};

}  // namespace

TEST_SUITE("ShareTable") {
  TEST_CASE("ShareTable: a member takes free bytes, and gives up those that another one lacks") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    ShareTable first{file, 100_MiB, 0, 1};
    CHECK(first.update(80_MiB, 0, true).held_bytes == 100_MiB);

    ShareTable second{file, 100_MiB, 0, 1};
    auto advice = second.update(60_MiB, 0, true);
    CHECK(advice.held_bytes == 0);
    CHECK(second.members().at(1).fair_bytes == 50_MiB);

    advice = first.update(80_MiB, 0, true);
    CHECK(advice.held_bytes == 100_MiB);
    CHECK(advice.keep_bytes == 50_MiB);
    first.shrink(70_MiB);  // leases stood in the way of the rest
    CHECK(second.update(60_MiB, 0, true).held_bytes == 30_MiB);
    CHECK(first.update(80_MiB, 0, true).keep_bytes == 50_MiB);
    first.shrink(50_MiB);
    CHECK(second.update(60_MiB, 0, true).held_bytes == 50_MiB);
    CHECK(first.update(80_MiB, 0, true).keep_bytes == 50_MiB);  // nobody lacks anything
  }

  TEST_CASE("ShareTable: a member keeps bytes beyond its share while nobody lacks them") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    ShareTable first{file, 100_MiB, 0, 1};
    (void)first.update(80_MiB, 0, true);
    ShareTable second{file, 100_MiB, 0, 1};
    (void)second.update(0, 0, false);
    auto const advice = first.update(10_MiB, 0, true);
    CHECK(advice.keep_bytes == advice.held_bytes);
  }

  TEST_CASE("ShareTable: a small lack does not make another member give up bytes") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    ShareTable first{file, 128_MiB, 0, 1};
    ShareTable second{file, 128_MiB, 0, 1};
    (void)first.update(68_MiB, 0, true);
    (void)second.update(60_MiB, 0, true);
    REQUIRE(first.members().at(1).held_bytes == 60_MiB);
    (void)second.update(60_MiB + 900_KiB, 0, true);
    CHECK(second.members().at(1).fair_bytes == 60_MiB + 900_KiB);
    CHECK(first.update(68_MiB, 0, true).keep_bytes == first.members().at(0).held_bytes);
    (void)second.update(70_MiB, 0, true);
    CHECK(first.update(70_MiB, 0, true).keep_bytes == 64_MiB);
  }

  TEST_CASE("ShareTable: earlier claims come first, and a member that leaves frees its bytes") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    ShareTable first{file, 100_MiB, 0, 1};
    auto second =
        std::make_optional<ShareTable>(file, std::uint64_t{100_MiB}, std::uint64_t{0}, 1.0);
    (void)first.update(60_MiB, 0, true);
    (void)second->update(60_MiB, 60_MiB, true);
    (void)first.update(60_MiB, 60_MiB, true);
    CHECK(first.members().at(0).fair_bytes == 40_MiB);
    (void)second->update(60_MiB, 0, true);
    (void)first.update(60_MiB, 60_MiB, true);
    CHECK(first.members().at(0).fair_bytes == 60_MiB);
    CHECK(first.members().size() == 2);
    second.reset();
    (void)first.update(60_MiB, 0, true);
    CHECK(first.members().at(0).fair_bytes == 100_MiB);
    CHECK(first.members().size() == 1);
  }

  TEST_CASE("ShareTable: a firm claim comes before older ones, and the oldest firm claim first") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    ShareTable first{file, 100_MiB, 0, 1};
    ShareTable second{file, 100_MiB, 0, 1};
    (void)first.update(60_MiB, 60_MiB, true);
    (void)second.update(60_MiB, 60_MiB, true, true);
    CHECK(second.members().at(0).fair_bytes == 40_MiB);
    CHECK(second.members().at(1).fair_bytes == 60_MiB);
    (void)first.update(60_MiB, 60_MiB, true, true);
    CHECK(first.members().at(0).fair_bytes == 60_MiB);
    CHECK(first.members().at(1).fair_bytes == 40_MiB);
  }

  TEST_CASE("ShareTable: a killed process gives back its bytes") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    pid_t const child = ::fork();
    if (child == 0) {
      ShareTable table{file, 100_MiB, 10_MiB, 1};
      (void)table.update(100_MiB, 0, true);
      char const byte = 1;
      (void)!::write(ready[1], &byte, 1);
      ::pause();
      ::_exit(0);
    }
    char byte = 0;
    REQUIRE(::read(ready[0], &byte, 1) == 1);
    ShareTable table{file, 100_MiB, 0, 1};
    CHECK(table.members().size() == 2);
    CHECK(table.update(100_MiB, 0, true).held_bytes == 0);

    ::kill(child, SIGKILL);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    CHECK(table.update(100_MiB, 0, true).held_bytes == 100_MiB);
    CHECK(table.members().size() == 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }

  TEST_CASE("ShareTable: a forked child does not remove its parent's entry") {
    TemporaryFolder folder;
    auto table = std::make_unique<ShareTable>(
        folder.path() / "table", std::uint64_t{100_MiB}, std::uint64_t{0}, 1.0);
    (void)table->update(10_MiB, 0, true);
    spillway::test::ForkedChild const child{[&] {
      bool const is_own = table->is_own();
      table.reset();
      return !is_own;
    }};
    CHECK(child.status() == 0);
    CHECK(table->members().at(0).held_bytes == 100_MiB);
  }

  TEST_CASE("ShareTable: a killed process does not keep the table locked while its child lives") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    Leash const leash;
    pid_t const child = ::fork();
    if (child == 0) {
      ShareTable table{file, 100_MiB, 0, 1};
      if (::fork() == 0) {
        leash.wait();
        ::_exit(0);
      }
      rlimit const no_core{};
      (void)::setrlimit(RLIMIT_CORE, &no_core);
      if (try_die_at_unlock()) {
        (void)table.update(100_MiB, 0, true);
      }
      ::_exit(1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGSYS);

    int const opened = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(opened >= 0);
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_len = 1;
    REQUIRE(::fcntl(opened, F_OFD_GETLK, &lock) == 0);
    ::close(opened);
    REQUIRE(lock.l_type == F_UNLCK);
    ShareTable table{file, 100_MiB, 0, 1};
    CHECK(table.members().size() == 2);  // the child has the killed member's place
  }

  TEST_CASE("ShareTable: a process that leaves frees its place even if its child lives") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    auto leash = std::make_unique<Leash>();
    auto table = std::make_unique<ShareTable>(file, std::uint64_t{100_MiB}, std::uint64_t{0}, 1.0);
    spillway::test::ForkedChild const child{[&] { leash->wait(); }};
    table.reset();
    ShareTable other{file, 100_MiB, 0, 1};
    CHECK(other.update(100_MiB, 0, true).held_bytes == 100_MiB);
    CHECK(other.members().size() == 1);
    leash.reset();
    CHECK(child.status() == 0);
  }

  TEST_CASE("ShareTable: a place that the child of a process still locks is passed over") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    Leash const leash;
    pid_t const child = ::fork();
    if (child == 0) {
      auto table =
          std::make_unique<ShareTable>(file, std::uint64_t{100_MiB}, std::uint64_t{0}, 1.0);
      if (::fork() == 0) {
        leash.wait();
        ::_exit(0);
      }
      rlimit const no_core{};
      (void)::setrlimit(RLIMIT_CORE, &no_core);
      if (try_die_at_unlock()) {
        table.reset();  // clears its place, and is killed before it unlocks it
      }
      ::_exit(1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGSYS);

    ShareTable table{file, 100_MiB, 0, 1};
    CHECK(table.update(100_MiB, 0, true).held_bytes == 100_MiB);
    CHECK(table.members().size() == 1);
  }

  TEST_CASE("ShareTable: a process that may open no more files goes on sharing") {
    TemporaryFolder folder;
    ShareTable table{folder.path() / "table", 100_MiB, 0, 1};
    std::uint64_t held = 0;
    {
      NoMoreFiles const none;
      held = table.update(100_MiB, 0, true).held_bytes;
    }
    CHECK(held == 100_MiB);
  }

  TEST_CASE("ShareTable: bytes of a place that was being cleared when its process died are free") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    ShareTable table{file, 100_MiB, 0, 1};
    constexpr int words_before = 3 + 5 * 10;  // the head of the table, and five places
    std::uint64_t const bytes = 40_MiB;
    std::fstream contents{file, std::ios::in | std::ios::out | std::ios::binary};
    for (int const word : {2, 7}) {  // the bytes that are promised, and those that are held
      contents.seekp(8 * (words_before + word));
      contents.write(reinterpret_cast<char const*>(&bytes), sizeof(bytes));
    }
    contents.close();
    REQUIRE(contents.good());
    auto const advice = table.update(100_MiB, 0, true);
    CHECK(advice.held_bytes == 100_MiB);
    CHECK(advice.claimable_bytes == 100_MiB);
  }

  TEST_CASE("ShareTable: a process cannot join if there is no room for the file's pages") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    { ShareTable const table{file, 100_MiB, 0, 1}; }
    auto const size = std::filesystem::file_size(file);
    std::filesystem::resize_file(file, 0);
    for (bool const is_hole : {false, true}) {
      if (is_hole) {
        std::filesystem::resize_file(file, size);
      }
      int error = 0;
      std::thread{[&] {
        if (!support::try_fail_calls(SYS_fallocate, ENOSPC)) {
          return;
        }
        try {
          ShareTable const table{file, 100_MiB, 0, 1};
        } catch (std::system_error const& thrown) {
          error = thrown.code().value();
        }
      }}.join();
      CHECK(error == ENOSPC);
    }
    ShareTable const table{file, 100_MiB, 0, 1};
  }

  TEST_CASE("ShareTable: a process can join by a file that a full disk has left too short") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    { ShareTable const table{file, 100_MiB, 0, 1}; }
    auto const size = std::filesystem::file_size(file);
    std::filesystem::resize_file(file, 0);
    std::filesystem::resize_file(file, 1_KiB);  // zeros
    ShareTable table{file, 100_MiB, 0, 1};
    CHECK(std::filesystem::file_size(file) == size);
    CHECK(table.update(100_MiB, 0, true).held_bytes == 100_MiB);
  }

  TEST_CASE("ShareTable: a process can join where pages cannot be taken in advance") {
    TemporaryFolder folder;
    std::size_t members = 0;
    std::thread{[&] {
      if (support::try_fail_calls(SYS_fallocate, EOPNOTSUPP)) {
        ShareTable table{folder.path() / "table", 100_MiB, 0, 1};
        members = table.members().size();
      }
    }}.join();
    CHECK(members == 1);
  }

  TEST_CASE("ShareTable: a process that cannot join gets the reason") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    auto const reason = [&](std::uint64_t capacity, std::uint64_t least, double weight) {
      try {
        ShareTable const table{file, capacity, least, weight};
      } catch (ContractViolation const& error) {
        return std::string{error.what()};
      }
      return std::string{};
    };
    auto const says = [](std::string const& what, char const* part) {
      return what.find(part) != std::string::npos;
    };
    CHECK(says(reason(100, 200, 1), "at most the capacity"));
    CHECK(!says(reason(100, 200, 1), "weight"));
    for (double const weight : {0.0,
                                -1.0,
                                1e-300,
                                std::numeric_limits<double>::infinity(),
                                std::numeric_limits<double>::quiet_NaN()}) {
      CHECK(says(reason(100, 0, weight), "a weight from 1e-6 to 1e6"));
    }
    {
      ShareTable const first{file, 100_MiB, 60_MiB, 1};
      CHECK(says(reason(90_MiB, 0, 1), "another capacity"));
      CHECK(says(reason(100_MiB, 50_MiB, 1), "least_bytes are not left"));
      CHECK(reason(100_MiB, 40_MiB, 1).empty());
    }
    CHECK(reason(90_MiB, 0, 1).empty());  // the members that set another size are gone

    std::vector<std::unique_ptr<ShareTable>> all;
    for (std::size_t i = 0; i < ShareTable::most_members; ++i) {
      all.push_back(
          std::make_unique<ShareTable>(file, std::uint64_t{1_MiB}, std::uint64_t{0}, 1.0));
    }
    CHECK(says(reason(1_MiB, 0, 1), "64 programs"));
    all.clear();

    auto const bytes = std::filesystem::file_size(file);
    std::filesystem::resize_file(file, 10);
    CHECK(says(reason(1_MiB, 0, 1), "is not one by which"));
    std::filesystem::remove(file);
    {
      std::ofstream other{file};
      other << std::string(bytes, 'x');
    }
    CHECK(says(reason(1_MiB, 0, 1), "is not one by which"));
    CHECK_THROWS_AS((ShareTable{folder.path() / "none" / "table", 1_MiB, 0, 1}), std::system_error);
  }
}
