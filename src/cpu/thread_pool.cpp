#include "cpu/thread_pool.h"

#include "cpu/float_mode.h"

#include <octavo/build_info.h>
#include <octavo/error.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace octavo {
namespace cpu {
namespace {

// std::condition_variable::wait would bind to a newer libstdc++ than the rest of the library needs.
class Condition {
  public:
    void wait(std::unique_lock<std::mutex>& lock) {
        pthread_cond_wait(&condition_, lock.mutex()->native_handle());
    }
    void notify_all() { pthread_cond_broadcast(&condition_); }

  private:
    pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

struct Job {
    const std::function<void(int64_t)>& body;
    const int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<int> num_helpers{0};  // pool threads inside; changed under the pool's mutex
    std::exception_ptr error{};       // set under it, and read when no thread is inside
};

// Waits for what is about to happen, but no longer than it takes to fall asleep and to be woken: in a virtual
// machine some 30 us, as much as a layer's smaller products. Who waits longer sleeps, so that a thread that
// the system has taken off its core keeps no other from working.
constexpr std::chrono::microseconds kSpin{50};

template <class Condition>
bool spin_until(const Condition& holds) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (holds()) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

constexpr int kMostThreads = 65536;

int default_num_threads() {
    if (const char* text = std::getenv("OCTAVO_NUM_THREADS"); text && *text) {
        char* end = nullptr;
        long n = std::strtol(text, &end, 10);
        if (*end || n < 1 || n > kMostThreads) {
            throw ValueError(std::string("OCTAVO_NUM_THREADS (") + text + ") must be an integer from 1 to " +
                             std::to_string(kMostThreads));
        }
        return static_cast<int>(n);
    }
#ifdef __linux__
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) return std::max(1, CPU_COUNT(&cores));
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Whether other programs want the cores as well. Then a thread's spin is taken from its own share, and beside
// a busy process on each core a model's layers take a fifth longer. It shows in the time for which a thread
// that spins could run and has no core: nearly none on an idle machine, where only the system's own work
// takes one now and then, and nearly half beside busy processes. Of threads that sleep it would count
// wake-ups as well, so the question is asked again while they spin, after a pause.
class Contention {
  public:
    // Called by the one thread whose time is counted.
    bool seen() {
        const auto now = std::chrono::steady_clock::now();
        if (now < end_) return is_seen_;
        const std::optional<std::chrono::nanoseconds> waited = time_without_core();
        is_seen_ = !is_seen_ && waited && waited_ && *waited - *waited_ > kLeastShare * (now - begin_);
        waited_ = waited;
        begin_ = now;
        end_ = is_seen_ ? now + kPause : now + kWindow;
        return is_seen_;
    }

  private:
    static constexpr std::chrono::milliseconds kWindow{50};  // several turns of processes that share a core
    static constexpr std::chrono::seconds kPause{1};
    static constexpr double kLeastShare = 0.05;

    // Of this thread, as Linux counts it. Nothing where /proc does not tell: then threads always spin.
    static std::optional<std::chrono::nanoseconds> time_without_core() {
        char text[64] = {};  // the time with a core, that without one, and another number
        const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        if (file < 0) return {};
        const ssize_t length = read(file, text, sizeof text - 1);
        close(file);
        const char* const behind_first = length > 0 ? std::strchr(text, ' ') : nullptr;
        if (!behind_first) return {};
        return std::chrono::nanoseconds(std::strtoll(behind_first, nullptr, 10));
    }

    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now(), end_ = begin_ + kWindow;
    std::optional<std::chrono::nanoseconds> waited_ = time_without_core();
    bool is_seen_ = false;
};

std::atomic<int> g_num_threads{0};  // 0: not asked for yet

// Every call of parallel_for queues a job and works on it; idle threads of the pool help with the first job
// that has work left. A caller never works on another's job, so that waiting cannot run in a circle.
class ThreadPool {
  public:
    void run(Job& job) {
        bool has_sleepers = false;
        {
            std::lock_guard lock(mutex_);
            add_workers(std::min<int64_t>(get_num_threads(), job.count) - 1);
            jobs_.push_back(&job);
            num_queued_.fetch_add(1, std::memory_order_release);
            has_sleepers = num_sleepers_ > 0;
        }
        if (has_sleepers) wake_.notify_all();
        work_on(job);
        std::unique_lock lock(mutex_);
        remove(job);
        if (job.num_helpers == 0) return;
        lock.unlock();
        // A helper that has left does not touch the job again, so that the job may go.
        if (spin_until([&] { return job.num_helpers.load(std::memory_order_acquire) == 0; })) return;
        lock.lock();
        while (job.num_helpers > 0) done_.wait(lock);
    }

