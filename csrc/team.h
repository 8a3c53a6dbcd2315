// Threads for the time of one call from Python, however many pieces of work it has for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace he {

// The calling thread and `threads - 1` helpers, or as many of them as the system lets start (pids.max, memory).
class Team {
 public:
  Team(int64_t threads, std::function<void()> work) : work_(std::move(work)) {
    try {
      helpers_.reserve(threads > 1 ? threads - 1 : 0);
      for (int64_t t = 1; t < threads; ++t) helpers_.emplace_back([this] { help(); });
    } catch (const std::exception&) {  // the work gets done all the same
    }
  }
  Team(const Team&) = delete;
  ~Team() {
    stop_ = true;
    for (std::thread& helper : helpers_) helper.join();
  }

  // Everybody calls `work` once; returns when the last one is through.
  void run() {
    busy_.store(helpers_.size(), std::memory_order_relaxed);
    turn_.fetch_add(1, std::memory_order_release);
    work_();
    while (busy_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

 private:
  void help() {
    for (uint64_t seen = 0;; ++seen) {
      while (turn_.load(std::memory_order_acquire) == seen) {
        if (stop_) return;
        std::this_thread::yield();
      }
      work_();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::function<void()> work_;
  std::atomic<uint64_t> turn_{0}, busy_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace he
