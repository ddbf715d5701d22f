// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/share/fair_shares.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

namespace spillway {

/// What the other programs know about a program that shares a device.
struct ShareMember {
  std::int64_t process = 0;        ///< its process id, as seen in its own container
  std::uint64_t held_bytes = 0;    ///< how much it may use now
  std::uint64_t fair_bytes = 0;    ///< its fair share, which it gets once others have given it up
  std::uint64_t wanted_bytes = 0;  ///< with this much it would not have to swap out
  double weight = 1;
  bool is_active = true;  ///< it has leased blocks within `ShareOptions::idle_after`
};

}  // namespace spillway

namespace spillway::detail {

/// The table by which programs share a device: a small file that each of them maps.
///
/// At any time the members together hold at most the capacity: a member takes only what nobody
/// holds, and a member that holds more than its fair share first gives up the rest. There is no
/// server process.
///
/// Each member holds an open file description lock (Linux 3.15) on a byte of the file. When its
/// process ends, even by a crash, the system releases the lock, and what the member held is free. A
/// forked child shares the file description, so the lock lasts until both parent and child have
/// ended. The whole table is locked in the same way, for some microseconds at a time, but through a
/// file description of its own each time: see `Locked`.
///
/// Threads  thread-safe
template <class = Lazily>
class BasicShareTable {
 public:
  static constexpr std::size_t most_members = 64;

  /// Joins the programs that share `capacity_bytes` by `file`, which is created if it does not
  /// exist.
  ///
  /// @throws std::system_error if the file cannot be opened, locked or mapped, or if there is no
  ///         room for it; ContractViolation if it is not such a table, if its members share another
  ///         capacity or are promised so much that `least_bytes` are not left, or if it has 64
  ///         members already
  BasicShareTable(std::string const& file,
                  std::uint64_t capacity_bytes,
                  std::uint64_t least_bytes,
                  double weight);
  BasicShareTable(BasicShareTable const&) = delete;
  BasicShareTable& operator=(BasicShareTable const&) = delete;
  /// Leaves, unless this is a forked child. What the member held is free for the others.
  ~BasicShareTable();

  /// What `update` tells a member to do.
  struct Advice {
    std::uint64_t held_bytes = 0;  ///< how much the member may use from now on
    /// The member should give up what it holds beyond this and then call `shrink`. Equal to
    /// `held_bytes` if no other member needs it.
    std::uint64_t keep_bytes = 0;
    std::uint64_t claimable_bytes = 0;  ///< the capacity less what other members are promised
  };

  /// Tells the others what this member asks for, and takes as much as is free of what it lacks of
  /// its share.
  ///
  /// @param is_firm  the claim comes before all claims that are not firm, however old these are
  /// @throws std::system_error
  Advice update(std::uint64_t wanted_bytes,
                std::uint64_t claimed_bytes,
                bool is_active,
                bool is_firm = false);
  /// Puts this member's claim behind the claims of all others. @throws std::system_error
  void requeue();
  /// Gives up what is held beyond `bytes`. @throws std::system_error
  void shrink(std::uint64_t bytes);

  /// Whether this is the process that joined, and not a forked child of it.
  [[nodiscard]] bool is_own() const noexcept { return ::getpid() == process_; }

  /// All members that are alive. @throws std::system_error, std::bad_alloc
  [[nodiscard]] std::vector<ShareMember> members();

 private:
  struct Slot {
    std::uint64_t is_taken;
    std::int64_t process;
    std::uint64_t least_bytes;
    std::uint64_t claimed_bytes;
    std::uint64_t claim;  // number of its claim; earlier claims have smaller numbers
    std::uint64_t is_firm;
    std::uint64_t wanted_bytes;
    std::uint64_t held_bytes;
    double weight;
    std::uint64_t is_active;
  };
  /// The contents of the file, which are all zeros when it is created.
  struct Layout {
    std::uint64_t kind;
    std::uint64_t capacity_bytes;
    std::uint64_t claims;  // number of claims so far
    std::array<Slot, most_members> member_slots;
  };
  static constexpr std::uint64_t kind = 0x3261'7265'6873'7773;  // "swshare2"
  static constexpr off_t table_byte = 0;                        // its lock guards the whole table
  [[nodiscard]] static off_t byte_of(std::size_t slot) noexcept {
    return 1 + static_cast<off_t>(slot);
  }