    // Lets threads beyond get_num_threads() end.
    void shrink() {
        std::lock_guard lock(mutex_);
        wake_.notify_all();
    }

  private:
    // Up to `wanted` in all. The system may have no more threads to give: fewer do the same work.
    void add_workers(int64_t wanted) {
        try {
            for (; num_workers_ < wanted; ++num_workers_) std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {
        }
    }

    void work() {
        const DefaultFloatMode mode;  // not that of the caller who happened to need the thread first
        Contention contention;
        std::unique_lock lock(mutex_);
        bool expects_work = true;
        for (;;) {
            if (num_workers_ > get_num_threads() - 1) break;
            if (jobs_.empty()) {
                if (expects_work) {
                    const uint64_t seen = num_queued_.load(std::memory_order_relaxed);
                    lock.unlock();
                    expects_work =
                        spin_until([&] { return num_queued_.load(std::memory_order_acquire) != seen; }) &&
                        !contention.seen();
                    lock.lock();
                } else {
                    ++num_sleepers_;
                    wake_.wait(lock);
                    --num_sleepers_;
                }
                continue;
            }
            Job& job = *jobs_.front();
            ++job.num_helpers;
            lock.unlock();
            work_on(job);
            lock.lock();
            remove(job);
            if (--job.num_helpers == 0) done_.notify_all();
            lock.unlock();
            expects_work = !contention.seen();
            lock.lock();
        }
        --num_workers_;
    }

    void work_on(Job& job) {
        try {
            for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.body(i);
        } catch (...) {
            job.next.store(job.count, std::memory_order_relaxed);
            std::lock_guard lock(mutex_);
            if (!job.error) job.error = std::current_exception();
        }
    }

    void remove(Job& job) { jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end()); }

    std::mutex mutex_;
    Condition wake_, done_;
    std::vector<Job*> jobs_;  // those that may have work left
    std::atomic<uint64_t> num_queued_{0};
    int num_workers_ = 0;
    int num_sleepers_ = 0;
};

// The pool's threads run code that must not go before they do: where this is part of a library that a program
// loads and unloads, such as a plugin, the library stays.
void stay_in_memory() {
    Dl_info here;
    if (!dladdr(reinterpret_cast<void*>(&stay_in_memory), &here)) return;
    dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);  // finds no program, and changes nothing
}

// Never destroyed: its threads may outlive every static object. A forked child has none of them and starts
// over with a pool of its own, whatever state the parent's was in.
ThreadPool* g_pool = nullptr;

ThreadPool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        stay_in_memory();
        g_pool = new ThreadPool;
        pthread_atfork(nullptr, nullptr, [] { g_pool = new ThreadPool; });
    });
    return *g_pool;
}

}  // namespace

void parallel_for(int64_t count, const std::function<void(int64_t)>& body) {
    if (count <= 1 || get_num_threads() == 1) {
        for (int64_t i = 0; i < count; ++i) body(i);
        return;
    }
    Job job{body, count};
    pool().run(job);
    if (job.error) std::rethrow_exception(job.error);
}

void check_num_threads(int64_t num_threads) {
    if (num_threads >= 1 && num_threads <= kMostThreads) return;
    throw ValueError("set_num_threads: num_threads (" + std::to_string(num_threads) + ") must be from 1 to " +
                     std::to_string(kMostThreads));
}

}  // namespace cpu

void set_num_threads(int num_threads) {
    cpu::check_num_threads(num_threads);
    cpu::g_num_threads = num_threads;
    cpu::pool().shrink();
}

int get_num_threads() {
    int n = cpu::g_num_threads;
    if (n == 0) {
        int expected = 0;
        n = cpu::default_num_threads();
        if (!cpu::g_num_threads.compare_exchange_strong(expected, n)) n = expected;
    }
    return n;
}

}  // namespace octavo
