#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/resource.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() std::this_thread::yield()
#endif

namespace {

constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int SPINS_PER_LOOK = 64;
constexpr int64_t EXPECTED_BYTES = 384 << 10;  // of a thread, in a second cache of 512 KiB or more
constexpr int64_t BYTES_PER_SPIN = 512;

// The units of a range that nobody has claimed, in one word: next to end - 1.
struct alignas(64) Range {
    std::atomic<uint64_t> unclaimed{0};

    void set(uint64_t next, uint64_t end) { unclaimed.store(next << 32 | end, std::memory_order_release); }

    // Claims a unit; -1 if there is none. A claim sees all that was written before the range was set.
    int64_t claim() {
        uint64_t seen = unclaimed.load(std::memory_order_acquire);
        while (seen >> 32 < (seen & 0xffffffff))
            if (unclaimed.compare_exchange_weak(seen, seen + (uint64_t(1) << 32), std::memory_order_acq_rel)) return int64_t(seen >> 32);
        return -1;
    }
};

class Pool {
   public:
    void set_num_threads(int num_threads) {
        std::lock_guard<std::mutex> lock(callers_);
        stop();
        ranges_ = std::make_unique<Range[]>(std::max(1, num_threads));
        try {
            for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
        } catch (const std::system_error&) {  // the system refuses more: the ones that there are do it all
        }
        num_threads_ = int(threads_.size()) + 1;
    }

    void run(int64_t count, void (*function)(const void*, int64_t), const void* context) {
        std::lock_guard<std::mutex> lock(callers_);
        if (threads_.empty() || count <= 1) {
            for (int64_t unit = 0; unit < count; ++unit) function(context, unit);
            return;
        }
        publish(count, function, context);
        take_units(0);
        for (Waiting waiting{this, 0}; ended_.load(std::memory_order_acquire) != count;) waiting.spend();
    }

    void expect(const void* data, int64_t num_bytes) {
        expected_.store((const char*)data, std::memory_order_relaxed);
        expected_bytes_.store(num_bytes, std::memory_order_relaxed);
    }

    ~Pool() { stop(); }

   private:
    // A thread's time without units: it brings its share of what is expected nearer, then pauses.
    struct Waiting {
        Pool* pool;
        int thread;
        const char* data = nullptr;
        int64_t at = 0, end = 0;

        void spend() {
            if (const char* now = pool->expected_.load(std::memory_order_relaxed); now != data) {
                const int64_t share = pool->expected_bytes_.load(std::memory_order_relaxed) / pool->num_threads_;
                data = now;
                at = share * thread;
                end = at + std::min(share, EXPECTED_BYTES);
            }
            if (data && at < end)
                for (const int64_t stop = at + BYTES_PER_SPIN; at < stop; at += 64) __builtin_prefetch(data + at, 0, 2);
            else
                PAUSE();
        }
    };

    void publish(int64_t count, void (*function)(const void*, int64_t), const void* context) {
        thread_local const int niceness = getpriority(PRIO_PROCESS, 0);
        niceness_.store(niceness, std::memory_order_relaxed);
        function_ = function;
        context_ = context;
        ended_.store(0, std::memory_order_relaxed);
        for (int thread = 0; thread < num_threads_; ++thread)
            ranges_[thread].set(count * thread / num_threads_, count * (thread + 1) / num_threads_);
        wakes_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) wakes_.notify_all();
    }

    bool take_units(int thread) {
        int64_t num_taken = 0;
        for (int i = 0; i < num_threads_; ++i) {
            Range& range = ranges_[(thread + i) % num_threads_];
            for (int64_t unit; (unit = range.claim()) >= 0; ++num_taken) {
                function_(context_, unit);
                ended_.fetch_add(1, std::memory_order_release);
            }
        }
        return num_taken > 0;
    }

    void serve(int thread) {
        int niceness = getpriority(PRIO_PROCESS, 0);  // of this thread alone, on Linux
        for (Waiting waiting{this, thread};;) {
            // No thread ranks before the one that it works for.
            if (const int now = niceness_.load(std::memory_order_relaxed); now > niceness) setpriority(PRIO_PROCESS, 0, niceness = now);
            const uint32_t wakes = wakes_.load(std::memory_order_seq_cst);
            if (is_stopping_.load()) return;  // asked after the wakes were read: a stop in between is a wake
            if (take_units(thread) || spin(wakes, waiting)) continue;
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wakes_.wait(wakes);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    // True as soon as there is another job.
    bool spin(uint32_t wakes, Waiting& waiting) {
        const auto end = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < SPINS_PER_LOOK; ++i) {
                if (wakes_.load(std::memory_order_relaxed) != wakes) return true;
                waiting.spend();
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
        num_threads_ = 1;  // the next ones look at no more ranges than there are
        is_stopping_.store(false);
    }

    std::mutex callers_;
    std::vector<std::thread> threads_;
    std::atomic<int> num_threads_{1}, niceness_{0};
    std::unique_ptr<Range[]> ranges_;
    std::atomic<bool> is_stopping_{false};
    std::atomic<int64_t> ended_{0};
    std::atomic<uint32_t> wakes_{0}, sleepers_{0};
    std::atomic<const char*> expected_{nullptr};
    std::atomic<int64_t> expected_bytes_{0};
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

void expect(const void* data, int64_t num_bytes) { pool().expect(data, num_bytes); }

extern "C" void baton_set_num_threads(int num_threads) { pool().set_num_threads(num_threads); }