  /// The right to read and write the table, among threads and among processes.
  ///
  /// If the table were locked through `fd_` and the process were killed at that moment, its forked
  /// children, which share that file description, would keep the table locked for all programs. So
  /// the file is opened again each time, which takes a few microseconds. A child that is forked at
  /// that moment shares the new description, but the parent still unlocks it.
  class Locked {
   public:
    explicit Locked(BasicShareTable& table)
        : guard_{table.mutex_},
          opened_{::open(table.path_again_.c_str(), O_RDWR | O_CLOEXEC)},
          // A program that may open no more files, or none of this user any more, goes on sharing.
          fd_{opened_ >= 0 ? opened_ : table.fd_} {
      if (!lock(fd_, table_byte, F_OFD_SETLKW)) {
        int const error = errno;
        close();
        errno = error;
        throw_error("lock");
      }
    }
    Locked(Locked const&) = delete;
    Locked& operator=(Locked const&) = delete;
    ~Locked() {
      unlock(fd_, table_byte);
      close();
    }

   private:
    void close() noexcept {
      if (opened_ >= 0) {
        ::close(opened_);
      }
    }

    std::scoped_lock<std::mutex> guard_;
    int opened_;
    int fd_;
  };

  [[noreturn]] static void throw_error(char const* what) {
    throw std::system_error{errno, std::generic_category(), Text{"a share of a device: "} + what};
  }
  [[nodiscard]] static struct flock flock_of(off_t byte, short type) noexcept {
    struct flock lock {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
  }
  [[nodiscard]] static bool lock(int fd, off_t byte, int command) noexcept {
    struct flock lock = flock_of(byte, F_WRLCK);
    int result = -1;
    do {
      result = ::fcntl(fd, command, &lock);
    } while (result != 0 && errno == EINTR);
    return result == 0;
  }
  static void unlock(int fd, off_t byte) noexcept {
    struct flock lock = flock_of(byte, F_UNLCK);
    static_cast<void>(::fcntl(fd, F_OFD_SETLK, &lock));
  }
  /// Whether another member has locked its byte.
  [[nodiscard]] bool is_alive(std::size_t slot) noexcept {
    struct flock lock = flock_of(byte_of(slot), F_WRLCK);
    return slot == own_ || ::fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }

  void open(std::string const& file);
  /// Whether the file, of so many bytes, is one that a program could not finish, since the disk was
  /// full or the program was killed: it has only a part of the zeros of a new table.
  [[nodiscard]] bool is_unfinished(std::size_t bytes) const noexcept;
  void allocate();
  void join(std::uint64_t capacity_bytes, std::uint64_t least_bytes, double weight);
  [[nodiscard]] std::size_t lock_place();
  void close() noexcept;
  void drop_the_dead() noexcept;
  void find_shares() noexcept;

  std::mutex mutex_;
  pid_t process_ = ::getpid();
  int fd_ = -1;
  std::string path_again_;  // opens the file of `fd_` again, even if its name is another's by now
  Layout* table_ = nullptr;
  std::size_t own_ = most_members;
  std::array<ShareRequest, most_members> requests_{};
  std::array<std::uint64_t, most_members> shares_{};
  std::array<std::size_t, most_members> order_{};
};

using ShareTable = BasicShareTable<>;

template <class Lazy>
BasicShareTable<Lazy>::BasicShareTable(std::string const& file,
                                       std::uint64_t capacity_bytes,
                                       std::uint64_t least_bytes,
                                       double weight) {
  expects(
      weight >= 1e-6 && weight <= 1e6, "a share has a weight from 1e-6 to 1e6", {}, "DeviceShare");
  expects(least_bytes <= capacity_bytes,
          "ShareOptions::least_bytes, 32 MiB by default, must be at most the capacity",
          {},
          "DeviceShare");
  try {
    open(file);
    join(capacity_bytes, least_bytes, weight);
  } catch (...) {
    close();
    throw;
  }
}

template <class Lazy>
BasicShareTable<Lazy>::~BasicShareTable() {
  try {
    if (is_own()) {
      Locked const locked{*this};
      table_->member_slots[own_] = {};
      unlock(fd_, byte_of(own_));  // closing the file would not do so while a forked child lives
    }
  } catch (std::system_error const&) {  // NOLINT(bugprone-empty-catch): see the class comment
  }
  close();
}

template <class Lazy>
void BasicShareTable<Lazy>::open(std::string const& file) {
  constexpr mode_t for_the_user_alone = 0600;
  constexpr char const* no_table =
      "the file is not one by which programs with this version of the library share a device: "
      "remove it, or name another one";
  fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, for_the_user_alone);
  if (fd_ < 0) {
    throw std::system_error{errno, std::generic_category(), file};
  }
  path_again_ = "/proc/self/fd/" + std::to_string(fd_);
  Locked const locked{*this};
  struct stat status {};
  if (::fstat(fd_, &status) != 0) {
    throw_error("fstat");
  }
  auto const bytes = static_cast<std::size_t>(status.st_size);
  expects(bytes == sizeof(Layout) || is_unfinished(bytes), no_table, {}, "DeviceShare");
  allocate();
  void* const memory = ::mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) {
    throw_error("mmap");
  }
  table_ = static_cast<Layout*>(memory);
  expects(table_->kind == kind || table_->kind == 0, no_table, {}, "DeviceShare");
  table_->kind = kind;
}

