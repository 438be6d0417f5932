#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() std::this_thread::yield()
#endif

namespace {

constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int SPINS_PER_LOOK = 64;
constexpr uint64_t COUNT_BITS = 24, MAX_COUNT = (uint64_t(1) << COUNT_BITS) - 1;

// One word tells which job is on, how many units it has, and how many are claimed: a claim can only be of a job whose
// other fields were written before.
uint64_t ticket(uint64_t job, uint64_t count, uint64_t claimed) { return job << 2 * COUNT_BITS | count << COUNT_BITS | claimed; }
uint64_t count_of(uint64_t ticket) { return ticket >> COUNT_BITS & MAX_COUNT; }
uint64_t claimed_of(uint64_t ticket) { return ticket & MAX_COUNT; }

class Pool {
   public:
    void set_num_threads(int num_threads) {
        std::lock_guard<std::mutex> lock(callers_);
        stop();
        for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
    }

    void run(int64_t count, void (*function)(const void*, int64_t), const void* context) {
        std::lock_guard<std::mutex> lock(callers_);
        if (threads_.empty() || count == 1) {
            for (int64_t unit = 0; unit < count; ++unit) function(context, unit);
            return;
        }
        for (int64_t first = 0; first < count; first += MAX_COUNT) {
            first_ = first;
            publish(std::min<int64_t>(count - first, MAX_COUNT), function, context);
            take_units();
            while (ended_.load(std::memory_order_acquire) != count_of(ticket_.load(std::memory_order_relaxed))) PAUSE();
        }
    }

    ~Pool() { stop(); }

   private:
    void publish(uint64_t count, void (*function)(const void*, int64_t), const void* context) {
        function_ = function;
        context_ = context;
        ended_.store(0, std::memory_order_relaxed);
        ticket_.store(ticket(++job_, count, 0), std::memory_order_release);
        wakes_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) wakes_.notify_all();
    }

    bool take_units() {
        bool took_any = false;
        uint64_t seen = ticket_.load(std::memory_order_acquire);
        while (claimed_of(seen) < count_of(seen)) {
            if (!ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            function_(context_, first_ + int64_t(claimed_of(seen)));
            ended_.fetch_add(1, std::memory_order_release);
            took_any = true;
            seen = ticket_.load(std::memory_order_acquire);
        }
        return took_any;
    }

    void serve() {
        for (;;) {
            const uint32_t wakes = wakes_.load(std::memory_order_seq_cst);
            if (is_stopping_.load()) return;  // asked after the wakes were read: a stop in between is a wake
            if (take_units() || spin(wakes)) continue;
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wakes_.wait(wakes);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    // True as soon as there is another job.
    bool spin(uint32_t wakes) {
        const auto end = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < SPINS_PER_LOOK; ++i) {
                if (wakes_.load(std::memory_order_relaxed) != wakes) return true;
                PAUSE();
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }

    void stop() {
        is_stopping_.store(true);
        wakes_.fetch_add(1);
        wakes_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
        is_stopping_.store(false);
    }

    std::mutex callers_;
    std::vector<std::thread> threads_;
    std::atomic<bool> is_stopping_{false};
    std::atomic<uint64_t> ticket_{0}, ended_{0};
    std::atomic<uint32_t> wakes_{0}, sleepers_{0};
    uint64_t job_ = 0;
    int64_t first_ = 0;
    void (*function_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
};

// Never destroyed: its threads may still sleep when the process ends.
Pool& pool() {
    static Pool* the_pool = new Pool;
    return *the_pool;
}

}  // namespace

void for_each_unit(int64_t count, void (*run)(const void*, int64_t), const void* context) { pool().run(count, run, context); }

extern "C" void baton_set_num_threads(int num_threads) { pool().set_num_threads(num_threads); }
