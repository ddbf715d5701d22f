// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace spillway::framework {

/// What an operation does with an object that other operations may use at the same time, such as a
/// variable.
struct ObjectUse {
  void const* object = nullptr;
  bool changes = false;
};

/// Orders operations that use the same objects, such as variables: an operation that changes an
/// object runs alone; operations that only read it may run at the same time.
///
/// This is needed since an operation that changes an object may replace the object's memory. If
/// another operation had looked up the memory before that, it would lease the old memory and work
/// on the new. Operations that have objects in common begin in the order in which they asked, so
/// the first one that waits can always continue. An operation does not wait for one that its own
/// thread has begun and not ended, since that one waits for it.
///
/// Threads  thread-safe.
/// Cost     a lock and a walk over the operations that run or wait now.
class ObjectOrder {
 public:
  /// The right of one operation to use its objects. It ends when this object is destroyed, on any
  /// thread.
  class Right {
   public:
    /// Waits until the right is granted. Does not wait for an operation without objects.
    Right(ObjectOrder& order, std::vector<ObjectUse> uses) : order_{order}, uses_{std::move(uses)} {
      if (!uses_.empty()) {
        std::unique_lock lock{order_.mutex_};
        place_ = order_.rights_.insert(order_.rights_.end(), this);
        order_.changed_.wait(lock, [this] {
          return std::none_of(order_.rights_.begin(), place_, [this](Right const* earlier) {
            return earlier->thread_ != thread_ && is_in_conflict(*earlier);
          });
        });
      }
    }
    Right(Right const&) = delete;
    Right& operator=(Right const&) = delete;
    ~Right() {
      if (!uses_.empty()) {
        {
          std::scoped_lock const lock{order_.mutex_};
          order_.rights_.erase(place_);
        }
        order_.changed_.notify_all();
      }
    }

   private:
    [[nodiscard]] bool is_in_conflict(Right const& other) const {
      return std::any_of(uses_.begin(), uses_.end(), [&other](ObjectUse const& mine) {
        return std::any_of(other.uses_.begin(), other.uses_.end(), [&mine](ObjectUse const& its) {
          return its.object == mine.object && (its.changes || mine.changes);
        });
      });
    }

    ObjectOrder& order_;
    std::vector<ObjectUse> uses_;
    std::thread::id thread_ = std::this_thread::get_id();
    std::list<Right*>::iterator place_;
  };

  /// To be called by a thread before it forks; the thread must not hold a right. The child has none
  /// of the parent's other threads, so none of their rights either.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() noexcept { mutex_.unlock(); }
  void after_fork_in_child() noexcept {
    rights_.clear();
    // the threads that the old one knows do not exist here
    new (&changed_) std::condition_variable;
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::list<Right*>
      rights_;  // of the operations that run or wait, in the order in which they asked
};

}  // namespace spillway::framework