template <class Lazy>
bool BasicShareTable<Lazy>::is_unfinished(std::size_t bytes) const noexcept {
  std::array<char, sizeof(Layout)> found{};
  bool const is_read =
      bytes < found.size() && ::pread(fd_, found.data(), bytes, 0) == static_cast<ssize_t>(bytes);
  return is_read && std::all_of(found.begin(), found.end(), [](char byte) { return byte == 0; });
}

/// Makes the file as long as the table, and takes room for all of it, since the first access to a
/// page for which a full disk has no room would end the process by SIGBUS. A file that exists may
/// consist of holes, too.
template <class Lazy>
void BasicShareTable<Lazy>::allocate() {
  int error = EINTR;
  while (error == EINTR) {
    error = ::posix_fallocate(fd_, 0, sizeof(Layout));
  }
  if (error == EOPNOTSUPP || error == EINVAL) {  // not on this file system
    error = ::ftruncate(fd_, sizeof(Layout)) == 0 ? 0 : errno;
  }
  if (error != 0) {
    errno = error;
    throw_error("posix_fallocate");
  }
}

template <class Lazy>
void BasicShareTable<Lazy>::join(std::uint64_t capacity_bytes,
                                 std::uint64_t least_bytes,
                                 double weight) {
  Locked const locked{*this};
  drop_the_dead();
  auto& member_slots = table_->member_slots;
  std::uint64_t promised_bytes = 0;
  std::size_t members = 0;
  for (Slot const& slot : member_slots) {
    if (slot.is_taken != 0) {
      ++members;
      promised_bytes += slot.least_bytes;
    }
  }
  expects(members == 0 || table_->capacity_bytes == capacity_bytes,
          "programs share the device by this file already, and said that it has another capacity",
          {},
          "DeviceShare");
  expects(least_bytes <= capacity_bytes - std::min(capacity_bytes, promised_bytes),
          "the other programs are promised so much that the share's least_bytes are not left",
          {},
          "DeviceShare");
  own_ = lock_place();
  expects(
      own_ != most_members, "64 programs share the device by this file already", {}, "DeviceShare");
  table_->capacity_bytes = capacity_bytes;
  member_slots[own_] = Slot{.is_taken = 1,
                            .process = process_,
                            .least_bytes = least_bytes,
                            .claimed_bytes = 0,
                            .claim = 0,
                            .is_firm = 0,
                            .wanted_bytes = 0,
                            .held_bytes = 0,
                            .weight = weight,
                            .is_active = 1};
}

/// Locks a place that no member has. If a process was killed while it left, its children may still
/// lock the place that it had; such places are passed over.
/// @returns `most_members` if there is no place
template <class Lazy>
std::size_t BasicShareTable<Lazy>::lock_place() {
  for (std::size_t i = 0; i < most_members; ++i) {
    if (table_->member_slots[i].is_taken == 0) {
      if (lock(fd_, byte_of(i), F_OFD_SETLK)) {
        return i;
      }
      if (errno != EAGAIN && errno != EACCES) {
        throw_error("lock");
      }
    }
  }
  return most_members;
}

