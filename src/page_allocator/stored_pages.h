// Pages of one group that are found by their tokens, as its PagePool sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace octavo {

template <class T>
class ZeroedArray {  // from calloc: memory that is not used is never touched
  public:
    explicit ZeroedArray(size_t size) : data_(static_cast<T*>(std::calloc(size, sizeof(T)))) {
        if (!data_) throw std::bad_alloc();
    }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

  private:
    struct Free {
        void operator()(T* data) const { std::free(data); }
    };
    std::unique_ptr<T[], Free> data_;
};

// The pages that nobody holds are idle: free, but found until evict() takes them.
class StoredPages {
  public:
    virtual ~StoredPages() = default;

    virtual void push_idle(int32_t page) noexcept = 0;
    virtual void remove_idle(int32_t page) noexcept = 0;
    virtual int32_t evict() noexcept = 0;  // an idle page, no longer stored
    virtual int32_t num_idle() const = 0;

    // Throws Error at the first contradiction. Whether each page is stored, and whether it is idle.
    virtual void check(const std::vector<bool>& is_stored, const std::vector<bool>& is_idle) const = 0;
};

// Pages in the order in which they became idle. A node has next_idle and previous_idle.
template <class Node>
class IdleList {
  public:
    static constexpr int32_t kNone = -1;

    int32_t size() const { return size_; }
    int32_t first() const { return first_; }

    void push_back(ZeroedArray<Node>& nodes, int32_t page) noexcept { insert(nodes, page, last_, kNone); }
    void push_front(ZeroedArray<Node>& nodes, int32_t page) noexcept { insert(nodes, page, kNone, first_); }
    void remove(ZeroedArray<Node>& nodes, int32_t page) noexcept {
        const Node& node = nodes[page];
        (node.previous_idle == kNone ? first_ : nodes[node.previous_idle].next_idle) = node.next_idle;
        (node.next_idle == kNone ? last_ : nodes[node.next_idle].previous_idle) = node.previous_idle;
        --size_;
    }

  private:
    void insert(ZeroedArray<Node>& nodes, int32_t page, int32_t previous, int32_t next) noexcept {
        nodes[page].previous_idle = previous;
        nodes[page].next_idle = next;
        (previous == kNone ? first_ : nodes[previous].next_idle) = page;
        (next == kNone ? last_ : nodes[next].previous_idle) = page;
        ++size_;
    }

    int32_t first_ = kNone, last_ = kNone;
    int32_t size_ = 0;
};

}  // namespace octavo