template <class Lazy>
void BasicShareTable<Lazy>::close() noexcept {
  if (table_ != nullptr) {
    ::munmap(table_, sizeof(Layout));
  }
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

/// Frees the slots of processes that have ended without leaving.
template <class Lazy>
void BasicShareTable<Lazy>::drop_the_dead() noexcept {
  for (std::size_t i = 0; i < most_members; ++i) {
    if (table_->member_slots[i].is_taken != 0 && !is_alive(i)) {
      table_->member_slots[i] = {};
    }
  }
}

/// Divides the capacity among the members, in whole granules.
template <class Lazy>
void BasicShareTable<Lazy>::find_shares() noexcept {
  std::size_t count = 0;
  for (std::size_t i = 0; i < most_members; ++i) {
    if (table_->member_slots[i].is_taken != 0) {
      order_[count++] = i;
    }
  }
  auto const members = std::span{order_}.first(count);
  auto const order_of = [this](std::size_t member) {
    Slot const& slot = table_->member_slots[member];
    return std::pair{slot.is_firm == 0, slot.claim};
  };
  std::sort(members.begin(), members.end(), [&](std::size_t a, std::size_t b) {
    return order_of(a) < order_of(b);
  });
  for (std::size_t i = 0; i < count; ++i) {
    Slot const& slot = table_->member_slots[members[i]];
    requests_[i] = ShareRequest{.least_bytes = slot.least_bytes,
                                .claimed_bytes = slot.claimed_bytes,
                                .wanted_bytes = slot.wanted_bytes,
                                .weight = slot.weight,
                                .is_active = slot.is_active != 0};
  }
  std::array<std::uint64_t, most_members> found{};
  fair_shares({requests_.data(), count}, table_->capacity_bytes, {found.data(), count});
  shares_.fill(0);
  for (std::size_t i = 0; i < count; ++i) {
    shares_[members[i]] = found[i] / granule_bytes * granule_bytes;
  }
}

template <class Lazy>
typename BasicShareTable<Lazy>::Advice BasicShareTable<Lazy>::update(std::uint64_t wanted_bytes,
                                                                     std::uint64_t claimed_bytes,
                                                                     bool is_active,
                                                                     bool is_firm) {
  Locked const locked{*this};
  drop_the_dead();
  auto& member_slots = table_->member_slots;
  Slot& own = member_slots[own_];
  own.wanted_bytes = wanted_bytes;
  if (own.claimed_bytes == 0 && claimed_bytes != 0) {
    own.claim = ++table_->claims;
  }
  own.claimed_bytes = claimed_bytes;
  own.is_firm = is_firm ? 1 : 0;
  own.is_active = is_active ? 1 : 0;
  find_shares();
  std::uint64_t free_bytes = table_->capacity_bytes;
  std::uint64_t claimable_bytes = table_->capacity_bytes + own.least_bytes;
  for (Slot const& slot : member_slots) {
    if (slot.is_taken != 0) {  // a process may have been killed while it was clearing a slot
      free_bytes -= slot.held_bytes;
      claimable_bytes -= slot.least_bytes;
    }
  }
  std::uint64_t const fair_bytes = shares_[own_];
  if (own.held_bytes < fair_bytes) {
    own.held_bytes += std::min(fair_bytes - own.held_bytes, free_bytes);
    return {own.held_bytes, own.held_bytes, claimable_bytes};
  }
  std::uint64_t lacking_bytes = 0;
  for (std::size_t i = 0; i < most_members; ++i) {
    std::uint64_t const lacks = shares_[i] - std::min(shares_[i], member_slots[i].held_bytes);
    // Needs change all the time. A small lack is not worth the copies of those who give up memory.
    lacking_bytes += lacks > shares_[i] / 64 ? lacks : 0;
  }
  lacking_bytes -= std::min(lacking_bytes, free_bytes);
  std::uint64_t const excess_bytes = own.held_bytes - fair_bytes;
  return {own.held_bytes, own.held_bytes - std::min(excess_bytes, lacking_bytes), claimable_bytes};
}

template <class Lazy>
void BasicShareTable<Lazy>::requeue() {
  Locked const locked{*this};
  table_->member_slots[own_].claim = ++table_->claims;
}

template <class Lazy>
void BasicShareTable<Lazy>::shrink(std::uint64_t bytes) {
  Locked const locked{*this};
  Slot& own = table_->member_slots[own_];
  own.held_bytes = std::min(own.held_bytes, bytes);
}

template <class Lazy>
std::vector<ShareMember> BasicShareTable<Lazy>::members() {
  std::vector<ShareMember> found;
  found.reserve(most_members);
  Locked const locked{*this};
  drop_the_dead();
  find_shares();
  for (std::size_t i = 0; i < most_members; ++i) {
    if (Slot const& slot = table_->member_slots[i]; slot.is_taken != 0) {
      found.push_back({.process = slot.process,
                       .held_bytes = slot.held_bytes,
                       .fair_bytes = shares_[i],
                       .wanted_bytes = slot.wanted_bytes,
                       .weight = slot.weight,
                       .is_active = slot.is_active != 0});
    }
  }
  return found;
}

SPILLWAY_COMPILED_PART(class BasicShareTable<>);

}  // namespace spillway::detail
